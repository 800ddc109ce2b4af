"""`export --collect`: what a library saved becomes a policy, which is compared with its candidate.

Layouts are those of Trainer.save_model, verl 0.9.1 (utils/checkpoint/fsdp_checkpoint_manager.py and
model_merger/), and NeMo-RL at 7ea279a (models/automodel/checkpoint.py).
"""

from __future__ import annotations

import json
import re
import shutil

import peft
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from gdpo_tune import export
from gdpo_tune.core import registry
from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.trials import Estimate
from gdpo_tune.ledger import Ledger
from tests.support.tuning import build_outcome, load_code_spec

ADAPTER, MODEL = "adapter_model.safetensors", "model.safetensors"
NEMO = "results/x/step_60/policy/weights/model"
VERL = "checkpoints/x/global_step_60/actor"
SHARD = f"{VERL}/model_world_size_2_rank_0.pt"


def touch(directory, *names):
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).touch()


@pytest.mark.parametrize(
    ("files", "where"),
    [
        ([f"x/{MODEL}", f"x/checkpoint-60/{MODEL}", f"policy/{MODEL}"], "x"),
        ([f"x/v0/checkpoint-9/{ADAPTER}", f"x/v0/checkpoint-10/{ADAPTER}"], "x/v0/checkpoint-10"),
        ([f"{NEMO}/{ADAPTER}", "results/x/step_60/policy/optimizer/model.safetensors"], NEMO),
        ([f"converted/{MODEL}", f"converted/lora_adapter/{ADAPTER}"], "converted/lora_adapter"),
        ([f"converted/{MODEL}", SHARD], "converted"),
        ([SHARD, f"{VERL}/huggingface/{MODEL}"], f"{VERL}/huggingface"),
    ],
    ids=["trl", "ms-swift", "nemo-rl-adapter", "verl-adapter", "verl-converted", "verl-hf-model"],
)  # fmt: skip
def test_the_last_policy_of_a_library_is_found(tmp_path, files, where):
    touch(tmp_path, *files)
    assert export.find_saved_policy(tmp_path) == tmp_path / where


@pytest.mark.parametrize(
    ("shard", "tool"),
    [
        (SHARD, "python -m verl.model_merger merge --backend fsdp"),
        (f"{NEMO}/shard-00001-model-00001-of-00001.safetensors", "offline_hf_consolidation.py"),
    ],
    ids=["verl", "nemo-rl"],
)
def test_shards_whose_library_is_missing_are_refused_with_its_command(
    tmp_path, monkeypatch, shard, tool
):
    monkeypatch.delenv("NEMO_RL", raising=False)
    touch(tmp_path, shard)
    with pytest.raises(UsageError, match=re.escape(tool)) as error:
        export.find_saved_policy(tmp_path)
    assert f"then collect {tmp_path / 'converted'}" in str(error.value)
    assert "['" not in str(error.value)
    assert not (tmp_path / "converted").exists()


def test_shards_are_converted_by_their_library(tmp_path, monkeypatch):
    package = tmp_path / "packages" / "verl"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "model_merger.py").write_text(
        "import pathlib, sys\n"
        "out = pathlib.Path(sys.argv[sys.argv.index('--target_dir') + 1])\n"
        "out.mkdir()\n"
        f"(out / '{MODEL}').touch()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    touch(tmp_path / "a b", f"{VERL}/model_world_size_1_rank_0.pt")
    assert export.find_saved_policy(tmp_path / "a b") == tmp_path / "a b" / "converted"


def test_a_directory_without_weights_is_refused(tmp_path):
    touch(tmp_path, f"policy/{MODEL}", "grpo.yaml")
    with pytest.raises(UsageError, match="no weights of a policy are there"):
        export.find_saved_policy(tmp_path)


def test_a_policy_is_collected_and_compared_with_its_candidate(tmp_path, monkeypatch, capsys):
    """The error of a difference of independent means is the root of the sum of their squares."""
    spec = load_code_spec(tmp_path)
    with Ledger.open(spec) as ledger:
        ledger.start(spec.space.complete_baseline({}), "search", "model", seed=7)
        ledger.complete(0, build_outcome(0.9, 0.2, 0.5))
    trained = tmp_path / "exported" / "x"
    trained.mkdir(parents=True)
    shipped = registry.POLICIES["embedded"]
    for name in (MODEL, "config.json"):
        shutil.copy(shipped / name, trained)
    seen = []

    def evaluate(config, checkpoint, step):
        seen.append((config.seed, checkpoint))
        assert step == spec.training.steps
        return {"correctness": Estimate(0.8, 0.03), "format": Estimate(0.2, 0.0)}

    monkeypatch.setattr("gdpo_tune.training.trial.evaluate_policy", evaluate)
    words = [f"{spec.directory}:0", "--collect", str(trained.parent), "--out", str(tmp_path / "o")]
    assert export.main(words) == 0
    ((seed, policy),) = seen
    assert (seed, policy.parent) == (7, tmp_path / "o")
    written = {file.name for file in policy.iterdir()}
    assert {MODEL, "config.json", "tokenizer.json", "prompts.json", "complete.json"} <= written
    assert json.loads((policy / "generation_config.json").read_text())["do_sample"]
    printed = capsys.readouterr().out
    error = (build_outcome(0.9, 0.2, 0.5).test["correctness"].se ** 2 + 0.03**2) ** 0.5
    assert f"0.800 ± 0.030  -0.100 ± {error:.3f}" in printed
    with pytest.raises(UsageError, match="move it, or choose another --out"):
        export.main(words)


@pytest.mark.parametrize("kind", ["adapter", "model", "cut"])
def test_weights_of_another_model_or_cut_ones_are_refused_and_leave_nothing(tmp_path, kind):
    spec = load_code_spec(tmp_path)
    with Ledger.open(spec) as ledger:
        ledger.start(spec.space.complete_baseline({}), "search", "model", seed=7)
        ledger.complete(0, build_outcome(0.9, 0.2, 0.5))
    config = LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
    other = LlamaForCausalLM(config)
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    saved = peft.get_peft_model(other, settings) if kind == "adapter" else other
    saved.save_pretrained(tmp_path / "other")
    if kind == "cut":
        weights = (registry.POLICIES["embedded"] / MODEL).read_bytes()
        (tmp_path / "other" / MODEL).write_bytes(weights[: len(weights) // 2])
    out = tmp_path / "out"
    words = [f"{spec.directory}:0", "--collect", str(tmp_path / "other"), "--out", str(out)]
    with pytest.raises(UsageError, match="other: its weights are not those of embedded"):
        export.main(words)
    assert not out.exists()
