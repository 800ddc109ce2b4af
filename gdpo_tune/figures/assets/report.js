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
const PAPER_WIDTH = 700;  // pixels
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const afterDrawing = [];

function readData(name) {
  return document.getElementById(`data-${name}`).textContent;
}

// Without a width in pixels, figures fill the page.
function draw(dark, width) {
  for (const box of document.querySelectorAll(".figure")) {
    const text = readData(box.id.replace("figure-", ""));
    const { data, layout } = JSON.parse(dark ? darken(text) : text);
    box.style.width = width ? `${width}px` : "";
    if (width) layout.width = width;
    enlarge(box, layout);
    if ("stacks" in box.dataset) stack(box, layout);
    Plotly.react(box, data, layout, JSON.parse(box.dataset.config));
    box.querySelector(".still")?.remove();
  }
  afterDrawing.forEach((action) => action());
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
  button.hidden = false;
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
