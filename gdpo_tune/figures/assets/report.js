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
  "rgba(255,255,255,0.8)": "rgba(20,24,30,0.8)", "#882255": "#c25f8c", "#0072b2": "#3d9fd8",
  "rgba(0,114,178,": "rgba(61,159,216,",
};
const prefersDark = matchMedia("(prefers-color-scheme: dark)");

function draw(dark) {
  for (const box of document.querySelectorAll(".figure")) {
    let text = document.getElementById(box.id.replace("figure-", "data-")).textContent;
    if (dark) for (const [light, other] of Object.entries(DARK)) text = text.replaceAll('"' + light, '"' + other);
    const { data, layout } = JSON.parse(text);
    Plotly.react(box, data, layout, JSON.parse(box.dataset.config));
  }
}
draw(prefersDark.matches);
prefersDark.addEventListener("change", () => draw(prefersDark.matches));
if (prefersDark.matches) {
  addEventListener("beforeprint", () => draw(false));
  addEventListener("afterprint", () => draw(prefersDark.matches));
}
