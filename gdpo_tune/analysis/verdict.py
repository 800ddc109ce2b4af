"""The verdict of a comparison in plain words: each sentence follows from an interval and a test."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from gdpo_tune.analysis.comparison import ALPHA, Comparison, Effect
from gdpo_tune.analysis.probability import Interval
from gdpo_tune.core.text import format_list, format_percent

Winner = Literal["left", "right", "mixed", "undecided", "equal", "too few"]
CLOSE = 0.1
"""Ratios within this share of 1, their intervals included, count as equal for practice."""


@dataclass(frozen=True)
class Verdict:
    """The better side, and the reasons."""

    winner: Winner
    """`mixed`: each side is better in something; `equal`: no difference that matters is likely."""
    headline: str
    reasons: tuple[str, ...]

    @property
    def has_difference(self) -> bool:
        """True if any difference is significant."""
        return self.winner in ("left", "right", "mixed")


def build_verdict(comparison: Comparison) -> Verdict:
    """Return the verdict; of pairs of equal searches, at most 5 % get a significant difference."""
    left, right = comparison.left.name, comparison.right.name
    if comparison.smallest_p > ALPHA:
        text = (
            f"Too few trials to compare {left} with {right}: {comparison.left.tried_count} and "
            f"{comparison.right.tried_count}. No difference, however large, could be significant. "
            f"It takes at least {comparison.least_size} of each."
        )
        return Verdict("too few", text, ())  # figures would be taken for a finding
    reasons = tuple(_list_reasons(comparison))
    better: dict[str, Literal["left", "right"]] = {
        name: "left" if effect.value > 0.5 else "right"
        for name, effect in comparison.superiority.items()
        if _is_significant(effect, 0.5)
    }
    if _is_significant(comparison.ratio, 1.0):
        first, other = (left, right) if comparison.ratio.value > 1 else (right, left)
        winner: Winner = "left" if comparison.ratio.value > 1 else "right"
        against = sorted(name for name, side in better.items() if side != winner)
        but = f", but is worse in {format_list(against)}" if against else ""
        text = f"{first} beats {other}: its front covers more{but}."
        return Verdict("mixed" if against else winner, text, reasons)
    if better:
        parts = [
            f"{name} is better in {format_list(sorted(n for n, s in better.items() if s == side))}"
            for side, name in (("left", left), ("right", right))
            if side in better.values()
        ]
        text = f"{' and '.join(parts)}; no significant difference in what the fronts cover."
        sides = set(better.values())
        return Verdict(sides.pop() if len(sides) == 1 else "mixed", text, reasons)
    interval = comparison.ratio.interval
    if interval.low >= 1 - CLOSE and interval.high <= 1 + CLOSE:
        text = (
            f"{left} and {right} are practically equal: their hypervolumes differ by less than "
            f"{format_percent(CLOSE)}."
        )
        return Verdict("equal", text, reasons)
    return Verdict("undecided", f"{left} and {right}: no significant difference.", reasons)


def _is_significant(effect: Effect, null: float) -> bool:
    """Return whether both the test and the interval exclude the value `null` of no difference."""
    outside = effect.interval.low > null or effect.interval.high < null
    return effect.corrected <= ALPHA and outside


def _list_reasons(comparison: Comparison) -> list[str]:
    left, right, ratio = comparison.left.name, comparison.right.name, comparison.ratio
    lines = [
        f"Hypervolume at {comparison.count} configurations each: "
        f"{_describe_hypervolumes(comparison)}. Corrected p = {ratio.corrected:.3f}."
    ]
    for name, effect in comparison.superiority.items():
        better = left if effect.value > 0.5 else right
        result = (
            f"{better} is better" if _is_significant(effect, 0.5) else "no significant difference"
        )
        lines.append(
            f"{name}: {result}. A configuration of {left} beats one of {right} in "
            f"{_format_share(effect.value, effect.interval)} of pairs. "
            f"Corrected p = {effect.corrected:.3f}."
        )
    if not comparison.superiority:
        sizes = [len(side.independent) for side in (comparison.left, comparison.right)]
        names = format_list([goal.name for goal in comparison.left.objectives])
        lines.append(
            f"{names}: nothing to compare. {left} has {sizes[0]} and {right} {sizes[1]} "
            "configurations that can be compared one by one; it takes at least "
            f"{comparison.least_size} of each."
        )
    ours, theirs = comparison.coverage
    if not math.isnan(ours[0]) and not math.isnan(theirs[0]):
        lines.append(
            f"Coverage: {left} matches or beats {_format_share(*ours)} of the front of {right}, "
            f"and {right} {_format_share(*theirs)} of that of {left}."
        )
    ours, theirs = comparison.attained
    lines.append(
        f"Attainment: of the goals between the references and the best values, {left} alone "
        f"attains {_format_share(*ours)}, {right} alone {_format_share(*theirs)}."
    )
    return lines


def _format_share(share: float, interval: Interval) -> str:
    low, high = format_percent(interval.low), format_percent(interval.high)
    return f"{format_percent(share)} (95 %: {low} to {high})"


def _describe_hypervolumes(comparison: Comparison) -> str:
    """Return the ratio of the hypervolumes, or both hypervolumes where one is 0."""
    left, right, ratio = comparison.left.name, comparison.right.name, comparison.ratio
    ours, theirs = comparison.hypervolumes
    if ours > 0 and theirs > 0:
        high = ratio.interval.high
        upper = "any" if math.isinf(high) else f"{high:.2f}"
        span = f"{ratio.interval.low:.2f} to {upper}"
        return f"{left} has {ratio.value:.2f} times that of {right} (95 %: {span})"
    return f"{left} has {ours:.3g} and {right} {theirs:.3g}"
