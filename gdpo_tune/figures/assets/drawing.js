"use strict";
// Colours and columns of figures, which are data with the colours of a light and wide page.
const DARK = {
  "#1c2430": "#e4e8ee", "#667085": "#a3adbb", "#aab2bf": "#5d6775", "#e9ecf1": "#2a313b", "#ffffff": "#14181e",
  "rgba(255,255,255,0.8)": "rgba(20,24,30,0.8)", "#882255": "#c25f8c", "#0072b2": "#3d9fd8", "#8a00e6": "#b44dff",
  "#8c510a": "#c98a3d", "#332288": "#8c7fd6",
  "rgba(0,114,178,": "rgba(61,159,216,", "rgba(138,0,230,": "rgba(180,77,255,",
};
const PANEL = 270, GAP = 70, LABELLED = 288, DRAWN = 1200;  // pixels; labels and heights are for a panel and a figure of these widths

// Return the text of a figure's data with the colours that suit a dark page.
function darken(text) {
  for (const [light, other] of Object.entries(DARK)) text = text.replaceAll('"' + light, '"' + other);
  return text;
}

function countColumns(width) {
  return width >= 900 ? 3 : width >= 560 ? 2 : 1;
}

// Keep the shape of a figure in a window that is wider than most.
function enlarge(box, layout) {
  layout.height *= Math.max(1, box.clientWidth / DRAWN);
}

// Move the panels of a figure below one another where three do not fit.
function stack(box, layout) {
  const axes = Object.keys(layout).filter((key) => /^xaxis\d*$/.test(key));
  const columns = countColumns(box.clientWidth);
  if (columns >= Math.min(axes.length, 3)) {
    box.style.height = `${layout.height}px`;
    return;
  }
  const rows = Math.ceil(axes.length / columns), gap = 0.12;
  const inner = rows * PANEL + (rows - 1) * GAP, width = (1 - gap * (columns - 1)) / columns;
  axes.forEach((key, index) => {
    const left = (index % columns) * (width + gap), top = Math.floor(index / columns) * (PANEL + GAP);
    layout[key].domain = [left, left + width];
    layout[key.replace("x", "y")].domain = [Math.max(0, 1 - (top + PANEL) / inner), 1 - top / inner];
  });
  layout.margin.t += 40;  // a legend of more lines
  layout.margin.r = 12;
  const shrunk = Math.min(1, ((box.clientWidth - layout.margin.l - layout.margin.r) * width) / LABELLED);
  for (const label of layout.annotations ?? []) {
    Object.assign(label, { ax: label.ax * shrunk, font: { ...label.font, size: label.font.size * shrunk } });
  }
  layout.height = inner + layout.margin.t + layout.margin.b;
  box.style.height = `${layout.height}px`;
}
