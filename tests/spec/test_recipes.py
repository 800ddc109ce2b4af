"""Recipes for GPUs: the pages about them agree with the files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gdpo_tune.core.gpu_memory import GIB
from gdpo_tune.core.policy_shapes import find_known_size
from gdpo_tune.core.text import show
from gdpo_tune.spec import load_spec
from gdpo_tune.spec.document import Place, Problems, YamlMap, parse_yaml
from gdpo_tune.spec.gpu import measure_trial
from tests.support.paths import ROOT

FILES = sorted((ROOT / "search_spaces").glob("*_qwen.yaml"))
DECISIVE = ("policy", "scoring", "data.", "model.", "space.", "training.")
HELD_OUT = (
    *("training.validation_prompts", "training.test_prompts", "training.samples_per_prompt"),
    *("training.evaluate_every", "training.checkpoint_every"),
)
"""Keys without a source: the authors have no held-out split."""


def read_written(file: Path) -> dict[str, str]:
    """Dotted key -> value as text, of the keys that a file itself has."""
    document = parse_yaml(file.read_text(), str(file), Problems(Place(str(file), 1)))
    flat = dict(flatten(document))
    return {key: value for key, value in flat.items() if key.startswith(DECISIVE)}


def flatten(node: YamlMap, prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, child in node.items():
        if isinstance(child, dict) and child and "log" not in child:
            yield from flatten(child, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", show(child)


def read_page() -> dict[str, dict[str, str]]:
    """Recipe -> key -> the value that the page says."""
    page = (ROOT / "docs" / "recipes.md").read_text()
    found: dict[str, dict[str, str]] = {}
    for section in page.split("\n## ")[1:]:
        rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", section, re.M)
        found[section.partition("\n")[0]] = dict(rows)
    return found


def test_the_page_compares_every_key_of_every_recipe_and_of_no_other():
    for file in FILES:
        written = read_written(file)
        compared = {key: value for key, value in written.items() if key not in HELD_OUT}
        assert compared
        assert read_page()[file.stem] == compared
    assert set(read_page()) == {file.stem for file in FILES}


def load(name, *overrides):
    return load_spec(ROOT / "search_spaces" / f"{name}.yaml", overrides, to_run=False)


@pytest.mark.parametrize("name", ["tools_qwen", "tools_3b_qwen"])
def test_the_published_step_of_the_recipe_for_tools(name):
    spec = load(name)
    assert spec.training.completions_per_step // 4 == 512
    assert 4 in spec.space.list_reachable("group_size")
    assert 0 in spec.space.list_reachable("beta")
    assert spec.space.list_reachable("epsilon_high") == (0.2,)


def test_the_recipe_for_the_larger_policy_differs_in_the_policy_alone():
    small, large = load("tools_qwen"), load("tools_3b_qwen")
    assert large.policy == "Qwen/Qwen2.5-3B-Instruct"
    for section in [
        "objectives",
        "scoring",
        "space",
        "training",
        "data",
        "model",
        "search",
        "rollout",
    ]:
        assert getattr(small, section) == getattr(large, section)


@pytest.mark.parametrize(
    ("name", "mebibytes", "overrides"),
    [
        ("tools_qwen", 81_559, ()),
        ("code_qwen", 81_559, ()),
        ("math_qwen", 81_559, ()),
        ("tools_3b_qwen", 143_771, ()),
        ("tools_3b_qwen", 81_559, ("model.lora_rank=32", "rollout.vllm_memory_share=0.4")),
    ],
)
def test_a_recipe_fits_on_the_gpu_that_its_head_names(name, mebibytes, overrides):
    """A100 and H100 of 80 GB and an H200 of 141 GB, as `nvidia-smi` reports them."""
    spec, device = load(name, *overrides), mebibytes << 20
    memory = measure_trial(spec, find_known_size(spec.policy))
    assert memory.least_room <= device
    assert memory.total <= memory.get_trainer_room(device)


def test_the_figures_of_the_page_about_policies():
    """36 GB without activations, 8 GB of them, and 24 GB of 80 for vLLM."""
    spec = load("tools_qwen")
    trainer = measure_trial(spec, find_known_size(spec.policy))
    assert (trainer.total - trainer.activations) / 1e9 == pytest.approx(35.8, abs=0.1)
    assert trainer.activations / 1e9 == pytest.approx(8.2, abs=0.1)
    assert trainer.engine.least < 24 * GIB
    without = measure_trial(load("tools_qwen", "space.beta=0"), find_known_size(spec.policy))
    assert without.reference == 0
