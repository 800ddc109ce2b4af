"""What decides the meaning of a sweep's trials: a short hash of it, and where two sweeps differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from gdpo_tune.core.settings import INDIFFERENT_TRAINING, SandboxSettings, TrainingSettings
from gdpo_tune.spec.dump import notation
from gdpo_tune.spec.problems import show

if TYPE_CHECKING:
    from gdpo_tune.spec.model import SweepSpec

LENGTH = 12
DECISIVE_SANDBOX_KEYS = ("modules", "cpu_seconds", "wall_seconds", "memory_mb")
"""Settings of the sandbox on which a verdict can hang."""


def identity(spec: SweepSpec) -> str:
    """Short hash of what decides a trial's meaning.

    That is task, policy, objectives, space, training, and `data`, `model` and
    `DECISIVE_SANDBOX_KEYS` where they are not the defaults; where the sandbox is does not count.
    Equal for files that say the same in another order or notation. Budgets, resources, constraints,
    rollout, tracking, the name and `INDIFFERENT_TRAINING` may change under the same identity. A
    parameter that was added to the program later is left out while it has its default alone, so
    that sweeps from before go on.
    """
    decisive = spec.model_dump(mode="json", include={"task", "policy", "objectives", "space"})
    decisive["training"] = decisive_training(spec.training)
    for name in spec.space.says_nothing:
        del decisive["space"]["domains"][name]
    sections = {"sandbox": decisive_sandbox(spec.sandbox)}
    defaults = {"sandbox": decisive_sandbox(SandboxSettings())}
    for name in ("data", "model"):
        settings = getattr(spec, name)
        sections[name], defaults[name] = asdict(settings), asdict(type(settings)())
    for name, section in sections.items():
        changed = {k: v for k, v in section.items() if v != defaults[name][k]}
        if changed:
            decisive[name] = changed
    text = json.dumps(decisive, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:LENGTH]


def decisive_training(settings: TrainingSettings) -> dict[str, Any]:
    """What counts of `training:`."""
    return {k: v for k, v in asdict(settings).items() if k not in INDIFFERENT_TRAINING}


def decisive_sandbox(settings: SandboxSettings) -> dict[str, Any]:
    """What counts of `sandbox:`; the order of modules does not."""
    known = {**asdict(settings), "modules": tuple(sorted(set(settings.modules)))}
    return {name: known[name] for name in DECISIVE_SANDBOX_KEYS}


def meaning(spec: SweepSpec) -> dict[str, Any]:
    """Everything that `identity` may look at: dotted key -> value as it is written in a file."""
    sections = {
        "objectives": {name: goal.model_dump() for name, goal in spec.objectives.items()},
        "space": {name: notation(domain) for name, domain in spec.space.domains.items()},
        "training": decisive_training(spec.training),
        "sandbox": decisive_sandbox(spec.sandbox),
        "data": asdict(spec.data),
        "model": asdict(spec.model),
    }
    flat = {f"{name}.{k}": v for name, section in sections.items() for k, v in section.items()}
    return {"task": spec.task, "policy": spec.policy, **flat}


def differences(known: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """Each key that two meanings disagree on, with both values."""
    return [
        f"{key} = {show(known.get(key))}, not {show(asked.get(key))}"
        for key in dict.fromkeys([*asked, *known])
        if known.get(key) != asked.get(key)
    ]
