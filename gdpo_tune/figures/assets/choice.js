"use strict";
// The rules of --pick, as gdpo_tune.results.picks and gdpo_tune.analysis.front have them.

// Members that satisfy every limit; limits are {name, comparison, value}.
function listFitting(members, limits) {
  return members.filter((member) => limits.every((limit) => satisfies(member, limit)));
}

function satisfies(member, { name, comparison, value }) {
  const own = member.values[name];
  return comparison === ">=" ? own >= value : own <= value;
}

// The member that the rule ("knee", "max NAME" or "min NAME") prefers; undefined for no members.
function choose(members, objectives, rule) {
  if (!members.length) return undefined;
  const losses = scaleLosses(members, objectives);
  if (rule === "knee") return members[findKnee(members, losses)];
  const [end, name] = rule.split(/ (.*)/);
  const sign = end === "max" ? -1 : 1;
  return members[findSmallest(members.map((member) => sign * member.values[name]), losses)];
}

function scaleLosses(members, objectives) {
  const columns = objectives.map(({ name, direction }) => {
    const sign = direction === "maximize" ? -1 : 1;
    const column = members.map((member) => sign * member.values[name]);
    const best = column.reduce((a, b) => Math.min(a, b));
    const span = column.reduce((a, b) => Math.max(a, b)) - best;
    return column.map((loss) => (loss - best) / (span > 0 ? span : 1));
  });
  return members.map((_, row) => columns.map((column) => column[row]));
}

const sum = (values) => values.reduce((a, b) => a + b, 0);

function findSmallest(column, losses) {
  return findFirst(column.map((value, index) => [value, sum(losses[index])]));
}

function findKnee(members, losses) {
  const ends = new Set(losses[0].map((_, goal) => findSmallest(losses.map((row) => row[goal]), losses)));
  const grade = Math.max(1, ...members.map((member) => member.keeps));
  return findFirst(losses.map((row, index) => [
    members[index].keeps >= grade ? 0 : 1,
    ends.has(index) && ends.size < members.length ? 1 : 0,
    Math.round(sum(row) * 1e9) / 1e9,
    Math.max(...row),
  ]));
}

// Index of the first row that is smallest, compared from left to right.
function findFirst(rows) {
  let first = 0;
  rows.forEach((row, index) => {
    const column = row.findIndex((value, place) => value !== rows[first][place]);
    if (column >= 0 && row[column] < rows[first][column]) first = index;
  });
  return first;
}

// The member with the smallest sum of shortfalls, each as a share of the members' span.
function findClosest(members, limits) {
  const spans = limits.map(({ name }) => {
    const values = members.map((member) => member.values[name]).filter((value) => value !== undefined);
    return Math.max(...values) - Math.min(...values) || 1;
  });
  const shortfall = (member) => sum(limits.map(({ name, comparison, value }, index) => {
    const own = member.values[name];
    if (own === undefined) return Infinity;
    return Math.max(comparison === ">=" ? value - own : own - value, 0) / spans[index];
  }));
  return members[findFirst(members.map((member) => [shortfall(member)]))];
}

// The text that --pick accepts.
function writePick(rule, limits) {
  return limits.length ? `${rule} where ${writeConditions(limits)}` : rule;
}

function writeConditions(limits) {
  return limits.map(({ name, comparison, value }) => `${name} ${comparison} ${value}`).join(" and ");
}
