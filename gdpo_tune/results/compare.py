"""Two sweeps, or two normalization modes of one, as the sides of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gdpo_tune.analysis.comparison import Comparison, compare
from gdpo_tune.analysis.sides import Side, side_of
from gdpo_tune.analysis.verdict import Verdict, judge
from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.registry import NORMALIZATIONS
from gdpo_tune.results.open_sweep import Sweep
from gdpo_tune.spec import SweepSpec
from gdpo_tune.spec.identity import differences, meaning
from gdpo_tune.spec.problems import did_you_mean, one_of

MODE = "normalization"
SEARCH = {"sampler", "scheduler", "warm_start"}
"""Keys of `search:` on which it hangs what a configuration of a sweep is worth."""
UNEQUAL = 1.5
"""Ratio of two sides' sizes, or of their costs, from which it is pointed out."""


@dataclass(frozen=True)
class Compared:
    """A comparison with its verdict, and what else may explain it."""

    comparison: Comparison
    verdict: Verdict
    notes: tuple[str, ...]
    """In what the sides differ besides, and what limits the answer."""
    file: Path
    """Where its page belongs."""


def compare_sweeps(left: Sweep, right: Sweep) -> Compared:
    """Two sweeps against each other.

    Raises:
        UsageError: their tasks or objectives differ, so no value of one means what it does in the
            other.
    """
    _refuse_unless_comparable(left, right)
    names = _names(left, right)
    goals = left.spec.objective_list()
    sides = [side_of(n, s.records, goals) for n, s in zip(names, (left, right), strict=True)]
    other = differences(_settings(left.spec), _settings(right.spec))
    notes = [f"{names[0]} has {line} as {names[1]}" for line in other]
    if notes:
        notes.insert(0, "What is found is found of all that the sweeps differ in, together:")
    if left.spec.constraints != right.spec.constraints:
        notes.append("They have different constraints, so different trials count for their fronts.")
    file = left.spec.directory / f"comparison_{right.spec.name}.html"
    return _compared(sides[0], sides[1], notes, file)


def compare_modes(sweep: Sweep, first: str, second: str) -> Compared:
    """Two normalization modes of one sweep against each other.

    Raises:
        UsageError: the sweep has no trial of one of them, or both are the same.
    """
    known = sorted({str(r.params[MODE]) for r in sweep.records if r.role != "untrained"})
    for mode in (first, second):
        if mode not in known:
            guess = "" if mode in NORMALIZATIONS else did_you_mean(mode, NORMALIZATIONS)
            raise UsageError(
                f"--modes {first} {second}: {guess}{sweep.spec.name} has no trial with {MODE} = "
                f"{mode}; it has {one_of(known) or 'none yet'}"
            )
    if first == second:
        raise UsageError(f"--modes {first} {second}: name two different modes")
    goals = sweep.spec.objective_list()
    sides = [
        side_of(mode, [r for r in sweep.records if r.params.get(MODE) == mode], goals, shared=True)
        for mode in (first, second)
    ]
    notes = [
        "Both modes come from one search, which proposed more of what looked better. Objectives "
        f"are compared over the {len(sides[0].independent)} and {len(sides[1].independent)} "
        "configurations that no model proposed; two sweeps with one mode each tell more."
    ]
    file = sweep.spec.directory / f"comparison_{first}_{second}.html"
    return _compared(sides[0], sides[1], notes, file)


def _settings(spec: SweepSpec) -> dict[str, Any]:
    """What two sweeps may differ in: what their trials mean, and how they were searched."""
    search = spec.search.model_dump(mode="json", include=SEARCH)
    return meaning(spec) | {f"search.{name}": value for name, value in search.items()}


def _compared(left: Side, right: Side, notes: Sequence[str], file: Path) -> Compared:
    for side in (left, right):
        if not side.tried:
            raise UsageError(
                f"{side.name} cannot be compared: no configuration of it has ended yet. What "
                "counts is what a search tried, without the untrained policy, the published "
                "weights and trials that failed"
            )
    comparison = compare(left, right)
    more = [*notes, *_limits(left, right)]
    return Compared(comparison, judge(comparison), tuple(more), file)


def _limits(left: Side, right: Side) -> list[str]:
    found: list[str] = []
    few, many = sorted((left.tried, right.tried))
    if many > UNEQUAL * few:
        found.append(
            f"{left.name} tried {left.tried} configurations, {right.name} {right.tried}: "
            f"hypervolumes are those at {few}, as a mean over choices of as many."
        )
    if left.stopped or right.stopped:
        found.append(
            f"{left.stopped} of {left.name} and {right.stopped} of {right.name} were stopped "
            "early: they count as adding nothing to a front, and objectives are compared over "
            "those that ran to their end, which look better than all would."
        )
    if few:
        (less, fewer), (more, name) = sorted(
            (side.completions / side.tried, side.name) for side in (left, right)
        )
        if more > UNEQUAL * less:
            found.append(
                f"A configuration of {name} took {more:,.0f} completions on average, one of "
                f"{fewer} {less:,.0f}: hypervolumes are at equal numbers of configurations, not "
                "at equal cost."
            )
    if left.has_replicates != right.has_replicates:
        lucky = right.name if left.has_replicates else left.name
        found.append(
            f"{lucky} has no replicates, so luck has not been taken off its front: its hypervolume "
            "is the more flattering one."
        )
    for side in (left, right):
        if side.failed:
            trials = "1 trial" if side.failed == 1 else f"{side.failed} trials"
            found.append(f"{trials} of {side.name} failed and count for nothing.")
    return found


def _refuse_unless_comparable(left: Sweep, right: Sweep) -> None:
    known, asked = left.spec, right.spec
    if known.directory.absolute() == asked.directory.absolute():
        raise UsageError(f"{known.name} and {asked.name} are the same sweep: name two")
    problems: list[str] = []
    if known.task != asked.task:
        problems.append(f"task = {known.task}, not {asked.task}")
    if known.objective_list() != asked.objective_list():
        mine = {f"objectives.{k}": v.model_dump() for k, v in known.objectives.items()}
        others = {f"objectives.{k}": v.model_dump() for k, v in asked.objectives.items()}
        order = differences(mine, others) or ["objectives in another order"]
        problems += order
    if problems:
        raise UsageError(
            f"{known.name} cannot be compared with {asked.name}: {'; '.join(problems)}. A "
            "comparison needs one task, and objectives with equal directions and references"
        )


def _names(left: Sweep, right: Sweep) -> tuple[str, str]:
    """Names that tell the sides apart; folders where the sweeps have one name."""
    if left.spec.name != right.spec.name:
        return left.spec.name, right.spec.name
    return left.spec.place, right.spec.place
