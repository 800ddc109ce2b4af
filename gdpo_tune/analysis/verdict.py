"""What a comparison comes to, in plain words: each sentence follows from an interval and a test."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from gdpo_tune.analysis.comparison import ALPHA, Comparison, Effect
from gdpo_tune.analysis.probability import Interval
from gdpo_tune.core.formatting import format_percent

Winner = Literal["left", "right", "mixed", "undecided", "equal", "too few"]
CLOSE = 0.1
"""Ratios within this share of 1, their intervals included, count as equal for practice."""


@dataclass(frozen=True)
class Verdict:
    """Who is ahead, and why it is said."""

    winner: Winner
    """`mixed`: each side is better in something; `equal`: no difference that matters is likely."""
    headline: str
    reasons: tuple[str, ...]

    @property
    def differs(self) -> bool:
        """Whether any difference is called."""
        return self.winner in ("left", "right", "mixed")


def judge(comparison: Comparison) -> Verdict:
    """The verdict. Of two equal searches, at most 5 % are called different in anything."""
    left, right = comparison.left.name, comparison.right.name
    called = _called(comparison)
    if comparison.smallest_p > ALPHA:
        text = (
            f"Too few trials to compare {left} with {right}: {comparison.left.tried} and "
            f"{comparison.right.tried}. No difference, however large, could be significant."
        )
        return Verdict("too few", text, ())  # figures would be taken for a finding
    reasons = tuple(_reasons(comparison))
    if _clear(comparison.ratio, 1.0):
        first, other = (left, right) if comparison.ratio.value > 1 else (right, left)
        winner: Winner = "left" if comparison.ratio.value > 1 else "right"
        against = sorted(name for name, side in called.items() if side != winner)
        but = f", but is worse in {_listed(against)}" if against else ""
        text = f"{first} beats {other}: its front covers more{but}."
        return Verdict("mixed" if against else winner, text, reasons)
    if called:
        ahead = {
            side: sorted(n for n, found in called.items() if found == side)
            for side in ("left", "right")
        }
        parts = [
            f"{name} is better in {_listed(ahead[side])}"
            for side, name in (("left", left), ("right", right))
            if ahead[side]
        ]
        text = f"{' and '.join(parts)}; no significant difference in what the fronts cover."
        sides = set(called.values())
        return Verdict(sides.pop() if len(sides) == 1 else "mixed", text, reasons)
    interval = comparison.ratio.interval
    if interval.low >= 1 - CLOSE and interval.high <= 1 + CLOSE:
        text = (
            f"{left} and {right} are practically equal: their hypervolumes differ by less than "
            f"{format_percent(CLOSE)}."
        )
        return Verdict("equal", text, reasons)
    return Verdict("undecided", f"{left} and {right}: no significant difference.", reasons)


def _called(comparison: Comparison) -> dict[str, Literal["left", "right"]]:
    """Objective -> the side that is better in it, for those in which one is."""
    return {
        name: "left" if effect.value > 0.5 else "right"
        for name, effect in comparison.superiority.items()
        if _clear(effect, 0.5)
    }


def _clear(effect: Effect, none: float) -> bool:
    """Whether both the test and the interval say that there is a difference."""
    outside = effect.interval.low > none or effect.interval.high < none
    return effect.corrected <= ALPHA and outside


def _reasons(comparison: Comparison) -> list[str]:
    left, right, ratio = comparison.left.name, comparison.right.name, comparison.ratio
    lines = [
        f"Hypervolume at {comparison.count} configurations each: {_volumes(comparison)}. "
        f"{_odds(ratio)}"
    ]
    for name, effect in comparison.superiority.items():
        ahead = left if effect.value > 0.5 else right
        told = f"{ahead} is better" if _clear(effect, 0.5) else "no significant difference"
        lines.append(
            f"{name}: {told}. A configuration of {left} beats one of {right} in "
            f"{_percent(effect.value, effect.interval)} of pairs. {_odds(effect)}"
        )
    (ours, our_span), (theirs, their_span) = comparison.coverage
    if not math.isnan(ours) and not math.isnan(theirs):
        lines.append(
            f"Coverage: {left} matches or beats {_percent(ours, our_span)} of the front of "
            f"{right}, and {right} {_percent(theirs, their_span)} of that of {left}."
        )
    (mine, my_span), (others, other_span) = comparison.attained
    lines.append(
        f"Attainment: of the goals between the references and the best values, {left} alone "
        f"attains {_percent(mine, my_span)}, {right} alone {_percent(others, other_span)}."
    )
    return lines


def _odds(effect: Effect) -> str:
    """What p is, in a sentence."""
    return f"Corrected p = {effect.corrected:.3f}."


def _percent(value: float, interval: Interval) -> str:
    low, high = format_percent(interval.low), format_percent(interval.high)
    return f"{format_percent(value)} (95 %: {low} to {high})"


def _volumes(comparison: Comparison) -> str:
    """The sides' hypervolumes against each other; as they are where one has none."""
    left, right, ratio = comparison.left.name, comparison.right.name, comparison.ratio
    ours, theirs = comparison.hypervolumes
    if ours > 0 and theirs > 0:
        return f"{left} has {ratio.value:.2f} times that of {right} (95 %: {_span(ratio.interval)})"
    return f"{left} has {ours:.3g} and {right} {theirs:.3g}"


def _span(interval: Interval) -> str:
    high = "any" if math.isinf(interval.high) else f"{interval.high:.2f}"
    return f"{interval.low:.2f} to {high}"


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
