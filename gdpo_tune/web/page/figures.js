"use strict";
// Figures: fetched when their version changes, drawn in the colours and columns that suit the page.
const CONFIG = { displaylogo: false, responsive: true, displayModeBar: false };
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const figures = {}; // name -> { box, version, text }

async function updateFigure(name, box, version) {
  const figure = (figures[name] ??= { box: document.getElementById(box), version: null, text: null });
  if (figure.version === version) return;
  const answer = await fetch("api/figure/" + name);
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
  figure.columns = countColumns(figure.box.clientWidth);
  enlarge(figure.box, content.layout);
  figure.box.style.height = content.layout.height + "px";
  if (figure.box.id === "front") stack(figure.box, content.layout);
  Plotly.react(figure.box, content.data, content.layout, CONFIG);
}

function redrawFigures() {
  for (const figure of Object.values(figures)) if (figure.text) drawFigure(figure);
}
prefersDark.addEventListener("change", redrawFigures);
addEventListener("resize", () => {
  const front = figures.front;
  if (front?.text && countColumns(front.box.clientWidth) !== front.columns) drawFigure(front);
});
