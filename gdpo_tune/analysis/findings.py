"""The findings of a sweep in sentences, each of which follows from an interval or from its lack."""

from __future__ import annotations

from gdpo_tune.analysis.effects import Change, Effects, ParameterEffect
from gdpo_tune.analysis.front import Front, name_extreme
from gdpo_tune.core.candidates import title_candidate
from gdpo_tune.core.formatting import (
    format_count,
    format_estimate,
    format_interval,
    format_list,
    format_number,
    format_percent,
)

SURE = 0.05
"""Corrected p up to which an effect counts as detected."""
MOST = 6
"""Effects that get a sentence: the most important ones."""


def describe_findings(front: Front, effects: Effects) -> tuple[list[str], list[str]]:
    """Return sentences on which parameters mattered, and on the limits of the data."""
    return _list_findings(front, effects), _list_limits(front, effects)


def _list_findings(front: Front, effects: Effects) -> list[str]:
    lines: list[str] = []
    if front.members:
        interval = front.hypervolume_interval
        lines.append(
            f"The front has {format_count(len(front.members), 'configuration')} and a "
            f"hypervolume of {format_number(front.hypervolume)} "
            f"(95 %: {format_interval(interval.low, interval.high)})."
        )
    for goal in front.objectives:
        if goal.name in front.extremes and not front.list_ties(goal.name):
            best = front.extremes[goal.name]
            title = title_candidate(best.name)
            lines.append(
                f"{title[0].upper()}{title[1:]} has the {name_extreme(goal)}, "
                f"{format_estimate(best.mean[goal.name])}. No other configuration is tied with it."
            )
    detected = sorted((e for e in effects.estimates if e.p <= SURE), key=lambda e: -e.importance)
    lines += [describe_effect(effect) for effect in detected[:MOST]]
    if len(detected) > MOST:
        lines.append(f"Weaker effects: {len(detected) - MOST} more in the figure of importance.")
    return lines


def _list_limits(front: Front, effects: Effects) -> list[str]:
    lines: list[str] = []
    if not effects.estimates:
        lines.append(
            f"Too few configurations to measure what a parameter does: {effects.configurations}. "
            f"This space needs {effects.needed}."
        )
    detected = {effect.parameter for effect in effects.estimates if effect.p <= SURE}
    silent = list(
        dict.fromkeys(e.parameter for e in effects.estimates if e.parameter not in detected)
    )
    if silent:
        lines.append(
            f"No detectable effect: {format_list(silent)}. There may be one: the intervals in the "
            "figure of importance show how large it can be."
        )
    stopped = sum(record.state == "pruned" and record.is_training for record in front.records)
    if effects.estimates and stopped:
        lines.append(
            f"Stopped early, without a value on test prompts: {format_count(stopped, 'trial')}. "
            "Effects are those among trials that ran to their end; over all they may be larger."
        )
    provisional = sum(member.is_provisional for member in front.members)
    if provisional:
        lines.append(
            f"Provisional, because they have one seed: {provisional} of the "
            f"{format_count(len(front.members), 'configuration')} on the front."
        )
    doubtful = [member.name for member in front.members if member.probability < 0.5]
    if doubtful:
        lines.append(
            "More likely dominated than not, given the standard errors: "
            f"{format_list([title_candidate(name) for name in doubtful])}."
        )
    if front.knee_shortfall:
        lines.append(
            "No member of the front keeps all that the untrained policy has: the knee is worse in "
            f"{format_list(front.knee_shortfall)}."
        )
    tied = [name for name in front.extremes if front.list_ties(name)]
    if tied:
        lines.append(f"Top configurations for {format_list(tied)} are statistically tied.")
    if effects.estimates:
        lines.append("Effects are those of single parameters: interactions are not modelled.")
    return lines


def describe_effect(effect: ParameterEffect) -> str:
    """Return a sentence on a detected effect: its share of the variance, and its changes."""
    changes = [c for c in effect.changes if c.interval.low > 0 or c.interval.high < 0]
    share = (
        f"{effect.parameter} explains {format_percent(effect.importance)} (95 %: "
        f"{format_percent(effect.interval.low)} to {format_percent(effect.interval.high)}) of the "
        f"remaining variance in {effect.objective}"
    )
    if not effect.changes:
        return f"{share}. Its values are confounded with those of another parameter."
    if not changes and len(effect.changes) > 1:
        first = effect.changes[0].before
        return f"{share}, though no value differs from {first} by more than noise."
    if not changes:
        return f"{share}, by a curve rather than a slope."
    return f"{share}: {'; '.join(_describe_change(change) for change in changes)}."


def _describe_change(change: Change) -> str:
    word = "raises" if change.difference > 0 else "lowers"
    low, high = sorted((abs(change.interval.low), abs(change.interval.high)))
    return (
        f"going from {change.before} to {change.after} {word} it by {abs(change.difference):.3g} "
        f"({low:.2g} to {high:.2g})"
    )
