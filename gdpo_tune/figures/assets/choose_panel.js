"use strict";
// The panel that chooses a policy. It needs choice.js and, for the figures, report.js.
const panel = document.getElementById("choose");
if (panel) startPanel(JSON.parse(readData("choices")));

function startPanel({ objectives, limits, members, chosen }) {
  panel.hidden = false;
  const byName = new Map(members.map((member) => [member.name, member]));
  const rows = document.querySelectorAll("table.front tbody tr");
  const cards = document.querySelectorAll("article.card");
  const controls = [...panel.querySelectorAll("[data-limit]")];
  const rule = document.getElementById("prefer");
  const answer = document.getElementById("choose-answer");
  const loosen = document.getElementById("choose-loosen");
  const points = document.getElementById("data-pairs")
    ? [...JSON.parse(readData("pairs")).data.entries()].map(([i, trace]) => [trace, i]).filter(([trace]) => trace.customdata)
    : [];
  let byHand = chosen;
  let state = {};
  let frame = 0;

  function readLimits() {
    return controls.flatMap((control, index) => {
      const text = control.querySelector("[type=number]").value;
      return text === "" ? [] : [{ ...limits[index], value: Number(text) }];
    });
  }

  function update() {
    const unread = controls.findIndex((control) => control.querySelector("[type=number]").validity.badInput);
    if (unread >= 0) {
      answer.textContent = `The limit of ${limits[unread].name} is not a number, so nothing has changed.`;
      return;
    }
    const active = readLimits();
    const fitting = listFitting(members, active);
    const preferred = choose(fitting, objectives, rule.value);
    const closest = fitting.length ? undefined : findClosest(members, active);
    const selected = byHand ?? (preferred ?? closest).name;
    state = { fitting: new Set(fitting.map((member) => member.name)), selected };
    const pick = byHand ?? writePick(rule.value, active);
    explain(active, fitting, preferred, closest);
    writeCommands(active, pick, fitting.length > 0 || byHand !== null);
    show();
    Object.assign(panel.dataset, { selected, pick, fitting: fitting.length });
  }

  function explain(active, fitting, preferred, closest) {
    const all = active.length ? `${fitting.length} of ${members.length}` : `All ${members.length}`;
    const count = `${all} policies on the front fit.`;
    document.getElementById("choose-reset").hidden = !active.length && byHand === null;
    loosen.hidden = !closest;
    if (closest) {
      const broken = active.filter((limit) => !satisfies(closest, limit));
      const values = broken.map(({ name }) => `${name} ${(closest.values[name] ?? NaN).toPrecision(3)}`);
      answer.textContent = "No policy on the front fits. "
        + `The closest, ${title(closest.name)}, has ${values.join(", ")}: loosen ${writeConditions(broken)}.`;
    } else if (byHand !== null) {
      answer.textContent = `Selected: ${title(byHand)}. ${count}`;
    } else {
      answer.textContent = `${count} Best choice: ${title(preferred.name)}.`;
    }
  }

  function writeCommands(active, pick, hasPick) {
    const merge = active.filter((limit) => limit.merges);
    const target = merge.length ? `--toward ${quote(writeConditions(merge))}` : "";
    document.getElementById("choose-merge").hidden = !target;
    for (const code of document.querySelectorAll("code[data-template]")) {
      const card = code.closest("article.card");
      // No rule picks the closest member, so its card names it.
      const text = card && (!hasPick || card.dataset.candidate !== state.selected) ? card.dataset.candidate : pick;
      code.textContent = code.dataset.template.replace("{pick}", () => quote(text)).replace("{target}", () => target);
    }
    const selected = [...cards].find((card) => card.dataset.candidate === state.selected);
    panel.querySelector(".command").hidden = !hasPick || !selected.querySelector(".command");
  }

  function show() {
    for (const row of rows) {
      const name = row.dataset.candidate;
      row.classList.toggle("selected", name === state.selected);
      row.classList.toggle("misfit", byName.has(name) && !state.fitting.has(name));
      row.hidden = !showAll.expanded && !("listed" in row.dataset) && name !== state.selected;
    }
    for (const card of cards) card.hidden = card.dataset.candidate !== state.selected;
    for (const head of document.querySelectorAll("[data-column]")) {
      const { column, listed } = head.dataset, isSelected = column === state.selected;
      for (const row of head.closest("table").rows) {
        const cell = row.cells[head.parentElement.cellIndex];
        cell.hidden = !(showCompletions.expanded || listed !== undefined || isSelected);
        cell.classList.toggle("selected", isSelected);
      }
    }
    highlight();
  }

  // Once a frame: a slider that moves asks more often.
  function highlight() {
    cancelAnimationFrame(frame);
    frame = requestAnimationFrame(markPoints);
  }

  function markPoints() {
    const figure = document.getElementById("figure-pairs");
    if (!figure?.data) return;
    const marked = points.map(([trace]) => trace);
    const fits = (name) => !byName.has(name) || state.fitting.has(name);
    const opacities = marked.map((trace) => trace.customdata.map((name) => (fits(name) ? 1 : 0.12)));
    Plotly.restyle(figure, { "marker.opacity": opacities }, points.map(([, index]) => index));
    const barred = points.filter(([trace]) => trace.error_x);
    const bars = (key) => barred.map(([trace]) => trace.customdata.map(
      (name, i) => (fits(name) ? trace[key].array[i] : 0)));
    Plotly.restyle(
      figure, { "error_x.array": bars("error_x"), "error_y.array": bars("error_y") }, barred.map(([, index]) => index),
    );
    const color = getComputedStyle(document.body).getPropertyValue("--accent");
    const rings = marked.flatMap((trace) => {
      const index = trace.customdata.indexOf(state.selected);
      return index < 0 ? [] : [{
        type: "circle", xref: trace.xaxis ?? "x", yref: trace.yaxis ?? "y", name: "selected",
        xsizemode: "pixel", ysizemode: "pixel", xanchor: trace.x[index], yanchor: trace.y[index],
        x0: -12, x1: 12, y0: -12, y1: 12, line: { color, width: 3 },
      }];
    });
    const others = (figure.layout.shapes ?? []).filter((shape) => shape.name !== "selected");
    Plotly.relayout(figure, { shapes: [...others, ...rings] });
  }

  function select(name) {
    byHand = name;
    update();
  }

  function title(name) {
    return document.querySelector(`[data-select="${CSS.escape(name)}"]`)?.textContent ?? name;
  }

  controls.forEach((control, index) => {
    const [slider, field] = control.querySelectorAll("input");
    const apply = (follow) => {
      follow();
      byHand = null;
      update();
    };
    slider.addEventListener("input", () => apply(() => {
      field.value = Number(slider.value) === limits[index].loosest ? "" : slider.value;
    }));
    field.addEventListener("input", () => apply(() => {
      slider.value = field.value === "" ? limits[index].loosest : field.value;
    }));
  });
  rule.addEventListener("change", () => select(null));
  panel.addEventListener("submit", (event) => event.preventDefault());
  panel.addEventListener("reset", () => setTimeout(() => select(null)));
  loosen.addEventListener("click", () => {
    const active = readLimits();
    const closest = findClosest(members, active);
    controls.forEach((control, index) => {
      const [slider, field] = control.querySelectorAll("input");
      const limit = { ...limits[index], value: Number(field.value) };
      if (field.value === "" || satisfies(closest, limit)) return;
      const round = limit.comparison === ">=" ? Math.floor : Math.ceil;
      const unit = Math.min(0.001, Number(slider.step)); // small values have smaller steps
      field.value = Number((round(closest.values[limit.name] / unit) * unit).toPrecision(12));
      slider.value = field.value;
    });
    select(null);
  });
  for (const button of document.querySelectorAll("[data-select]")) {
    button.addEventListener("click", () => select(button.dataset.select));
  }
  const showAll = makeToggle("show-all", "policies on the front", rows);
  const showCompletions = makeToggle("show-all-completions", "policies", document.querySelectorAll("[data-column]"));
  function makeToggle(id, noun, items) {
    const button = document.getElementById(id), toggle = { expanded: false };
    if (!button) return toggle;
    const label = () => {
      button.setAttribute("aria-expanded", toggle.expanded);
      button.textContent = toggle.expanded ? "Show fewer" : `Show all ${button.dataset.count} ${noun}`;
    };
    button.hidden = [...items].every(({ dataset }) => "listed" in dataset);
    button.addEventListener("click", () => { toggle.expanded = !toggle.expanded; label(); show(); });
    label();
    return toggle;
  }

  const hasCard = (name) => [...cards].some((card) => card.dataset.candidate === name);
  function listenToPoints() {
    const figure = document.getElementById("figure-pairs");
    figure?.removeAllListeners?.("plotly_click");
    figure?.on?.("plotly_click", ({ points }) => {
      const name = points[0].customdata;
      if (hasCard(name)) select(name);
      else location.hash = `trial-${name.split("@")[0].replace("merge-", "")}`;
    });
    highlight();
  }
  afterDrawing.push(listenToPoints);
  update();
  listenToPoints();
}

function quote(text) {
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}
