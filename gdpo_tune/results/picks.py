"""Picks: the language in which every command names one candidate of a sweep, and what it finds.

    knee                                       the best compromise on the front
    max correctness, or max_correctness        the largest value of a metric; `min`: the smallest
    7                                          the end of a trial, by its number
    7@40                                       its checkpoint after 40 steps
    merge-27                                   a merge
    max correctness where length >= 0.9 and format >= 0.95

`where` may follow every rule that names no candidate. All rules but a candidate's name look at the
front: means over seeds on test prompts, as in every table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from gdpo_tune.analysis.front import Front, choose_knee, find_configuration, find_smallest
from gdpo_tune.analysis.replicates import Configuration
from gdpo_tune.core.errors import PickError, UsageError
from gdpo_tune.core.metrics import COMPARISONS, Condition
from gdpo_tune.core.text import format_estimate, join_names, suggest
from gdpo_tune.core.trials import MERGE_PREFIX, Part, TrialRecord, title_candidate
from gdpo_tune.results.front_table import BASELINES
from gdpo_tune.results.open_sweep import Sweep, read_sweep, resolve_location, split_source

CONDITIONS = "length >= 0.6 and format >= 0.8"
EXAMPLE = "max correctness where length >= 0.9 and format >= 0.95"
_CANDIDATE = re.compile(rf"(\d{{1,9}})(?:@(\d{{1,9}}))?|{MERGE_PREFIX}(\d{{1,9}})")
_TOKEN = re.compile(r"\s*(>=|<=|==|[<>=,]|[^\s<>=,]+)")


class Extreme(NamedTuple):
    """Largest or smallest value of a metric."""

    end: Literal["max", "min"]
    metric: str
    position: int
    """Of the metric in the text, from 1."""


class CandidateName(NamedTuple):
    """Name of a candidate: `7`, `7@40` or `merge-27`."""

    number: int
    step: int | None
    """Of a checkpoint."""
    is_merge: bool


Rule = Literal["knee"] | Extreme | CandidateName


@dataclass(frozen=True)
class Pick:
    """Parsed choice of a candidate."""

    text: str
    rule: Rule
    """Knee or extreme of the front; or any candidate."""
    conditions: tuple[Condition, ...] = ()

    @property
    def metrics(self) -> dict[str, int]:
        """Metrics that the text names, and where."""
        rule = self.rule
        found = {rule.metric: rule.position} if isinstance(rule, Extreme) else {}
        for condition in self.conditions:
            found.setdefault(condition.metric, condition.position)
        return found

    def error(self, position: int, reason: str, fix: str) -> PickError:
        """Return an error that points at `position`, from 1."""
        return PickError(self.text, position, reason, fix)

    def list_broken(self, member: Configuration) -> list[Condition]:
        """Return the conditions that the means of a member do not meet."""
        return [c for c in self.conditions if not c.holds(member.get_mean(c.metric))]


@dataclass(frozen=True)
class PickedCandidate:
    """Candidate that a choice names."""

    record: TrialRecord
    """Trial with that name, or the first trial of the configuration that was picked."""
    text: str
    """The choice as it was written; for a member of a whole front its name."""
    configuration: Configuration | None
    """Its means over seeds; None if it was not measured to its end."""
    label: str = ""
    """Part of a directory's name: `knee`, `trial-7`, `trial-7-step-40` or `merge-27`."""
    lines: tuple[str, ...] = ()
    """Sentences about it, for a person."""

    @property
    def name(self) -> str:
        """Name of the candidate, such as `7` or `merge-9`."""
        return self.record.name

    @property
    def title(self) -> str:
        """Its name in a sentence."""
        return title_candidate(self.name)


def parse_pick(text: str) -> Pick:
    """Parse a choice of a candidate; a PickError points at what breaks the rules above."""
    return _Parser(text).parse_pick()


def parse_conditions(text: str) -> tuple[Condition, ...]:
    """Parse `length >= 0.6, format >= 0.8`, or with `and`; a PickError points at another form."""
    return _Parser(text).parse_conditions()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = [(match[1], match.start(1) + 1) for match in _TOKEN.finditer(text)]
        self._tokens.append(("", len(text) + 1))  # the end

    def parse_pick(self) -> Pick:
        rule = self._parse_rule()
        conditions: list[Condition] = []
        keyword = "where"
        while self._tokens[0][0]:
            word, position = self._take()
            if word != keyword:
                guess = suggest(word, [keyword])
                reason = f"{word!r}: {guess}a condition begins with `{keyword}`"
                raise self._error(position, reason)
            if isinstance(rule, CandidateName):
                reason = "the name of a candidate has no conditions"
                raise self._error(position, reason, "leave `where` out")
            conditions.append(self._parse_condition())
            keyword = "and"
        return Pick(self._text, rule, tuple(conditions))

    def parse_conditions(self) -> tuple[Condition, ...]:
        conditions = [self._parse_condition("at the start of a condition")]
        while self._tokens[0][0]:
            word, position = self._take()
            if word not in (",", "and"):
                reason = f"{word!r}: conditions are joined by `and` or a comma"
                raise self._error(position, reason, f"write for example {CONDITIONS!r}")
            conditions.append(self._parse_condition("at the start of a condition"))
        return tuple(conditions)

    def _parse_rule(self) -> Rule:
        word, position = self._take()
        rule, _, name = word.partition("_")
        if word == "knee":
            return "knee"
        if match := _CANDIDATE.fullmatch(word):
            step = int(match[2]) if match[2] else None
            return CandidateName(int(match[1] or match[3]), step, is_merge=bool(match[3]))
        if (rule == "max" or rule == "min") and (name or word == rule):
            named = (name, position + 4) if name else self._parse_metric(f"after `{rule}`")
            return Extreme(rule, *named)
        guess = suggest(word, ("knee", "max", "min"))
        rules = (
            "a choice begins with knee, max or min, or is the number of a trial, a checkpoint such "
            "as 7@40, or a merge such as merge-27"
        )
        reason = f"{word!r}: {guess}{rules}" if word else "the choice is empty"
        raise self._error(position, reason)

    def _parse_condition(self, where: str = "after `where` or `and`") -> Condition:
        metric, place = self._parse_metric(where)
        comparison, position = self._take()
        if comparison not in COMPARISONS:
            reason = f"{metric} is compared by >=, <=, > or <"
            raise self._error(position, reason, f"write {metric} >= 0.9")
        word, position = self._take()
        try:
            limit = float(word)
        except ValueError:
            limit = math.nan
        if not math.isfinite(limit):
            reason = f"{word!r} is not a number" if word else "a number is missing"
            raise self._error(position, reason, "write a number there, such as 0.9")
        return Condition(metric, comparison, limit, place)

    def _parse_metric(self, where: str) -> tuple[str, int]:
        word, position = self._take()
        if not word or word[0] in "<>=,":
            raise self._error(position, f"the name of a metric is missing {where}")
        return word, position

    def _take(self) -> tuple[str, int]:
        return self._tokens.pop(0) if len(self._tokens) > 1 else self._tokens[0]

    def _error(self, position: int, reason: str, fix: str = "") -> PickError:
        return PickError(self._text, position, reason, fix or f"write for example {EXAMPLE!r}")


def load_and_pick(source: str, pick: str | None, option: str) -> tuple[Sweep, PickedCandidate]:
    """Load a sweep and pick one of its candidates.

    `source` is `DIRECTORY:PICK`, or `DIRECTORY` if `pick`, the value of `--pick`, is given; a name
    under `runs` is enough. `option` is the name of the option that has `source`, for messages.

    Raises:
        UsageError: there is no such sweep, or the pick is missing, given twice or wrong.
    """
    directory, text = split_source(source, pick)
    if text is None:
        raise UsageError(
            f"{option} {source}: write the sweep's directory, a colon and a choice, such as "
            "runs/code:knee, runs/code:max_correctness or runs/code:12; or the directory and "
            f"--pick '{EXAMPLE}'"
        )
    parsed = parse_pick(text)
    sweep = read_sweep(resolve_location(directory), f"{option} {source}")
    return sweep, pick_trial(sweep, parsed)


def pick_trial(sweep: Sweep, pick: Pick) -> PickedCandidate:
    """Pick one candidate.

    A PickError names what is unknown, or the closest to what nothing satisfies.
    """
    records, front, rule = sweep.records, sweep.front, pick.rule
    if isinstance(rule, CandidateName):
        record = _find_record(records, pick, rule)
        # None for a trial that was not measured to its end
        configuration = find_configuration(front.configurations, record.name)
    else:
        configuration = _find_member(front, pick)
        record = records[configuration.first]
    if not isinstance(rule, CandidateName) and not pick.conditions:
        label = f"{rule.end}_{rule.metric}" if isinstance(rule, Extreme) else rule
    elif record.role == "checkpoint":
        label = f"trial-{record.parts[0].trial}-step-{record.parts[0].step}"
    else:
        label = record.name if record.role == "merge" else f"trial-{record.number}"
    head = f"chosen by {pick.text!r}: {title_candidate(record.name)}"
    if configuration is None:
        why = (
            "without an evaluation on test prompts" if record.state == "complete" else record.state
        )
        return PickedCandidate(record, pick.text, None, label, (f"{head}, {why}",))
    mean, objectives = configuration.mean, sweep.spec.objectives
    names = dict.fromkeys([*objectives, *pick.metrics])
    lines = [f"{head}: " + ", ".join(f"{name} {format_estimate(mean[name])}" for name in names)]
    if configuration.is_provisional and not configuration.is_initial:
        lines.append("provisional: one seed")
    for c in pick.conditions:
        if abs(mean[c.metric].mean - c.limit) < mean[c.metric].se:
            lines.append(f"{c} is satisfied by less than its standard error")
    goal = objectives.get(rule.metric) if isinstance(rule, Extreme) else None
    if goal and isinstance(rule, Extreme) and not goal.direction.startswith(rule.end):
        lines.append(f"the sweep {goal.direction}s {rule.metric}")
    return PickedCandidate(record, pick.text, configuration, label, tuple(lines))


def _find_record(records: Sequence[TrialRecord], pick: Pick, rule: CandidateName) -> TrialRecord:
    if rule.step is not None:
        return _find_checkpoint(records, pick, rule.number, rule.step)
    if not rule.is_merge:
        return _find_trial(records, pick, rule.number)
    if rule.number < len(records) and records[rule.number].role == "merge":
        return records[rule.number]
    names = [record.name for record in records if record.role == "merge"]
    if not names:
        raise pick.error(1, "it has no merges", "write knee, or a trial's number")
    reason = f"that sweep has no {MERGE_PREFIX}{rule.number}"
    raise pick.error(1, reason, f"write {join_names(names)}")


def _find_trial(records: Sequence[TrialRecord], pick: Pick, number: int) -> TrialRecord:
    if number >= len(records):
        last = f"the last one is {len(records) - 1}" if records else "it has none"
        raise pick.error(1, f"that sweep has no trial {number}; {last}", "write another number")
    if records[number].is_initial:
        title = BASELINES[records[number].role]
        raise pick.error(1, f"trial {number} is the {title}", "write another number")
    return records[number]


def _find_checkpoint(
    records: Sequence[TrialRecord], pick: Pick, trial: int, step: int
) -> TrialRecord:
    training = _find_trial(records, pick, trial)
    if not training.is_training:
        reason = f"trial {trial} trains nothing, so it has no checkpoints"
        raise pick.error(1, reason, f"write {training.name}")
    steps: dict[int, TrialRecord] = {}
    for record in records:
        for part in record.parts:
            if part.trial == trial and record.role == "checkpoint":
                steps[part.step] = record
            elif part.trial == trial and part.step not in steps:  # of a merge: without values
                alone = (Part(trial, part.step, 1.0),)
                steps[part.step] = replace(training, role="checkpoint", parts=alone, test={})
    if training.state == "complete" and training.last_step is not None:
        steps[training.last_step] = training
    if step not in steps:
        names = [f"{trial}@{known}" for known in sorted(steps)]
        reason = f"trial {trial} has no candidate at step {step}"
        fix = f"write {join_names(names)}" if names else f"write {trial}"
        raise pick.error(1, reason, fix)
    return steps[step]


def _find_member(front: Front, pick: Pick) -> Configuration:
    objectives = [objective.name for objective in front.objectives]
    others = {name for member in front.members for name in member.mean} - set(objectives)
    names = [*objectives, *sorted(others)]
    for name, position in pick.metrics.items():
        if name not in names:
            reason = f"{name!r}: {suggest(name, names)}this metric is unknown"
            raise pick.error(position, reason, f"the metrics of this sweep are {join_names(names)}")
    if not front.members:
        reason = "nothing is on the front of that sweep yet"
        raise pick.error(
            1, reason, "run more trials or loosen the constraints, or pick a trial by its number"
        )
    members = [member for member in front.members if not pick.list_broken(member)]
    if not members:  # the closest has the smallest sum of shortfalls, as shares of the front's span
        shortfalls = [0.0] * len(front.members)
        for c in pick.conditions:
            values = [member.get_mean(c.metric) for member in front.members]
            known = [value for value in values if value == value]
            span = (max(known) - min(known)) or 1.0
            shortfalls = [
                total + c.compute_shortfall(value) / span
                for total, value in zip(shortfalls, values, strict=True)
            ]
        closest = front.members[shortfalls.index(min(shortfalls))]
        broken = pick.list_broken(closest)
        has = ", ".join(f"{b.metric} {closest.get_mean(b.metric):.3g}" for b in broken)
        raise pick.error(
            broken[0].position,
            "nothing on the front satisfies this: the closest, "
            f"{title_candidate(closest.name)}, has {has}",
            f"loosen {' and '.join(map(str, broken))}, or search with them as `constraints:`",
        )
    if isinstance(pick.rule, Extreme):
        name, position = pick.rule.metric, pick.rule.position
        members = [member for member in members if name in member.mean]
        if not members:
            raise pick.error(position, f"no remaining trial has {name}", "leave it out")
        sign = -1 if pick.rule.end == "max" else 1
        column = [sign * member.mean[name].mean for member in members]
        values = [member.get_values(front.objectives) for member in members]
        return members[find_smallest(column, values, front.objectives)]
    knee = choose_knee(members, front.baselines, front.objectives)
    assert knee is not None, "only an empty list has no knee"
    return knee
