"""Exported files against the libraries' own packages, in a temporary directory."""

import ast
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gdpo_tune.results.retrain import Parent
from gdpo_tune.training.normalization import compute_advantages
from tests.support.export import (
    export_folder,
    export_to,
    flatten,
    make_recipe,
    parse_settings,
    read_known_keys,
    read_prompts,
)
from tests.support.library_runs import build_first_batch, start_folder
from tests.support.packages import install_packages, run_pip

pytestmark = pytest.mark.slow


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
        parents.append(Parent(f"runs/code:{seed}", weight, str(directory), seed == 2))
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


# verl: its own code reads configuration, prompts and rewards up to a first batch

VERL_PACKAGES = (
    *("verl==0.9.1", "tensordict==0.10.0", "torchdata", "hydra-core==1.3.2", "omegaconf==2.3.0"),
    *("antlr4-python3-runtime==4.9.3", "codetiming", "pyvers", "orjson", "cloudpickle"),
)
"""verl, and what it imports that a development environment lacks."""
VERL_CASES = (
    ("code", ("space.length_shape=ramp", "space.conditioning.format=correctness")),
    ("code", ("space.normalization=grpo",)),
    ("math", ("space.normalization=grpo_no_std",)),
    ("tools", ()),
)


@pytest.fixture(scope="module")
def verl(tmp_path_factory):
    """Directory with verl and the packages that its parts before sampling need."""
    return install_packages(tmp_path_factory.mktemp("verl"), *VERL_PACKAGES)


@pytest.mark.parametrize(("space", "changes"), VERL_CASES, ids=str)
def test_verl_reads_prompts_and_rewards_as_a_trial(verl, tmp_path, space, changes):
    folder = tmp_path / "a folder's export"
    request = export_folder(folder, *changes, space=space, library="verl")
    rows = read_prompts(folder)
    problems = [row["reward_model"]["ground_truth"] for row in rows[:3]]
    batch = build_first_batch(request, folder, problems)
    stand_in, change = ("python", "verl_program.py"), "trainer.total_training_steps=4"
    result = start_folder(folder, stand_in, [verl], batch, change)
    assert result["order"] == [0, 1, 2]
    assert result["rows"] == len(rows)
    assert result["prompts"] == batch.prompts
    for name, values in batch.rewards.items():
        assert result["rewards"][name] == pytest.approx(values), name
    scores = (batch.values @ batch.weights).tolist()
    assert result["scores"] == pytest.approx(scores)
    config = result["config"]
    assert config["trainer"]["total_training_steps"] == 4
    assert config["data"]["train_files"] == str(folder / "prompts.parquet")
    assert config["actor_rollout_ref"]["model"]["path"] == str(folder / "policy")
    theirs = torch.tensor(result["advantages"], dtype=torch.float64)
    torch.testing.assert_close(theirs, compute_verl_advantages(request, batch), rtol=0, atol=1e-4)


def compute_verl_advantages(request, batch):
    """Return ours, but whitened over tokens under GDPO."""
    mode = str(request.params["normalization"])
    if mode != "gdpo":
        return compute_advantages(batch.values, batch.weights, 8, mode, 1e-6)
    groups = batch.values.reshape(-1, 8, len(batch.weights))
    centred = groups - groups.mean(1, keepdim=True)
    parts = centred / (groups.std(1, keepdim=True) + 1e-6)
    summed = (parts * batch.weights).sum(-1).flatten()
    tokens = summed.repeat_interleave(batch.lengths)
    return (summed - tokens.mean()) / tokens.std()
