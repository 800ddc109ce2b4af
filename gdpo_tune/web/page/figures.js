"use strict";
// Figures: fetched when their version changes, drawn in the colours and columns that suit the page.
const CONFIG = { displaylogo: false, responsive: true, displayModeBar: false };
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const figures = {}; // name -> { box, version, text }

async function updateFigure(name, box, version) {
  const figure = (figures[name] ??= { box: document.getElementById(box), version: null, text: null });
  if (figure.version === version) return;
  const answer = await fetch("/api/figure/" + name);
  if (!answer.ok) return;
  figure.text = await answer.text();
  figure.version = version;
  drawFigure(figure);
}

function drawFigure(figure) {
  const content = JSON.parse(prefersDark.matches ? darken(figure.text) : figure.text);
  if (content === null) {
    Plotly.purge(figure.box);
    figure.box.replaceChildren();
    return;
  }
  if (figure.box.id === "front") arrange(content.layout, figure.box.parentElement.clientWidth);
  figure.columns = countColumns(figure.box.parentElement.clientWidth);
  figure.box.style.height = content.layout.height + "px";
  Plotly.react(figure.box, content.data, content.layout, CONFIG);
}

function countColumns(width) { return width < 560 ? 1 : width < 960 ? 2 : 3; }

// Place the panels of a figure in as many columns as the page has room for.
function arrange(layout, width) {
  const names = Object.keys(layout).filter((name) => /^xaxis\d*$/.test(name));
  const columns = Math.min(countColumns(width), names.length), rows = Math.ceil(names.length / columns);
  if (columns === Math.min(3, names.length)) return;
  const height = 340, space = 70, across = 0.1;
  const inner = rows * height + (rows - 1) * space;
  const wide = (1 - across * (columns - 1)) / columns;
  names.forEach((name, index) => {
    const column = index % columns, row = Math.floor(index / columns);
    const top = inner - row * (height + space);
    layout[name].domain = [column * (wide + across), column * (wide + across) + wide];
    layout[name.replace("x", "y")].domain = [Math.max(0, (top - height) / inner), top / inner];
  });
  layout.height = inner + layout.margin.t + layout.margin.b;
}

function redrawFigures() {
  for (const figure of Object.values(figures)) if (figure.text) drawFigure(figure);
}
prefersDark.addEventListener("change", redrawFigures);
addEventListener("resize", () => {
  const front = figures.front;
  if (front?.text && countColumns(front.box.parentElement.clientWidth) !== front.columns) drawFigure(front);
});
