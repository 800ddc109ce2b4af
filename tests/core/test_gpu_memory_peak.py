"""The estimate of a step's memory beside the peak of a step on a simulated GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gdpo_tune.core.gpu_memory import CUDA_CONTEXT_BYTES, TrialMemory
from gdpo_tune.core.policy_shapes import _QwenShape, find_known_size
from gdpo_tune.spec import load_spec
from gdpo_tune.spec.gpu import measure_trial
from tests.support.paths import ROOT
from tests.support.simulated_gpu import build_qwen, measure_step

RECIPES = sorted(path.stem for path in (ROOT / "search_spaces").glob("*_qwen.yaml"))
METHODS = pytest.mark.parametrize("rank", [0, 32], ids=["every weight", "adapters"])
MOST = 1.2
"""Largest estimate, as a multiple of the peak."""


def measure_recipe(name: str, rank: int, policy: str = "", shards: int = 1) -> TrialMemory:
    """Return the memory of a recipe's trainer alone; a reference is weights, and nothing else."""
    spec = load_spec(ROOT / "search_spaces" / f"{name}.yaml", to_run=False)
    shapes = find_known_size(policy or spec.policy)
    spec = spec.replace(model=spec.model.replace(lora_rank=rank))
    spec = spec.replace(resources=spec.resources.replace(workers=shards))
    # An engine in each worker: else Transformers would sample, with the whole policy.
    return replace(measure_trial(spec, shapes), may_have_reference=False, has_engine=True)


def compare(memory: TrialMemory, tmp_path) -> float:
    """Return the estimate as a multiple of the peak."""
    peak = measure_step(build_qwen(memory.policy), memory, tmp_path)
    return (memory.total - CUDA_CONTEXT_BYTES) / peak


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@METHODS
@pytest.mark.parametrize("recomputes", [True, False])
def test_the_estimate_of_a_recipe_is_its_peak(recipe, rank, recomputes, tmp_path):
    memory = replace(measure_recipe(recipe, rank), recomputes=recomputes)
    assert 1 <= compare(memory, tmp_path) <= MOST


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "shards"), [(0, 1), (32, 1), (0, 8)])
def test_the_estimate_of_a_large_policy_is_its_peak(rank, shards, tmp_path):
    memory = measure_recipe("math_qwen", rank, "Qwen/Qwen2.5-7B", shards)
    assert 1 <= compare(memory, tmp_path) <= MOST


@pytest.mark.system
@METHODS
@pytest.mark.parametrize("shards", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_estimate_of_a_few_layers_is_their_peak(rank, shards, tmp_path):
    shape = _QwenShape(
        layers=4, hidden=1024, intermediate=5120, queries=1024, keys=256, vocabulary=151_936
    )
    memory = measure_recipe("math_qwen", rank, shards=shards)
    assert 1 <= compare(replace(memory, policy=shape.describe()), tmp_path) <= MOST
