"""Application of a pick to the candidates of a sweep.

All rules but the name of a candidate look at the front: means over seeds on test prompts, as in
every table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gdpo_tune.analysis.front import Front, build_front, choose_knee, find_configuration
from gdpo_tune.analysis.replicates import Configuration
from gdpo_tune.analysis.selection import find_smallest
from gdpo_tune.core.errors import PickError, UsageError
from gdpo_tune.core.text import format_estimate
from gdpo_tune.core.trials import MERGE_PREFIX, Part, TrialRecord, title_candidate
from gdpo_tune.results.open_sweep import Sweep, read_sweep, resolve_location, split_source
from gdpo_tune.results.pick_language import (
    EXAMPLE,
    Bound,
    CheckpointName,
    Extreme,
    MergeName,
    Pick,
    parse_pick,
)
from gdpo_tune.results.summary import ChosenTrial
from gdpo_tune.spec import SweepSpec
from gdpo_tune.spec.text import join_names, suggest


def load_and_pick(
    source: str, pick: str | None, option: str, *, merges: bool = True
) -> tuple[Sweep, ChosenTrial]:
    """Load a sweep and pick one of its candidates.

    `source` is `DIRECTORY:PICK`, or `DIRECTORY` if `pick`, the value of `--pick`, is given; a name
    under `runs` is enough. `option` is the name of the option that has `source`, for messages.
    `merges` is as for `pick_trial`.

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
    return sweep, pick_trial(sweep.records, sweep.spec, parsed, merges=merges)


def pick_trial(
    records: Sequence[TrialRecord], spec: SweepSpec, pick: Pick, *, merges: bool = True
) -> ChosenTrial:
    """Pick one candidate.

    Without `merges`, a merge is chosen by its name alone, or where the front has nothing else that
    satisfies the pick.

    Raises:
        PickError: the pick names an unknown candidate or metric, or nothing on the front satisfies
            it.
    """
    front, rule = build_front(records, spec.list_objectives()), pick.rule
    passed_over: Configuration | None = None
    if rule == "knee" or isinstance(rule, Extreme):
        configuration = _find_member(front, pick)
        trained = [
            m for m in front.members if m.role != "merge" and not _find_broken_bounds(pick, m)
        ]
        if configuration.role == "merge" and trained and not merges:
            passed_over = configuration
            configuration = _find_member(replace(front, members=tuple(trained)), pick)
        record = records[configuration.first]
    else:
        record = _find_record(records, pick)
        # None for a trial that was not measured to its end
        configuration = find_configuration(front.configurations, record.name)
    label = _label_directory(record)
    if not pick.bounds and not pick.names_candidate:
        label = f"{rule.end}_{rule.metric.name}" if isinstance(rule, Extreme) else "knee"
    head = f"chosen by {pick.text!r}: {title_candidate(record.name)}"
    if configuration is None:
        return ChosenTrial(record, label, (f"{head}, {_explain_missing_values(record)}",))
    lines = _describe(head, pick, configuration, spec)
    if passed_over is not None:
        lines.append(
            f"of the whole front it is {passed_over.name}, a merge, which no single training "
            "repeats; this is the choice among trainings"
        )
    return ChosenTrial(record, label, tuple(lines), configuration.mean)


def _describe(head: str, pick: Pick, configuration: Configuration, spec: SweepSpec) -> list[str]:
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


def _find_record(records: Sequence[TrialRecord], pick: Pick) -> TrialRecord:
    match pick.rule:
        case int(number):
            return _find_trial(records, pick, number)
        case CheckpointName(trial, step):
            return _find_checkpoint(records, pick, trial, step)
        case MergeName(number):
            if number < len(records) and records[number].role == "merge":
                return records[number]
            names = [record.name for record in records if record.role == "merge"]
            fix = f"write {join_names(names)}" if names else "write knee, or a trial's number"
            reason = f"that sweep has no {MERGE_PREFIX}{number}" if names else "it has no merges"
            raise pick.error(1, reason, fix)
        case _:
            raise AssertionError("a pick that names no candidate is about the front")


def _find_trial(records: Sequence[TrialRecord], pick: Pick, number: int) -> TrialRecord:
    if number >= len(records):
        last = f"the last one is {len(records) - 1}" if records else "it has none"
        raise pick.error(1, f"that sweep has no trial {number}; {last}", "write another number")
    if records[number].role == "untrained":
        raise pick.error(1, f"trial {number} is the untrained policy", "write another number")
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


def _explain_missing_values(record: TrialRecord) -> str:
    if not record.is_comparable:
        return f"not comparable with newer trials: {record.content}"
    is_measured = record.state == "complete"
    return "without an evaluation on test prompts" if is_measured else record.state


def _label_directory(record: TrialRecord) -> str:
    if record.role == "checkpoint":
        return f"trial-{record.parts[0].trial}-step-{record.parts[0].step}"
    return record.name if record.role == "merge" else f"trial-{record.number}"


def _find_member(front: Front, pick: Pick) -> Configuration:
    objectives = [objective.name for objective in front.objectives]
    others = {name for member in front.members for name in member.mean} - set(objectives)
    names = [*objectives, *sorted(others)]
    for name, position in pick.metrics:
        if name not in names:
            reason = f"{name!r}: {suggest(name, names)}this metric is unknown"
            raise pick.error(position, reason, f"the metrics of this sweep are {join_names(names)}")
    if not front.members:
        reason = "nothing is on the front of that sweep yet"
        raise pick.error(
            1, reason, "run more trials or loosen the constraints, or pick a trial by its number"
        )
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
    knee = choose_knee(members, front.baselines, front.objectives)
    assert knee is not None, "only an empty list has no knee"
    return knee


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
        f"{title_candidate(closest.name)}, has {', '.join(values)}",
        f"loosen {' and '.join(map(str, broken))}, or search with them as `constraints:`",
    )


def _find_broken_bounds(pick: Pick, member: Configuration) -> list[Bound]:
    return [b for b in pick.bounds if not b.holds(_get_mean(member, b.metric.name))]


def _get_mean(member: Configuration, name: str) -> float:
    return member.mean[name].mean if name in member.mean else float("nan")
