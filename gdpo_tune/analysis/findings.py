"""The findings of a sweep in sentences, each of which follows from an interval or from its lack."""

from __future__ import annotations

from gdpo_tune.analysis.effects import Change, Effects, ParameterEffect
from gdpo_tune.analysis.front import Front, name_extreme
from gdpo_tune.core.text import (
    format_count,
    format_estimate,
    format_hypervolume,
    format_list,
    format_percent,
)
from gdpo_tune.core.trials import title_candidate

MORE = 2
"""Factor by which more configurations may settle a ranking that is not reliable."""
MOST = 6
"""Effects that get a sentence: the most important ones."""


def describe_findings(front: Front, effects: Effects) -> tuple[list[str], list[str]]:
    """Return sentences on which parameters mattered, and on the limits of the data."""
    return _list_findings(front, effects), _list_limits(front, effects)


def _list_findings(front: Front, effects: Effects) -> list[str]:
    lines: list[str] = []
    if front.members:
        lines.append(
            f"The front has {format_count(len(front.members), 'configuration')} and a "
            "hypervolume of "
            f"{format_hypervolume(front.hypervolume, front.hypervolume_interval)}."
        )
    for goal in front.objectives:
        if goal.name in front.extremes and not front.list_ties(goal.name):
            best = front.extremes[goal.name]
            title = title_candidate(best.name)
            lines.append(
                f"{title[0].upper()}{title[1:]} has the {name_extreme(goal)}, "
                f"{format_estimate(best.mean[goal.name])}. No other configuration is tied with it."
            )
    clear = [effect for effect in effects.estimates if effect.strength == "clear"]
    clear.sort(key=lambda effect: -effect.importance)
    lines += [describe_effect(effect) for effect in clear[:MOST]]
    if len(clear) > MOST:
        lines.append(f"Weaker effects: {len(clear) - MOST} more in the figure of importance.")
    return lines


def _list_limits(front: Front, effects: Effects) -> list[str]:
    lines = _list_limits_of_effects(effects)
    stopped = sum(record.state == "pruned" and record.is_training for record in front.records)
    if effects.estimates and stopped:
        lines.append(
            f"Stopped early, without a value on test prompts: {format_count(stopped, 'trial')}. "
            "Effects are estimated from the trials that ran to the end; over all trials they may "
            "be larger."
        )
    provisional = sum(member.is_provisional for member in front.members)
    if provisional:
        lines.append(
            f"Provisional, with only one seed: {provisional} of the "
            f"{format_count(len(front.members), 'configuration')} on the front."
        )
    doubtful = [member.name for member in front.members if member.probability < 0.5]
    if doubtful:
        lines.append(
            "More likely dominated than not, given the standard errors: "
            f"{format_list([title_candidate(name) for name in doubtful])}."
        )
    varied = [name for name in front.extremes if name not in effects.constant]
    tied = [name for name in varied if front.list_ties(name)]
    if tied:
        lines.append(f"Top configurations for {format_list(tied)} are statistically tied.")
    return lines


def _list_limits_of_effects(effects: Effects) -> list[str]:
    lines: list[str] = []
    if effects.configurations < effects.needed:
        lines.append(
            "Too few configurations to say which parameters mattered: it takes "
            f"{effects.needed} that were trained to the end, and this sweep has "
            f"{effects.configurations}. Raise search.trials."
        )
    if effects.unreliable:
        lines.append(
            "Too few configurations to say which parameters mattered for "
            f"{format_list(effects.unreliable)}: {effects.configurations} do not settle their "
            f"order, about {MORE * effects.configurations} would. Raise search.trials."
        )
    if effects.constant:
        lines.append(
            f"Did not vary: {format_list(effects.constant)}. All {effects.configurations} "
            "configurations have the same value, so no parameter mattered."
        )
    unclear = [effect for effect in effects.estimates if effect.strength == "unclear"]
    lines += [
        f"Unclear: {effect.parameter} may explain {_format_share(effect)} of the variance in "
        f"{effect.objective}."
        for effect in unclear
    ]
    names = list(dict.fromkeys(effect.parameter for effect in effects.estimates))
    silent = [
        name
        for name in names
        if all(e.strength == "none" for e in effects.estimates if e.parameter == name)
    ]
    if silent:
        lines.append(
            f"No detectable effect: {format_list(silent)}. The intervals include what noise alone "
            "gives; the figure of importance shows how large an effect can still be."
        )
    return lines


def describe_effect(effect: ParameterEffect) -> str:
    """Return a sentence on a clear effect: its share of the variance, and its changes."""
    changes = [c for c in effect.changes if c.interval.low > 0 or c.interval.high < 0]
    share = (
        f"{effect.parameter} explains {_format_share(effect)} of the variance in {effect.objective}"
    )
    if not changes:
        return f"{share}, by a curve or together with other parameters."
    return f"{share}: {'; '.join(_describe_change(change) for change in changes)}."


def _format_share(effect: ParameterEffect) -> str:
    low, high = format_percent(effect.interval.low), format_percent(effect.interval.high)
    return f"{format_percent(effect.importance)} (95 %: {low} to {high})"


def _describe_change(change: Change) -> str:
    word = "raises" if change.difference > 0 else "lowers"
    low, high = sorted((abs(change.interval.low), abs(change.interval.high)))
    return (
        f"going from {change.before} to {change.after} {word} it by {abs(change.difference):.3g} "
        f"({low:.2g} to {high:.2g})"
    )
