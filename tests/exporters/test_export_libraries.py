"""Exported files against the libraries' own packages, in a temporary directory."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest
import torch

from gdpo_tune.training.normalization import compute_advantages
from tests.support.export import (
    export_to,
    flatten,
    make_recipe,
    parse_settings,
    read_known_keys,
)

pytestmark = pytest.mark.slow

VERSIONS = {"verl": "0.9.1", "ms-swift": "4.6.0", "axolotl": "0.19.0"}


def pip(*words: str) -> None:
    """Run pip, or skip the test with what it said."""
    command = [sys.executable, "-m", "pip", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"pip {' '.join(words)}: {done.stderr.strip().splitlines()[-1:]}")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The folder of a library's package, without what it depends on."""
    found: dict[str, Path] = {}

    def of(library: str) -> Path:
        if library not in found:
            folder = tmp_path_factory.mktemp(library)
            pip("download", "-q", "--no-deps", "-d", str(folder), f"{library}=={VERSIONS[library]}")
            (wheel,) = folder.glob("*.whl")
            zipfile.ZipFile(wheel).extractall(folder / "source")
            found[library] = folder / "source"
        return found[library]

    return of


@pytest.fixture(scope="module")
def hydra(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hydra")
    pip("install", "-q", "--target", str(folder), "hydra-core==1.3.2", "PyYAML")
    return folder


def python(program: str, *folders: Path, stdin: str = "") -> str:
    """What a program prints that can import from `folders`."""
    path = os.pathsep.join(map(str, folders))
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=stdin,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    if "ModuleNotFoundError" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


COMPOSE = """
import json, sys
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
with initialize_config_dir(sys.stdin.read().strip(), version_base=None):
    print(json.dumps(OmegaConf.to_container(compose("verl"), resolve=False)))
"""


@pytest.mark.parametrize("mode", ["gdpo", "grpo"])
def test_verl_composes_the_file_with_its_own(source, hydra, tmp_path, mode):
    recipe = make_recipe(
        f"space.normalization={mode}", "model.lora_rank=8", "space.loss_type=cispo"
    )
    result = export_to("verl", recipe)
    # Its folder in place of its package, which could not be imported without what it depends on.
    folder = source("verl") / "verl" / "trainer" / "config"
    text = result.text.replace("pkg://verl.trainer.config", f"file://{folder}")
    (tmp_path / result.file).write_text(text)
    composed = flatten(json.loads(python(COMPOSE, hydra, stdin=str(tmp_path))))
    written = parse_settings(result)
    for key in ("hydra", "defaults"):
        del written[key]
    assert flatten(written).items() <= composed.items()
    known = (folder / "algorithm.py").read_text()
    assert {key for key in read_known_keys("verl") if "gdpo" not in key} <= set(composed)
    assert all(key.partition(".")[2] in known for key in read_known_keys("verl") if "gdpo" in key)


VALIDATE = """
import json, sys
from axolotl.utils.schemas.config import AxolotlInputConfig
found = AxolotlInputConfig(**json.load(sys.stdin))
print(json.dumps(found.model_dump(mode="json", exclude_unset=True)))
"""


@pytest.mark.parametrize("mode", ["gdpo", "grpo_batch"])
def test_axolotl_accepts_the_file(source, mode):
    recipe = make_recipe(f"space.normalization={mode}", "model.lora_rank=8", "model.dtype=float32")
    written = parse_settings(export_to("axolotl", recipe))
    read = json.loads(python(VALIDATE, source("axolotl"), stdin=json.dumps(written)))
    assert written["trl"].items() <= read["trl"].items()
    assert (read["rl"], read["lora_r"]) == (written["rl"], 8)
    wrong = {**written, "trl": {**written["trl"], "scale_rewards": "gdpo"}}
    with pytest.raises(AssertionError, match="scale_rewards"):
        python(VALIDATE, source("axolotl"), stdin=json.dumps(wrong))


def fields(folder: Path) -> set[str]:
    """Names that classes below a folder annotate."""
    return {
        line.target.id
        for file in folder.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }


def test_ms_swift_has_every_argument(source):
    import transformers

    inherited = set(transformers.Seq2SeqTrainingArguments.__dataclass_fields__)
    known = fields(source("ms-swift") / "swift") | inherited
    recipe = make_recipe("model.lora_rank=8")
    assert set(parse_settings(export_to("ms-swift", recipe))) <= known
    assert read_known_keys("ms-swift") <= known


def draw() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randint(0, 2, (64, 3), generator=generator).double()
    rewards[:, 0] += torch.rand(64, generator=generator, dtype=torch.float64)
    return rewards


@pytest.mark.parametrize("mode", ["gdpo", "grpo", "grpo_no_std", "grpo_batch"])
@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
def test_ms_swift_computes_our_advantages(source, monkeypatch, mode, baseline):
    file = source("ms-swift") / "swift" / "rl_core" / "advantage.py"
    utils = types.ModuleType("swift.utils")
    utils.nanstd = lambda values, dim, keepdim: values.std(dim=dim, keepdim=keepdim)
    monkeypatch.setitem(sys.modules, "swift", types.ModuleType("swift"))
    monkeypatch.setitem(sys.modules, "swift.utils", utils)
    theirs = types.ModuleType("swift_advantage")
    monkeypatch.setitem(sys.modules, theirs.__name__, theirs)  # where dataclasses look for names
    exec(compile(file.read_text(), str(file), "exec"), vars(theirs))
    recipe = make_recipe(f"space.normalization={mode}", f"space.baseline={baseline}")
    written = parse_settings(export_to("ms-swift", recipe))
    found, _ = theirs.compute_advantages(
        draw(),
        torch.tensor(written["reward_weights"], dtype=torch.float64),
        written["num_generations"],
        written["advantage_estimator"],
        written["scale_rewards"],
        written["kl_in_reward"],
    )
    weights = torch.tensor(recipe.weights, dtype=torch.float64)
    eps = 1e-8 if mode == "gdpo" else 1e-4
    ours = compute_advantages(draw(), weights, 8, mode, eps, baseline=baseline)
    torch.testing.assert_close(ours, found, rtol=0, atol=1e-6)


def functions(file: Path, *names: str) -> str:
    """The source of some functions, without their decorators."""
    found = [
        node
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name in names
    ]
    for node in found:
        node.decorator_list = []
    return ast.unparse(ast.Module(found, []))


def verl_gdpo(folder: Path, written: dict, lengths: torch.Tensor) -> torch.Tensor:
    """Advantage of each completion, by verl's own function."""
    space: dict = {"torch": torch, "verl_F": types.SimpleNamespace()}
    file = folder / "verl" / "utils" / "torch_functional.py"
    numbers = functions(file, "masked_sum", "masked_mean", "masked_var", "masked_whiten")
    exec(f"from __future__ import annotations\nimport warnings\n{numbers}", space)
    space["verl_F"] = types.SimpleNamespace(**space)
    advantages = functions(
        folder / "verl" / "trainer" / "ppo" / "core_algos.py",
        "compute_grpo_outcome_advantage",
        "compute_gdpo_outcome_advantage",
    )
    head = "from __future__ import annotations\nimport numpy as np\n"
    exec(f"{head}from collections import defaultdict\n{advantages}", space)
    rewards, longest = draw().float(), int(lengths.max())
    mask = (torch.arange(longest) < lengths[:, None]).float()
    keys = written["gdpo_reward_keys"]
    found, _ = space["compute_gdpo_outcome_advantage"](
        torch.zeros_like(mask),
        mask,
        [number // 8 for number in range(64)],
        config=written,
        non_tensor_batch={key: rewards[:, k].numpy() for k, key in enumerate(keys)},
        batch={
            "prompts": torch.zeros(64, 1),
            "attention_mask": torch.cat([mask[:, :1], mask], 1).long(),
        },
    )
    return found[:, 0].double()


def test_verl_whitens_over_tokens(source):
    recipe = make_recipe()
    written = parse_settings(export_to("verl", recipe))["algorithm"]
    weights = torch.tensor(recipe.weights, dtype=torch.float64)
    ours = compute_advantages(draw(), weights, 8, "gdpo", 1e-6)
    equal = verl_gdpo(source("verl"), written, torch.full((64,), 5))
    # Its deviation is over 320 tokens: those of 64 completions, each 5 times.
    spread = ((320 - 1) / 320 * 64 / (64 - 1)) ** 0.5
    torch.testing.assert_close(equal, ours * spread, rtol=0, atol=1e-4)
    longer = verl_gdpo(source("verl"), written, 1 + (torch.arange(64) % 8) * 5)
    assert (longer - ours).abs().max() > 0.02
