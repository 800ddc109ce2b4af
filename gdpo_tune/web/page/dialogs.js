"use strict";
// Dialogs: a configuration to add or to clone, and a question before a trial is stopped.
const byId = (id) => document.getElementById(id);

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name in made && name !== "list") made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// Leave a request; return the problem, or "" if it was taken.
async function ask(action, args) {
  let answer;
  try {
    answer = await fetch("api/requests", {
      method: "POST",
      headers: { "Content-Type": "application/json", "X-Gdpo-Tune": "page" },
      body: JSON.stringify({ action, arguments: args }),
    });
  } catch {
    return "The server of this page does not answer: nothing was asked.";
  }
  if (answer.ok) {
    refreshSoon();
    return "";
  }
  const text = await answer.text();
  try { return JSON.parse(text).problem; } catch { return text; }
}

let fields = []; // fields of the open dialog: { name, control, initial, when, read, label, row, wasUsed }

// Open the dialog with `values`; `send` gets { name: value } of the fields that have an effect, that of the changed ones and those
// that had no effect before, and { force: true } for values outside of the space.
async function openConfiguration(title, note, values, send) {
  const answer = await fetch("api/space");
  if (!answer.ok) return;
  const space = await answer.json();
  byId("configuration-title").textContent = title;
  byId("configuration-note").textContent = note;
  byId("configuration-problem").hidden = true;
  fields = space.map((field) => buildField(field, field.name in values ? values[field.name] : field.centre));
  byId("fields").replaceChildren(...fields.flatMap((field) => [field.label, field.row]));
  byId("force").checked = false;
  byId("force-row").hidden = true;
  markUnused();
  for (const field of fields) field.wasUsed = !field.control.disabled;
  byId("configuration-form").onsubmit = async (event) => {
    event.preventDefault();
    const used = fields.filter((field) => !field.control.disabled);
    const wrong = used.find((field) => field.read() === null);
    const chosen = Object.fromEntries(used.map((field) => [field.name, field.read()]));
    const changed = Object.fromEntries(used.filter((f) => !f.wasUsed || f.read() !== f.initial).map((f) => [f.name, f.read()]));
    const forced = byId("force").checked && !byId("force-row").hidden ? { force: true } : {};
    const problem = wrong ? wrong.label.textContent + ": write a number" : await send(chosen, changed, forced);
    byId("configuration-problem").hidden = !problem;
    byId("configuration-problem").textContent = problem;
    if (!problem) byId("configuration").close();
  };
  byId("configuration").showModal();
}

function buildField(field, initial) {
  const id = "field-" + field.name, hint = id + "-hint";
  const short = typeof initial === "number" ? String(Number(initial.toPrecision(4))) : "";
  const note = element("small", { id: hint, textContent: field.range ?? "" });
  const control = field.choices
    ? element("select", { id, "aria-describedby": hint }, ...field.choices.map((choice) =>
        element("option", { value: JSON.stringify(choice), textContent: String(choice), selected: choice === initial })))
    : element("input", { id, type: "number", step: field.integer ? "1" : "any", required: true, value: short, "aria-describedby": hint });
  const read = () => {
    if (field.choices) return JSON.parse(control.value);
    if (control.value === short) return initial; // untouched, with all its digits
    return control.value === "" || !control.checkValidity() ? null : Number(control.value);
  };
  control.addEventListener("input", () => {
    markUnused();
    if (field.choices) return;
    const value = read(), outside = value !== null && (value < field.low || value > field.high);
    note.classList.toggle("outside", outside);
    note.textContent = field.range + (outside ? ": outside of the searched range" : "");
    byId("force-row").hidden = !byId("fields").querySelector(".outside");
  });
  const label = element("label", { textContent: field.label });
  label.htmlFor = id;
  return { name: field.name, control, initial, when: field.when, read, label, row: element("div", {}, control, note) };
}

// Disable the fields without effect under the values of the others.
function markUnused() {
  for (const field of fields) {
    const holds = Object.entries(field.when).every(([name, values]) => {
      const parent = fields.find((other) => other.name === name);
      return !parent || (!parent.control.disabled && values.includes(parent.read()));
    });
    field.control.disabled = !holds;
    for (const part of [field.label, field.row]) part.classList.toggle("unused", !holds);
  }
}

function openConfirmation(title, note, verb, send) {
  byId("confirmation-title").textContent = title;
  byId("confirmation-note").textContent = note;
  byId("confirmation-send").textContent = verb;
  byId("confirmation-form").onsubmit = () => { send(); };
  byId("confirmation").showModal();
}

for (const name of ["configuration", "confirmation"]) {
  byId(name + "-cancel").addEventListener("click", () => byId(name).close());
}
