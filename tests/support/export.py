"""Recipes for the tests of exporters, and the keys that the libraries know."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ruamel.yaml import YAML

from gdpo_tune.core import registry
from gdpo_tune.exporters.base import Exported
from gdpo_tune.exporters.recipe import Recipe, recipe_of
from gdpo_tune.policies.load_policy import policy_folder
from gdpo_tune.results.retrain import Request, from_file

ROOT = Path(__file__).resolve().parents[2]
KEYS = ROOT / "tests" / "data" / "export_keys"
FIXED = (
    "space.normalization=gdpo",
    "space.group_size=8",
    "space.learning_rate=3e-5",
    "space.reward_weights.format=2",
    "space.reward_weights.length=0.5",
)
"""What the shipped search space leaves open; the largest weight is not 1."""


def asked(
    overrides: Sequence[str] = (), space: str = "code", fixed: Sequence[str] = FIXED
) -> Request:
    """A training with every value fixed."""
    return from_file(ROOT / "search_spaces" / f"{space}.yaml", [*fixed, *overrides])


def recipe(*overrides: str, request: Request | None = None, **fields: object) -> Recipe:
    """Its recipe; `fields` replace some of its own."""
    wanted = request or asked(overrides)
    made = recipe_of(
        wanted.spec,
        wanted.params,
        wanted.seed,
        policy=policy_folder(wanted.spec.policy),
        name="code-knee",
        note="trial 7 of x",
    )
    return replace(made, **fields)


def exported(library: str, made: Recipe) -> Exported:
    return registry.load(registry.EXPORTERS[library])(made)


def settings(result: Exported) -> dict[str, object]:
    """What a file says, as nested values."""
    match Path(result.file).suffix:
        case ".yaml":
            return YAML(typ="safe").load(result.text)
        case ".toml":
            return tomllib.loads(result.text)
        case _:
            return _flags(result.text)


def _flags(script: str) -> dict[str, object]:
    words = shlex.split(script.replace("\\\n", " "), comments=True)
    found: dict[str, object] = {}
    key = ""
    for word in words:
        if word.startswith("--"):
            key = word.removeprefix("--")
            found[key] = True
        elif key:
            found[key] = word if found[key] is True else f"{found[key]} {word}"
    return found


def pinned(library: str) -> set[str]:
    """Keys that the library's source knows."""
    lines = (KEYS / f"{library}.txt").read_text(encoding="utf-8").splitlines()
    return {line for line in lines if not line.startswith("#")}
