"""Where two sweeps differ in the meaning of their trials."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gdpo_tune.spec.model import SweepSpec, decisive_settings
from gdpo_tune.spec.notation import notation
from gdpo_tune.spec.problems import show


def meaning(spec: SweepSpec) -> dict[str, Any]:
    """Return all that `SweepSpec.identity` may use: dotted key -> value as in a file."""
    sections: dict[str, dict[str, Any]] = {
        "objectives": {name: goal.model_dump() for name, goal in spec.objectives.items()},
        "space": {name: notation(domain) for name, domain in spec.space.domains.items()},
    }
    for name in ("training", "sandbox", "data", "model"):
        sections[name] = decisive_settings(getattr(spec, name))
    flat = {f"{name}.{k}": v for name, section in sections.items() for k, v in section.items()}
    return {"task": spec.task, "policy": spec.policy, **flat}


def differences(known: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """Return each key that two meanings disagree on, with both values."""
    return [
        f"{key} = {show(known.get(key))}, not {show(asked.get(key))}"
        for key in dict.fromkeys([*asked, *known])
        if known.get(key) != asked.get(key)
    ]
