"""Figures of a front as JSON, and in a sentence: for messages to people and programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gdpo_tune.analysis.front import Front, find_untrained
from gdpo_tune.core.text import format_count, format_hypervolume, format_number
from gdpo_tune.core.trials import title_candidate


def build_figures(front: Front) -> dict[str, Any]:
    """Return `trials`, `failed_trials`, `front` (members) and, where it has any, `hypervolume`.

    `hypervolume_interval` is its interval at 95 %, `[low, high]`.
    """
    figures: dict[str, Any] = {
        "trials": len(front.records),
        "failed_trials": sum(record.state == "failed" for record in front.records),
        "front": len(front.members),
    }
    if front.members:
        figures["hypervolume"] = front.hypervolume
        figures["hypervolume_interval"] = list(front.hypervolume_interval)
    return figures


def describe_figures(figures: Mapping[str, Any]) -> str:
    """Return what `build_figures` found, without a full stop: `3 trials, 2 on the front, ...`."""
    return f"{format_count(figures['trials'], 'trial')}, {describe_front(figures)}"


def describe_front(figures: Mapping[str, Any]) -> str:
    """Return the part of `describe_figures` about the front alone."""
    text = f"{figures['front']} on the front"
    if "hypervolume" in figures:
        volume = format_hypervolume(figures["hypervolume"], figures["hypervolume_interval"])
        text += f", hypervolume {volume}"
    return text


def build_knee(front: Front) -> dict[str, Any]:
    """Return the knee's `name` and `test` values, and those of the untrained policy; may be {}."""
    if front.knee is None:
        return {}
    untrained, goals = find_untrained(front.baselines), front.objectives
    policies = {"test": front.knee, **({"untrained": untrained} if untrained else {})}
    values = {
        key: {goal.name: policy.mean[goal.name].mean for goal in goals}
        for key, policy in policies.items()
    }
    return {"name": front.knee.name, **values}


def describe_knee(knee: Mapping[str, Any]) -> str:
    """Return what `build_knee` found: `Knee: trial 7, correctness 0.610 (untrained 0.596), ...`."""
    untrained = knee.get("untrained", {})
    values = [
        f"{name} {format_number(value)}"
        + (f" (untrained {format_number(untrained[name])})" if name in untrained else "")
        for name, value in knee["test"].items()
    ]
    return f"Knee: {title_candidate(knee['name'])}, {', '.join(values)}"
