"use strict";
// The live page: asks for the state every second, and changes only what is new.
const SECOND = 1000, HIDDEN = 10 * SECOND, PATIENCE = 15 * SECOND;
const NO_VALUE = "\u2014";
let state = null, tag = "", timer = 0, isAway = false, isAsking = false;
let ahead = 0, answered = Date.now(); // how far the server's clock is ahead of this one, and when it last answered; milliseconds

if (location.search) history.replaceState(null, "", location.pathname); // the cookie has the token from here on

function formatDuration(seconds) {
  const whole = Math.max(0, Math.round(seconds)), minutes = Math.floor(whole / 60), hours = Math.floor(whole / 3600);
  if (whole < 60) return whole + " s";
  if (whole < 3600) return minutes + " min " + String(whole % 60).padStart(2, "0") + " s";
  if (whole < 48 * 3600) return hours + " h " + String(minutes % 60).padStart(2, "0") + " min";
  return Math.floor(hours / 24) + " d " + (hours % 24) + " h";
}

function formatTime(seconds) {
  const at = new Date(seconds * SECOND), today = at.toDateString() === new Date().toDateString();
  return (today ? "" : at.toLocaleDateString("sv") + " ") + at.toLocaleTimeString("sv");
}

function setText(node, text) { if (node.textContent !== text) node.textContent = text; }

function setStatus(kind, text) {
  byId("status").dataset.kind = kind;
  setText(byId("status-text"), text);
}

// Polling
function refreshSoon() {
  clearTimeout(timer);
  timer = setTimeout(refresh, 100);
}

async function refresh() {
  if (isAsking) return;
  isAsking = true;
  clearTimeout(timer);
  try {
    const answer = await fetch("api/state", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });
    answered = Date.now();
    const difference = Date.parse(answer.headers.get("Date")) - answered;
    if (Math.abs(difference - ahead) > 2 * SECOND) ahead = difference; // the header has whole seconds
    if (answer.status === 200) {
      tag = answer.headers.get("ETag");
      state = await answer.json();
      isAway = false;
      showState();
    } else if (answer.status === 304) {
      if (isAway) showState();
      isAway = false;
    } else {
      showAway("refused", "This page may not see the sweep any more: open the address that the command watch prints.");
    }
  } catch {
    showAway("away", "No answer since " + formatTime((answered + ahead) / SECOND) + ": the server of this page has ended, or the connection is lost. " +
      "Start the command watch again, or the tunnel, and the page goes on.");
  }
  isAsking = false;
  showClocks();
  timer = setTimeout(refresh, document.hidden ? HIDDEN : SECOND);
}

function showAway(kind, text) {
  isAway = true;
  setStatus(kind, text);
  setText(byId("time-left"), "");
  enableControls();
}

// Content
function showState() {
  document.title = state.name + ": " + state.status.text;
  setText(byId("name"), state.name);
  setStatus(state.status.kind, state.status.text);
  byId("problem").hidden = !state.status.problem;
  setText(byId("problem"), state.status.problem);
  byId("progress").max = Math.max(1, state.progress.planned);
  byId("progress").value = state.progress.done;
  showOnce("facts", [state.task, state.policy, state.location, state.mlflow], () => listFacts());
  showOnce("tiles", state.tiles, (tiles) => tiles.map((tile) => element("div", { className: "tile" },
    element("span", { textContent: tile.label }), element("b", { textContent: tile.value }), element("small", { textContent: tile.note }))));
  showOnce("log", state.log, (log) => log.map((line) => element("li", {}, timeOf(line.time), line.text)));
  byId("log-empty").hidden = state.log.length > 0;
  showOnce("requests", state.requests, (requests) => requests.map(buildRequest));
  byId("requests-section").hidden = !state.requests.length;
  showTables();
  byId("trials-form").hidden = state.trials === null;  // its budget decides
  const field = byId("trials"), now = String(state.trials);
  const isEdited = document.activeElement === field && ![field.dataset.shown, now].includes(field.value);
  if (!isEdited && field.dataset.shown !== now) field.value = field.dataset.shown = now;
  updateFigure("front", "front", state.figures.front).then(() => { byId("front-empty").hidden = byId("front").childElementCount > 0; });
  updateFigure("running", "curves", state.figures.running);
  enableControls();
}

const shown = {}; // id -> the data that it shows

function showOnce(id, data, build) {
  const key = JSON.stringify(data);
  if (shown[id] === key) return;
  shown[id] = key;
  byId(id).replaceChildren(...build(data));
}

function timeOf(seconds) {
  return element("time", { dateTime: new Date(seconds * SECOND).toISOString(), textContent: formatTime(seconds) });
}

function listFacts() {
  const facts = [["task", state.task], ["policy", state.policy], ["directory", state.location]];
  const items = facts.filter(([, value]) => value).map(([name, value]) =>
    element("div", {}, element("dt", { textContent: name }), element("dd", { textContent: value })));
  if (state.mlflow.text) {
    const { href, text } = state.mlflow;
    const value = href ? element("a", { href, target: "_blank", rel: "noopener noreferrer", textContent: text }) : text;
    items.push(element("div", {}, element("dt", { textContent: "MLflow" }), element("dd", {}, value)));
  }
  return items;
}

function buildRequest(request) {
  const outcome = element("td", {}, element("span", { className: "state " + request.outcome, textContent: request.outcome }));
  if (request.reason) outcome.append(" " + request.reason);
  return element("tr", {}, element("td", {}, timeOf(request.time)), element("td", { textContent: request.text }),
    element("td", { textContent: request.author }), outcome);
}

// Tables: rows stay in place while their text changes, so that the keyboard's focus stays too.
function showTables() {
  const heads = (names) => () => names.map((name) => element("th", { scope: "col", textContent: name }));
  showOnce("running-heads", state.objectives, heads(["Trial", "Configuration", "Progress", ...state.objectives, "Actions"]));
  showOnce("ended-heads", state.objectives, heads(["Trial", "State", "Configuration", ...state.objectives, "Time", "Actions"]));
  syncRows("running", state.running, buildRunningRow, updateRunningRow);
  syncRows("ended", state.ended, buildEndedRow, () => {});
  for (const name of ["running", "ended"]) {
    byId(name + "-empty").hidden = state[name].length > 0;
    byId(name + "-table").hidden = !state[name].length;
    byId(name + "-more").hidden = !state["hidden_" + name];
    setText(byId(name + "-more"), "and " + state["hidden_" + name] + " more");
  }
}

function syncRows(id, rows, build, update) {
  const body = byId(id), present = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  rows.forEach((data, index) => {
    const key = data.number + " " + JSON.stringify([data.role, data.parameters, data.state, data.front, data.note, data.color]);
    const row = present.get(key) ?? build(data);
    present.delete(key);
    row.dataset.key = key;
    row.dataset.number = data.number;
    update(row, data);
    if (body.rows[index] !== row) body.insertBefore(row, body.rows[index] ?? null);
  });
  for (const row of present.values()) row.remove();
}

function buildName(data, color) {
  const cell = element("td");
  if (color) {
    const line = element("i", { className: "curve" });
    line.style.background = color;
    cell.append(line);
  }
  cell.append(element("b", { textContent: data.title + (data.front ? " \u2605" : "") }), element("small", { textContent: data.mode ? data.role : "" }));
  return cell;
}

function buildConfiguration(data) {
  const values = state.parameters.map((name, index) => [name, data.parameters[index]]).filter(([, value]) => value !== NO_VALUE);
  const cell = element("td", { className: "configuration" });
  if (data.mode) {
    const patch = element("i", { className: "patch" });
    patch.style.background = data.mode_color;
    cell.append(patch, data.mode);
  }
  cell.append(element("small", { textContent: data.mode ? values.map(([name, value]) => name + " " + value).join(", ") : data.role }));
  return cell;
}

function buildActions(data, ...more) {
  const cell = element("td", { className: "actions" }, ...more);
  if (data.mode) {
    cell.append(element("button", { type: "button", className: "clone", textContent: "Clone", "aria-label": "Clone " + data.title,
      onclick: () => openClone(data) }));
  }
  return cell;
}

function buildRunningRow(data) {
  const bar = element("progress", { "aria-label": "Steps of " + data.title });
  const stop = element("button", { type: "button", className: "stop", textContent: "Stop", "aria-label": "Stop " + data.title, onclick: () => openStop(data) });
  return element("tr", {}, buildName(data, data.color), buildConfiguration(data), element("td", { className: "progress" }, bar, element("small")),
    ...data.values.map(() => element("td", { className: "value" })), buildActions(data, stop));
}

function updateRunningRow(row, data) {
  const bar = row.querySelector("progress");
  bar.hidden = !data.steps;
  bar.max = Math.max(1, data.steps);
  bar.value = data.step;
  row.querySelector(".progress small").dataset.started = data.started ?? "";
  row.querySelector(".progress small").dataset.steps = data.steps ? "step " + data.step + " of " + data.steps : "evaluation";
  row.querySelectorAll(".value").forEach((cell, index) => setText(cell, data.values[index]));
  const asked = state.requests.some((request) => request.action === "stop" && request.trial === data.number && request.outcome !== "refused");
  setText(row.querySelector(".stop"), asked ? "Stopping" : "Stop");
  row.querySelector(".stop").dataset.off = asked || !data.can_stop ? "yes" : "";
}

function buildEndedRow(data) {
  const condition = element("td", { className: "note-cell" }, element("span", { className: "state " + data.state, textContent: data.state_name }));
  if (data.note) condition.append(element("small", { textContent: data.note }));
  return element("tr", {}, buildName(data), condition, buildConfiguration(data),
    ...data.values.map((value) => element("td", { className: "value", textContent: value.replace("\u00b1 ", "\u00b1\u00a0") })), element("td", { textContent: data.time }), buildActions(data));
}

// What time alone changes
function showClocks() {
  if (!state || isAway) return;
  const now = (Date.now() + ahead) / SECOND;
  setText(byId("time-left"), state.ends_at === null ? "" : "About " + formatDuration(state.ends_at - now) + " left.");
  for (const small of document.querySelectorAll(".progress small")) {
    const since = small.dataset.started ? ", " + formatDuration(now - Number(small.dataset.started)) : "";
    setText(small, small.dataset.steps + since);
  }
}

// Steering
function enableControls() {
  const kind = isAway || !state ? "away" : state.status.kind;
  const open = ["running", "paused", "starting", "silent", "ended"].includes(kind);
  const pause = byId("pause"), verb = kind === "paused" ? "Resume" : "Pause";
  setText(pause, verb);
  pause.disabled = !open;
  byId("add").disabled = !open;
  for (const control of byId("trials-form").elements) control.disabled = !open;
  for (const button of document.querySelectorAll("button.clone")) button.disabled = !open;
  for (const button of document.querySelectorAll("button.stop")) button.disabled = !open || button.dataset.off === "yes";
}

async function askAndTell(action, args, text) {
  const problem = await ask(action, args);
  setText(byId("answer"), problem || text);
  return problem;
}

function openStop(data) {
  openConfirmation("Stop " + data.title + "?", "It ends now, as if the scheduler had stopped it. What it has measured is kept.", "Stop it",
    () => askAndTell("stop", { trial: data.number }, "Asked to stop " + data.title + "."));
}

function openClone(data) {
  openConfiguration("Clone " + data.title, "A new trial with these values and a fresh seed starts next.", data.searched,
    (_, changes, forced) => Object.keys(changes).length
      ? askAndTell("clone", { trial: data.number, changes, ...forced }, "Asked to clone " + data.title + ".")
      : "Change at least one value: an equal configuration tells nothing new.");
}

byId("add").addEventListener("click", () => openConfiguration("Add a configuration", "It starts next. The fields begin at the centre of the space.", {},
  (params, _, forced) => askAndTell("add", { params, ...forced }, "Asked for a trial.")));
byId("pause").addEventListener("click", () => {
  const action = byId("pause").textContent.toLowerCase();
  askAndTell(action, {}, "Asked to " + action + " the sweep.");
});
byId("trials-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const number = Number(byId("trials").value);
  askAndTell("trials", { number }, "Asked for " + number + " trials.");
});
document.addEventListener("visibilitychange", () => { if (!document.hidden) refreshSoon(); });
refresh();
