"""What a sweep has found, in words: each sentence follows from an interval, or from its lack."""

from __future__ import annotations

from collections.abc import Sequence

from gdpo_tune.analysis.effects import Change, Effects, ParameterEffect
from gdpo_tune.analysis.front import Front

SURE = 0.05
"""Corrected p below which an effect is told."""
MOST = 6
"""Effects that are told: the most important ones."""


def reading(front: Front, found: Effects) -> tuple[list[str], list[str]]:
    """What moved what, and what the data cannot tell: sentences for a person."""
    return _known(front, found), _unknown(front, found)


def _known(front: Front, found: Effects) -> list[str]:
    lines: list[str] = []
    if front.members:
        interval = front.hypervolume_interval
        lines.append(
            f"The front has {len(front.members)} configurations and a hypervolume of "
            f"{front.hypervolume:.3g} (95 %: {interval.low:.3g} to {interval.high:.3g})."
        )
    for name, best in front.extremes.items():
        if front.leads(name).startswith("best"):
            value = best.mean[name]
            lines.append(
                f"Trial {best.first} is the best in {name}, {value.mean:.3f} ± {value.se:.3f}: "
                "ahead of every other one by more than noise."
            )
    told = sorted((e for e in found.found if e.p <= SURE), key=lambda e: -e.importance)
    lines += [_told(effect) for effect in told[:MOST]]
    if len(told) > MOST:
        lines.append(f"{len(told) - MOST} weaker effects are in the picture below.")
    return lines


def _unknown(front: Front, found: Effects) -> list[str]:
    lines: list[str] = []
    if not found.found:
        lines.append(
            f"{found.configurations} configurations are too few to tell what a parameter does: "
            f"that takes {found.needed} of this space."
        )
    silent = _silent(found)
    if silent:
        lines.append(
            f"No effect could be told from noise: {_listed(silent)}. That is not to say that there "
            "is none; the intervals below say how large one may be."
        )
    stopped = sum(record.state == "pruned" for record in front.records)
    if found.found and stopped:
        lines.append(
            f"{stopped} trials were stopped early and have no value on test prompts. What "
            "parameters do is told of those that ran to their end; over all it may be more."
        )
    provisional = sum(member.provisional for member in front.members)
    if provisional:
        lines.append(
            f"{provisional} of {len(front.members)} places on the front rest on one seed each."
        )
    doubtful = [m.first for m in front.members if m.probability < 0.5]
    if doubtful:
        lines.append(
            "More likely beaten than not, given their errors: trial "
            f"{_listed([str(number) for number in doubtful])}."
        )
    for name in front.extremes:
        if not front.leads(name).startswith("best"):
            lines.append(f"Which configuration is the best in {name} lies within the noise.")
    if found.found:
        lines.append(
            "Whether two parameters work together (interactions) is not looked at; what they do "
            "together counts as noise here."
        )
    return lines


def _told(effect: ParameterEffect) -> str:
    changes = [c for c in effect.changes if c.interval.low > 0 or c.interval.high < 0]
    share = (
        f"{effect.parameter} explains {effect.importance:.0%} (95 %: {effect.interval.low:.0%} to "
        f"{effect.interval.high:.0%}) of what the other parameters leave of {effect.objective}"
    )
    if not effect.changes:
        return f"{share}. Its values came together with those of another parameter."
    if not changes and len(effect.changes) > 1:
        first = effect.changes[0].before
        return f"{share}, though no value differs from {first} by more than noise."
    if not changes:
        return f"{share}, by a bend rather than a slope."
    return f"{share}: {'; '.join(_changed(change) for change in changes)}."


def _changed(change: Change) -> str:
    word = "raises" if change.difference > 0 else "lowers"
    low, high = sorted((abs(change.interval.low), abs(change.interval.high)))
    return (
        f"going from {change.before} to {change.after} {word} it by {abs(change.difference):.3g} "
        f"({low:.2g} to {high:.2g})"
    )


def _silent(found: Effects) -> list[str]:
    """Parameters without any effect that is told, each with the objectives."""
    names = dict.fromkeys(effect.parameter for effect in found.found)
    return [n for n in names if all(e.p > SURE for e in found.found if e.parameter == n)]


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
