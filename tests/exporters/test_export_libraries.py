"""Exported files against the libraries' own packages, in a temporary directory."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import types
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gdpo_tune.results.parents import Parent
from gdpo_tune.training.normalization import compute_advantages
from tests.support.export import (
    export_to,
    flatten,
    make_recipe,
    parse_settings,
    read_known_keys,
)

pytestmark = pytest.mark.slow

VERSIONS = {"verl": "0.9.1", "ms-swift": "4.6.0", "axolotl": "0.19.0", "mergekit": "0.1.5"}


def run_pip(*words: str) -> None:
    """Run pip; if it fails, skip the test with its message."""
    command = [sys.executable, "-m", "pip", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"pip {' '.join(words)}: {done.stderr.strip().splitlines()[-1:]}")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A function that downloads the package of a library, without its dependencies."""
    sources: dict[str, Path] = {}

    def download(library: str) -> Path:
        if library not in sources:
            directory = tmp_path_factory.mktemp(library)
            requirement = f"{library}=={VERSIONS[library]}"
            run_pip("download", "-q", "--no-deps", "-d", str(directory), requirement)
            (wheel,) = directory.glob("*.whl")
            zipfile.ZipFile(wheel).extractall(directory / "source")
            sources[library] = directory / "source"
        return sources[library]

    return download


@pytest.fixture(scope="module")
def hydra(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("hydra")
    run_pip("install", "-q", "--target", str(directory), "hydra-core==1.3.2", "PyYAML")
    return directory


def run_python(program: str, *directories: Path, stdin: str = "") -> str:
    """Return the output of a program that can import from `directories`."""
    path = os.pathsep.join(map(str, directories))
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
    # The package cannot be imported without its dependencies, so Hydra gets its directory.
    directory = source("verl") / "verl" / "trainer" / "config"
    text = result.text.replace("pkg://verl.trainer.config", f"file://{directory}")
    (tmp_path / result.file).write_text(text)
    composed = flatten(json.loads(run_python(COMPOSE, hydra, stdin=str(tmp_path))))
    written = parse_settings(result)
    for key in ("hydra", "defaults"):
        del written[key]
    assert flatten(written).items() <= composed.items()
    known = (directory / "algorithm.py").read_text()
    assert {key for key in read_known_keys("verl") if "gdpo" not in key} <= set(composed)
    assert all(key.partition(".")[2] in known for key in read_known_keys("verl") if "gdpo" in key)


VALIDATE = """
import json, sys
from axolotl.utils.schemas.config import AxolotlInputConfig
config = AxolotlInputConfig(**json.load(sys.stdin))
print(json.dumps(config.model_dump(mode="json", exclude_unset=True)))
"""


@pytest.mark.parametrize("mode", ["gdpo", "grpo_batch"])
def test_axolotl_accepts_the_file(source, mode):
    recipe = make_recipe(f"space.normalization={mode}", "model.lora_rank=8", "model.dtype=float32")
    written = parse_settings(export_to("axolotl", recipe))
    read = json.loads(run_python(VALIDATE, source("axolotl"), stdin=json.dumps(written)))
    assert written["trl"].items() <= read["trl"].items()
    assert (read["rl"], read["lora_r"]) == (written["rl"], 8)
    wrong = {**written, "trl": {**written["trl"], "scale_rewards": "gdpo"}}
    with pytest.raises(AssertionError, match="scale_rewards"):
        run_python(VALIDATE, source("axolotl"), stdin=json.dumps(wrong))


def find_fields(directory: Path) -> set[str]:
    """Return the names that classes below a directory annotate."""
    return {
        line.target.id
        for file in directory.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }


def test_ms_swift_has_every_argument(source):
    import transformers

    inherited = set(transformers.Seq2SeqTrainingArguments.__dataclass_fields__)
    known = find_fields(source("ms-swift") / "swift") | inherited
    recipe = make_recipe("model.lora_rank=8")
    assert set(parse_settings(export_to("ms-swift", recipe))) <= known
    assert read_known_keys("ms-swift") <= known


def draw_rewards() -> torch.Tensor:
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
    advantages, _ = theirs.compute_advantages(
        draw_rewards(),
        torch.tensor(written["reward_weights"], dtype=torch.float64),
        written["num_generations"],
        written["advantage_estimator"],
        written["scale_rewards"],
        written["kl_in_reward"],
    )
    weights = torch.tensor(recipe.weights, dtype=torch.float64)
    eps = 1e-8 if mode == "gdpo" else 1e-4
    ours = compute_advantages(draw_rewards(), weights, 8, mode, eps, baseline=baseline)
    torch.testing.assert_close(ours, advantages, rtol=0, atol=1e-6)


def extract_functions(file: Path, *names: str) -> str:
    """Return the source of some functions, without their decorators."""
    functions = [
        node
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name in names
    ]
    for node in functions:
        node.decorator_list = []
    return ast.unparse(ast.Module(functions, []))


def compute_verl_advantages(directory: Path, written: dict, lengths: torch.Tensor) -> torch.Tensor:
    """Return the advantage of each completion, by verl's own function."""
    space: dict = {"torch": torch, "verl_F": types.SimpleNamespace()}
    file = directory / "verl" / "utils" / "torch_functional.py"
    numbers = extract_functions(file, "masked_sum", "masked_mean", "masked_var", "masked_whiten")
    exec(f"from __future__ import annotations\nimport warnings\n{numbers}", space)
    space["verl_F"] = types.SimpleNamespace(**space)
    advantages = extract_functions(
        directory / "verl" / "trainer" / "ppo" / "core_algos.py",
        "compute_grpo_outcome_advantage",
        "compute_gdpo_outcome_advantage",
    )
    head = "from __future__ import annotations\nimport numpy as np\n"
    exec(f"{head}from collections import defaultdict\n{advantages}", space)
    rewards, longest = draw_rewards().float(), int(lengths.max())
    mask = (torch.arange(longest) < lengths[:, None]).float()
    keys = written["gdpo_reward_keys"]
    result, _ = space["compute_gdpo_outcome_advantage"](
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
    return result[:, 0].double()


def test_the_kl_of_verl_has_the_gradient_of_the_corrected_one(source):
    file = source("verl") / "verl" / "trainer" / "ppo" / "core_algos.py"
    space: dict = {"torch": torch}
    exec(extract_functions(file, "kl_penalty", "kl_penalty_forward"), space)
    actor = parse_settings(export_to("verl", make_recipe("space.beta=0.01")))["actor_rollout_ref"]
    generator = torch.Generator().manual_seed(0)
    present, reference = torch.randn(2, 100, generator=generator).double()
    present.requires_grad_()
    # TRL's: k3 times the ratio, here in the first optimizer step of a batch.
    distance, ratio = reference - present, torch.exp(present - present.detach())
    ((torch.exp(distance) - distance - 1) * ratio).sum().backward()
    corrected, present.grad = present.grad, None
    space["kl_penalty"](present, reference, actor["actor"]["kl_loss_type"]).sum().backward()
    torch.testing.assert_close(present.grad, corrected)
    present.grad = None
    space["kl_penalty"](present, reference, "low_var_kl").sum().backward()
    assert (present.grad - corrected).abs().max() > 0.1


MERGE = """
import json, sys
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
given = json.load(sys.stdin)
options = MergeOptions(lora_merge_dtype="float32", lora_merge_cache=given["cache"], quiet=True)
run_merge(MergeConfiguration.model_validate(given["settings"]), given["out"], options)
"""


def test_mergekit_repeats_a_merge_of_policies_and_an_adapter(source, tmp_path):
    import peft
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from gdpo_tune.policies.load_policy import resolve_policy

    immutables = tmp_path / "immutables"
    run_pip("install", "-q", "--no-deps", "--target", str(immutables), "immutables==0.21")
    tokenizer = AutoTokenizer.from_pretrained(resolve_policy("embedded"))
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, vocab_size=len(tokenizer), num_attention_heads=2)
    parents, states = [], []
    for seed, weight in ((0, 0.25), (1, 0.125), (2, 0.625)):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        directory = tmp_path / f"a@b+{seed}"  # letters that mergekit takes for marks of its own
        if seed == 2:  # an adapter on the first policy, as a checkpoint before the end has it
            model = LlamaForCausalLM.from_pretrained(tmp_path / "a@b+0")
            adapter = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
            model = peft.get_peft_model(model, adapter)
            model.save_pretrained(directory)
            model = model.merge_and_unload()
        else:
            model.save_pretrained(directory)
            tokenizer.save_pretrained(directory)
        parents.append(Parent(f"runs/code:{seed}", weight, str(directory)))
        states.append((weight, model.state_dict()))
    recipe = make_recipe(parents=tuple(parents))
    recipe = replace(recipe, policy=str(tmp_path / "a@b+0"))
    given = {
        "settings": parse_settings(export_to("mergekit", recipe)),
        "cache": str(tmp_path / "cache"),
        "out": str(tmp_path / "merged"),
    }
    run_python(MERGE, source("mergekit"), immutables, stdin=json.dumps(given))
    merged = LlamaForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    for name, value in merged.items():
        expected = sum(weight * state[name] for weight, state in states)
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-6)


def test_verl_whitens_over_tokens(source):
    recipe = make_recipe()
    written = parse_settings(export_to("verl", recipe))["algorithm"]
    weights = torch.tensor(recipe.weights, dtype=torch.float64)
    ours = compute_advantages(draw_rewards(), weights, 8, "gdpo", 1e-6)
    equal = compute_verl_advantages(source("verl"), written, torch.full((64,), 5))
    # Its deviation is over 320 tokens: those of 64 completions, each 5 times.
    spread = ((320 - 1) / 320 * 64 / (64 - 1)) ** 0.5
    torch.testing.assert_close(equal, ours * spread, rtol=0, atol=1e-4)
    longer = compute_verl_advantages(source("verl"), written, 1 + (torch.arange(64) % 8) * 5)
    assert (longer - ours).abs().max() > 0.02
