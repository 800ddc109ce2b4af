"use strict";
// Sorting of the trials' table: numbers as numbers, missing values always last.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    head.firstElementChild.addEventListener("click", () => {
      const descending = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      const rows = [...table.tBodies[0].rows];
      rows.sort((a, b) => compare(a.cells[column].dataset.sort, b.cells[column].dataset.sort, descending));
      table.tBodies[0].append(...rows);
    });
  });
}

function compare(a, b, descending) {
  if (a === "" || b === "") return (a === "") - (b === "");
  const order = isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b;
  return descending ? -order : order;
}

// Figures: drawn from the data beside them, in the colours that suit the page.
const DARK = {
  "#1c2430": "#e4e8ee", "#667085": "#a3adbb", "#aab2bf": "#5d6775", "#e9ecf1": "#2a313b", "#ffffff": "#14181e",
  "rgba(255,255,255,0.8)": "rgba(20,24,30,0.8)", "#882255": "#c25f8c", "#0072b2": "#3d9fd8", "#7b3294": "#b07cc6",
  "#8c510a": "#c98a3d", "#332288": "#8c7fd6",
  "rgba(0,114,178,": "rgba(61,159,216,", "rgba(123,50,148,": "rgba(176,124,198,",
};
const PAPER_WIDTH = 700, PANEL = 270, GAP = 70;  // pixels
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const afterDrawing = [];

function readData(name) {
  return document.getElementById(`data-${name}`).textContent;
}

// Without a width in pixels, figures fill the page.
function draw(dark, width) {
  for (const box of document.querySelectorAll(".figure")) {
    let text = readData(box.id.replace("figure-", ""));
    if (dark) for (const [light, other] of Object.entries(DARK)) text = text.replaceAll('"' + light, '"' + other);
    const { data, layout } = JSON.parse(text);
    box.style.width = width ? `${width}px` : "";
    if (width) layout.width = width;
    if ("stacks" in box.dataset) stack(box, layout);
    Plotly.react(box, data, layout, JSON.parse(box.dataset.config));
  }
  afterDrawing.forEach((action) => action());
}

function countColumns(width) {
  return width >= 900 ? 3 : width >= 560 ? 2 : 1;
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
  layout.height = inner + layout.margin.t + layout.margin.b;
  box.style.height = `${layout.height}px`;
}

draw(prefersDark.matches);
prefersDark.addEventListener("change", () => draw(prefersDark.matches));
let columns = countColumns(document.body.clientWidth);
addEventListener("resize", () => {
  if (matchMedia("print").matches || columns === countColumns(document.body.clientWidth)) return;
  columns = countColumns(document.body.clientWidth);
  draw(prefersDark.matches);
});
addEventListener("beforeprint", () => draw(false, PAPER_WIDTH));
addEventListener("afterprint", () => draw(prefersDark.matches));

// Copying of commands; a browser that refuses selects the text instead.
for (const button of document.querySelectorAll("button.copy")) {
  button.addEventListener("click", async () => {
    const code = button.previousElementSibling;
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    } catch {
      getSelection().selectAllChildren(code);
    }
  });
}
