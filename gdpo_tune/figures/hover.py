"""The text beside the pointer: everything that is known of one configuration."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from gdpo_tune.analysis.replicates import Configuration
from gdpo_tune.core.formatting import format_estimate, format_parameter
from gdpo_tune.core.trials import Objective


def hover_text(configuration: Configuration, objectives: Sequence[Objective]) -> str:
    """HTML lines in plotly's dialect: trials, values on test and validation, every parameter."""
    lines = [f"<b>{escape(heading(configuration))}</b>", standing(configuration)]
    for objective in objectives:
        test = format_estimate(configuration.mean[objective.name])
        seen = configuration.validation.get(objective.name)
        lines.append(
            f"{escape(objective.name)}: <b>{test}</b> (validation {format_estimate(seen)})"
        )
    if configuration.role != "untrained":
        lines += [
            f"{escape(name)} = {escape(format_parameter(value))}"
            for name, value in sorted(configuration.params.items())
        ]
    return "<br>".join(lines)


def heading(configuration: Configuration) -> str:
    """Which trials these are, such as `trial 7, again as 20 and 23`."""
    if configuration.role == "untrained":
        return "untrained policy"
    head = f"trial {configuration.first}"
    again = [str(number) for number in configuration.numbers if number != configuration.first]
    if again:
        head += ", again as " + " and ".join(filter(None, [", ".join(again[:-1]), again[-1]]))
    return head + (" (published weights)" if configuration.role == "published" else "")


def standing(configuration: Configuration) -> str:
    """How it stands towards the front, in a few words."""
    if configuration.role == "untrained":
        return "baseline, not trained"
    if not configuration.feasible:
        return "breaks a constraint"
    seeds = "1 seed, provisional" if configuration.provisional else f"{configuration.seeds} seeds"
    place = "on the front" if configuration.on_front else "dominated"
    return f"{place} ({seeds}; P(on the front) = {configuration.probability:.2f})"
