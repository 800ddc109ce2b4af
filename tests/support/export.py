"""Recipes for the tests of exporters, and the keys that the libraries accept."""

from __future__ import annotations

import functools
import importlib.util
import json
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from pyarrow import parquet
from ruamel.yaml import YAML

from gdpo_tune.exporters.library import Exported
from gdpo_tune.exporters.page import format_page
from gdpo_tune.exporters.training_setup import TrainingSetup, build_training_setup
from gdpo_tune.exporters.write_export import build_export, export_training
from gdpo_tune.policies.load_policy import resolve_policy
from gdpo_tune.results.retrain import TrainingRequest, build_request_from_file
from tests.support.paths import ROOT

KEYS = ROOT / "tests" / "data" / "export_keys"
FIXED = (
    "search.trials=1",
    "training.steps=60",
    "space.normalization=gdpo",
    "space.group_size=8",
    "space.learning_rate=3e-5",
    "space.reward_weights.format=2",
    "space.reward_weights.length=0.5",
)
"""Values for what the shipped search space leaves open; the largest weight is not 1."""


def make_request(
    overrides: Sequence[str] = (), space: str = "code", fixed: Sequence[str] = FIXED
) -> TrainingRequest:
    return build_request_from_file(ROOT / "search_spaces" / f"{space}.yaml", [*fixed, *overrides])


def make_recipe(
    *overrides: str, request: TrainingRequest | None = None, **fields: object
) -> TrainingSetup:
    """Return its recipe; `fields` replace some of its own, or of its request."""
    recipe = _build_recipe(request) if request else _make_plain_recipe(overrides)
    own = {"name": "code-knee", "note": "trial 7 of x", **fields}
    asked = {key: own.pop(key) for key in ("trial_lines", "parents") if key in own}
    if "policy_name" in own:
        asked["spec"] = recipe.spec.replace(policy=own.pop("policy_name"))
    return replace(recipe, request=replace(recipe.request, **asked), **own)


def _build_recipe(request: TrainingRequest) -> TrainingSetup:
    return build_training_setup(request, resolve_policy(request.spec.policy))


@functools.cache
def _make_plain_recipe(overrides: tuple[str, ...]) -> TrainingSetup:
    return _build_recipe(make_request(overrides))


def export_to(library: str, recipe: TrainingSetup) -> Exported:
    return build_export(library, recipe)


def make_page(library: str, *overrides: str) -> str:
    """Return the page of a training with every value fixed."""
    request = make_request(overrides)
    recipe = make_recipe(request=request)
    return format_page(recipe, export_to(library, recipe))


def parse_settings(exported: Exported) -> dict[str, object]:
    """Return the content of a file as nested values."""
    return YAML(typ="safe").load(exported.text)


def flatten(settings: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return dotted key -> value."""
    flat: dict[str, object] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def read_known_keys(library: str) -> set[str]:
    lines = (KEYS / f"{library}.txt").read_text(encoding="utf-8").splitlines()
    return {line for line in lines if not line.startswith("#")}


FEW = ("training.train_prompts=16",)


def export_folder(
    directory: Path, *overrides: str, space: str = "code", library: str = "trl", **options: bool
) -> TrainingRequest:
    """Export a shipped search space with few prompts, and return its request."""
    few = () if any("train_prompts" in change for change in overrides) else FEW
    request = make_request((*overrides, *few), space)
    policy = "the export replaces the policies that ship"
    export_training(request, library, policy, directory, **options)
    return request


def read_prompts(directory: Path) -> list[dict[str, Any]]:
    return parquet.read_table(directory / "prompts.parquet").to_pylist()


def load_rewards(directory: Path) -> ModuleType:
    """Import the `rewards.py` of a directory with its copy of the package, as a library does.

    Modules that it imports when it scores are those of this package.
    """
    name = f"rewards_{abs(hash(directory))}"
    spec = importlib.util.spec_from_file_location(name, directory / "rewards.py")
    assert spec
    assert spec.loader
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    with copied_modules(directory):
        spec.loader.exec_module(module)
    return module


@contextmanager
def copied_modules(directory: Path) -> Generator[None]:
    """Let a program of an export import its copy of the package, as where no other is loaded."""
    ours = _take_out_modules()
    try:
        yield
    finally:
        _take_out_modules()
        sys.modules.update(ours)
        sys.path.remove(str(directory.resolve() / "modules"))


def _take_out_modules() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] == "gdpo_tune"]
    return {name: sys.modules.pop(name) for name in names}


def run_in_export(
    directory: Path, program: str, batch: Sequence[object], *arguments: str, **environment: str
) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        input=json.dumps(batch),
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", **environment},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
