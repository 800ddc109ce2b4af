"""Application of a pick to the trials of a sweep.

All rules but a number look at the front: means over seeds on test prompts, as in every table.
"""

from __future__ import annotations

from collections.abc import Sequence

from gdpo_tune.analysis.front import Front, build_front
from gdpo_tune.analysis.replicates import Configuration
from gdpo_tune.analysis.selection import find_knee, find_smallest
from gdpo_tune.core.errors import PickError, UsageError
from gdpo_tune.core.formatting import format_estimate
from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.results.open_sweep import Sweep, read_sweep, resolve_location, split_source
from gdpo_tune.results.pick_language import EXAMPLE, Bound, Extreme, Pick, parse_pick
from gdpo_tune.results.summary import ChosenTrial
from gdpo_tune.spec import SweepSpec
from gdpo_tune.spec.problems import join_names, suggest


def load_and_pick(source: str, pick: str | None, option: str) -> tuple[Sweep, ChosenTrial]:
    """Load a sweep and pick one of its trials.

    `source` is `DIRECTORY:PICK`, or `DIRECTORY` if `pick`, the value of `--pick`, is given; a name
    under `runs` is enough. `option` is the name of the option that has `source`, for messages.

    Raises:
        UsageError: there is no such sweep, or the pick is missing or given twice.
        PickError: the pick cannot be parsed, or no trial satisfies it.
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
    return sweep, pick_trial(sweep.records, sweep.spec, parsed)


def pick_trial(records: Sequence[TrialRecord], spec: SweepSpec, pick: Pick) -> ChosenTrial:
    """Pick one trial.

    Raises:
        PickError: the pick names an unknown trial or metric, or no trial on the front satisfies it.
    """
    front, rule = build_front(records, spec.list_objectives()), pick.rule
    if isinstance(rule, int):
        record = _find_record(records, pick, rule)
        owners = (c for c in front.configurations if record.number in c.numbers)
        configuration = next(owners, None)  # None for a trial that was not measured to its end
    else:
        configuration = _find_member(front, pick)
        record = records[configuration.first]
    label = f"trial-{record.number}"
    if not pick.bounds and not isinstance(rule, int):
        label = f"{rule.end}_{rule.metric.name}" if isinstance(rule, Extreme) else rule
    head = f"chosen by {pick.text!r}: trial {record.number}"
    if configuration is None:
        return ChosenTrial(record, label, (f"{head}, {record.state}",))
    return ChosenTrial(record, label, tuple(_describe(head, pick, configuration, spec)))


def _describe(head: str, pick: Pick, configuration: Configuration, spec: SweepSpec) -> list[str]:
    """Return lines for a person: the trial, its values, and how certain its conditions are."""
    mean = configuration.mean
    names = dict.fromkeys([*spec.objectives, *(metric.name for metric in pick.metrics)])
    values = ", ".join(f"{name} {format_estimate(mean[name])}" for name in names)
    lines = [f"{head}: {values}"]
    if configuration.is_provisional and configuration.role != "untrained":
        lines.append("provisional: one seed")
    for bound in pick.bounds:
        estimate = mean[bound.metric.name]
        if abs(estimate.mean - bound.limit) < estimate.se:
            lines.append(f"{bound} is satisfied by less than its standard error")
    if isinstance(pick.rule, Extreme):
        objective = spec.objectives.get(pick.rule.metric.name)
        if objective and not objective.direction.startswith(pick.rule.end):
            lines.append(f"the sweep {objective.direction}s {pick.rule.metric.name}")
    return lines


def _find_record(records: Sequence[TrialRecord], pick: Pick, number: int) -> TrialRecord:
    if number >= len(records):
        last = f"the last one is {len(records) - 1}" if records else "it has none"
        raise pick.error(1, f"that sweep has no trial {number}; {last}", "write another number")
    if records[number].role == "untrained":
        raise pick.error(1, f"trial {number} is the untrained policy", "write another number")
    return records[number]


def _find_member(front: Front, pick: Pick) -> Configuration:
    """Return the member of the front that is the knee or an extreme."""
    objectives = [objective.name for objective in front.objectives]
    others = {name for member in front.members for name in member.mean} - set(objectives)
    names = [*objectives, *sorted(others)]
    for name, position in pick.metrics:
        if name not in names:
            reason = f"{name!r}: {suggest(name, names)}this metric is unknown"
            raise pick.error(position, reason, f"the metrics of this sweep are {join_names(names)}")
    if not front.members:
        reason = "nothing is on the front of that sweep yet"
        raise pick.error(1, reason, "let the sweep continue, or pick a trial by its number")
    members = [member for member in front.members if not _find_broken_bounds(pick, member)]
    if not members:
        raise _build_unsatisfied_error(front, pick)
    if isinstance(pick.rule, Extreme):
        name, position = pick.rule.metric
        members = [member for member in members if name in member.mean]
        if not members:
            raise pick.error(position, f"no remaining trial has {name}", "leave it out")
        sign = -1 if pick.rule.end == "max" else 1
        column = [sign * member.mean[name].mean for member in members]
        values = [member.get_values(front.objectives) for member in members]
        return members[find_smallest(column, values, front.objectives)]
    index = find_knee([member.get_values(front.objectives) for member in members], front.objectives)
    assert index is not None, "only an empty list has no knee"
    return members[index]


def _build_unsatisfied_error(front: Front, pick: Pick) -> PickError:
    """Build the error for a front without a member that satisfies every condition.

    The closest member has the smallest sum of shortfalls, each as a share of the front's span.
    """
    spans: dict[str, float] = {}
    for name in {bound.metric.name for bound in pick.bounds}:
        values = [member.mean[name].mean for member in front.members if name in member.mean]
        spans[name] = (max(values) - min(values)) or 1.0

    def sum_shortfalls(member: Configuration) -> float:
        return sum(
            bound.compute_shortfall(_get_mean(member, bound.metric.name)) / spans[bound.metric.name]
            for bound in pick.bounds
        )

    closest = min(front.members, key=sum_shortfalls)
    broken = _find_broken_bounds(pick, closest)
    values = [f"{b.metric.name} {_get_mean(closest, b.metric.name):.3g}" for b in broken]
    return pick.error(
        broken[0].metric.position,
        "nothing on the front satisfies this: the closest, "
        f"trial {closest.first}, has {', '.join(values)}",
        f"loosen {' and '.join(map(str, broken))}, or search with them as `constraints:`",
    )


def _find_broken_bounds(pick: Pick, member: Configuration) -> list[Bound]:
    return [b for b in pick.bounds if not b.holds(_get_mean(member, b.metric.name))]


def _get_mean(member: Configuration, name: str) -> float:
    """Return a metric's mean; NaN, which satisfies no condition, if the member lacks the metric."""
    return member.mean[name].mean if name in member.mean else float("nan")
