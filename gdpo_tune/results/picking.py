"""One choice among the trials of a sweep, by the words of `picks`.

A choice looks at the front: means over seeds on test prompts, as every table and picture has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gdpo_tune.analysis.front import Front, build_front
from gdpo_tune.analysis.replicates import Configuration
from gdpo_tune.analysis.selection import find_knee, find_preferred, find_smallest
from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.trials import Estimate, TrialRecord
from gdpo_tune.results.open_sweep import Sweep, place_named, read_sweep, split_source
from gdpo_tune.results.pick_language import (
    EXAMPLE,
    Bound,
    Extreme,
    Knee,
    Metric,
    Numbered,
    Pick,
    Preferred,
    parse,
)
from gdpo_tune.spec import SweepSpec
from gdpo_tune.spec.problems import did_you_mean, one_of


@dataclass(frozen=True)
class Chosen:
    """What a choice found."""

    pick: Pick
    record: TrialRecord
    """The first trial of the configuration that was chosen; of a number, that trial itself."""
    configuration: Configuration | None
    """With its means over seeds; None for a trial that was not measured to its end."""

    @property
    def label(self) -> str:
        """For a folder's name, such as `knee`, or `trial-7` where words are too many."""
        return self.pick.label or f"trial-{self.record.number}"


def chosen_in(source: str, pick: str | None, option: str) -> tuple[Sweep, Chosen]:
    """The sweep that a person names, and what they choose of it.

    Args:
        source: `FOLDER:WHICH`, or `FOLDER` if `pick` says which; a name under `runs` will do.
        pick: the choice, or None if `source` has it.
        option: what `source` was given as, for the messages.

    Raises:
        UsageError: there is no such sweep, or the choice is given twice or not at all.
        PickError: the choice cannot be read, or nothing fits it.
    """
    folder, which = split_source(source, pick)
    if which is None:
        raise UsageError(
            f"{option} {source}: write the sweep's folder, a colon and what to take, such as "
            "runs/code:knee, runs/code:max_correctness or runs/code:12; or the folder and "
            f"--pick '{EXAMPLE}'"
        )
    wanted = parse(which)
    sweep = read_sweep(place_named(folder), f"{option} {source}")
    return sweep, choose(sweep.records, sweep.spec, wanted)


def choose(records: Sequence[TrialRecord], spec: SweepSpec, pick: Pick) -> Chosen:
    """What `pick` finds.

    Raises:
        PickError: it names what there is not, or nothing on the front satisfies it.
    """
    front = build_front(records, spec.objective_list())
    if isinstance(pick.rule, Numbered):
        record = _numbered(records, pick, pick.rule.number)
        whole = [c for c in front.configurations if record.number in c.numbers]
        return Chosen(pick, record, whole[0] if whole else None)
    _check_names(front, spec, pick)
    if not front.members:
        reason = "nothing is on the front of that sweep yet"
        raise pick.error(1, reason, "let it go on, or take a trial by its number")
    member = _best(front, pick, _satisfying(front, pick))
    return Chosen(pick, records[member.first], member)


def told_of(chosen: Chosen, spec: SweepSpec) -> list[str]:
    """Lines for a person: which trial, what it is worth, and how sure its conditions are."""
    head = f"chosen by {chosen.pick.text!r}: trial {chosen.record.number}"
    known = chosen.configuration
    if known is None:
        return [f"{head}, {chosen.record.state}"]
    names = [*spec.objectives, *(metric.name for metric in chosen.pick.metrics)]
    values = ", ".join(f"{name} {_shown(known.mean[name])}" for name in dict.fromkeys(names))
    lines = [f"{head}: {values}"]
    if known.provisional and known.role != "untrained":
        lines.append("provisional: one seed")
    lines += [
        f"{bound} holds by less than its standard error"
        for bound in chosen.pick.bounds
        if abs(known.mean[bound.metric.name].mean - bound.limit) < known.mean[bound.metric.name].se
    ]
    match chosen.pick.rule:
        case Extreme(way, metric) if metric.name in spec.objectives:
            if spec.objectives[metric.name].direction[:3] != way:
                lines.append(f"{metric.name} is to be {spec.objectives[metric.name].direction}d")
        case _:
            pass
    return lines


def _check_names(front: Front, spec: SweepSpec, pick: Pick) -> None:
    """Refuse metrics that were not measured, and weights on what is no objective."""
    measured = {name for member in front.members for name in member.mean}
    known = [*spec.objectives, *sorted(measured - set(spec.objectives))]
    if isinstance(pick.rule, Preferred):
        for metric, _ in pick.rule.weights:
            _refuse_unless(metric, list(spec.objectives), "objectives", pick)
    for metric in pick.metrics:
        _refuse_unless(metric, known, "metrics", pick)


def _refuse_unless(metric: Metric, known: Sequence[str], what: str, pick: Pick) -> None:
    if metric.name not in known:
        raise pick.error(
            metric.position,
            f"{metric.name!r}: {did_you_mean(metric.name, known)}there is no such name",
            f"the {what} of this sweep are {one_of(known)}",
        )


def _satisfying(front: Front, pick: Pick) -> list[Configuration]:
    found = [c for c in front.members if all(_holds(bound, c) for bound in pick.bounds)]
    if found:
        return found
    spans = [_span(front, bound.metric.name) for bound in pick.bounds]

    def distance(member: Configuration) -> float:
        """Sum over the conditions of what is missing, as a share of the front's span."""
        pairs = zip(pick.bounds, spans, strict=True)
        return sum(bound.missing(_mean(member, bound.metric.name)) / span for bound, span in pairs)

    closest = min(front.members, key=distance)
    broken = [bound for bound in pick.bounds if not _holds(bound, closest)]
    has = ", ".join(f"{b.metric.name} {_mean(closest, b.metric.name):.3g}" for b in broken)
    raise pick.error(
        broken[0].metric.position,
        f"nothing on the front satisfies this: the closest, trial {closest.first}, has {has}",
        f"loosen {' and '.join(map(str, broken))}, or search on: the sweep's `constraints:` can "
        "ask for it",
    )


def _best(front: Front, pick: Pick, members: Sequence[Configuration]) -> Configuration:
    goals = front.objectives
    values = [member.values(goals) for member in members]
    match pick.rule:
        case Extreme(way, metric):
            kept = [member for member in members if metric.name in member.mean]
            if not kept:
                raise pick.error(
                    metric.position, f"no trial that is left has {metric.name}", "drop it"
                )
            sign = -1.0 if way == "max" else 1.0
            column = [sign * _mean(member, metric.name) for member in kept]
            values = [member.values(goals) for member in kept]
            index = find_smallest(column, values, goals)
            members = kept
        case Preferred(weights):
            given = {metric.name: weight for metric, weight in weights}
            index = find_preferred(values, goals, [given.get(goal.name, 0.0) for goal in goals])
        case Knee() | Numbered():
            index = find_knee(values, goals)
    assert index is not None, "no member is left, although one satisfies the conditions"
    return members[index]


def _holds(bound: Bound, member: Configuration) -> bool:
    return bound.holds(_mean(member, bound.metric.name))


def _mean(member: Configuration, name: str) -> float:
    """Of a metric that this configuration lacks, NaN, which satisfies nothing."""
    return member.mean[name].mean if name in member.mean else float("nan")


def _span(front: Front, name: str) -> float:
    values = [member.mean[name].mean for member in front.members if name in member.mean]
    return (max(values) - min(values)) or 1.0


def _shown(estimate: Estimate) -> str:
    return f"{estimate.mean:.3f} ± {estimate.se:.3f}"


def _numbered(records: Sequence[TrialRecord], pick: Pick, number: int) -> TrialRecord:
    if number >= len(records):
        last = f"the last one is {len(records) - 1}" if records else "it has none"
        raise pick.error(1, f"that sweep has no trial {number}; {last}", "take another number")
    if records[number].role == "untrained":
        raise pick.error(1, f"trial {number} is the untrained policy", "take another number")
    return records[number]
