"""`export --collect`: what a library saved becomes a policy, which is compared with its candidate.

Layouts are those of Trainer.save_model, verl 0.9.1 (utils/checkpoint/fsdp_checkpoint_manager.py and
model_merger/), and NeMo-RL at 7ea279a (models/automodel/checkpoint.py).
"""

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
from tests.support.tables import cases
from tests.support.tuning import build_outcome, load_code_spec

MODEL = "model.safetensors"
VERL = "checkpoints/x/global_step_60/actor"
NEMO_RL = "results/x/step_60/policy/weights/model"


def touch(directory, *names):
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).touch()


@cases("exporters", "saved policies")
def test_the_last_policy_of_a_library_is_found(tmp_path, files, where):
    touch(tmp_path, *files)
    assert export.find_saved_policy(tmp_path) == tmp_path / where


@pytest.mark.parametrize(
    ("shard", "tool"),
    [
        (
            f"{VERL}/model_world_size_2_rank_0.pt",
            "python -m verl.model_merger merge --backend fsdp",
        ),
        (f"{NEMO_RL}/shard-00001-model-00001-of-00001.safetensors", "offline_hf_consolidation.py"),
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


MERGER = f"""
import pathlib, sys
out = pathlib.Path(sys.argv[sys.argv.index('--target_dir') + 1])
out.mkdir()
(out / '{MODEL}').touch()
"""


def test_shards_are_converted_by_their_library(tmp_path, monkeypatch):
    touch(tmp_path, "verl/__init__.py", f"a b/{VERL}/model_world_size_1_rank_0.pt")
    (tmp_path / "verl" / "model_merger.py").write_text(MERGER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert export.find_saved_policy(tmp_path / "a b") == tmp_path / "a b" / "converted"


def test_a_directory_without_weights_is_refused(tmp_path):
    touch(tmp_path, f"policy/{MODEL}", "grpo.yaml")
    with pytest.raises(UsageError, match="no weights of a policy are there"):
        export.find_saved_policy(tmp_path)


OUTCOME = build_outcome(0.9, 0.2, 0.5)


@pytest.fixture
def spec(tmp_path):
    """A sweep of one trial."""
    spec = load_code_spec(tmp_path)
    with Ledger.open(spec) as ledger:
        ledger.start(spec.space.complete_baseline({}), "search", "model", seed=7)
        ledger.complete(0, OUTCOME)
    return spec


def collect(spec, directory, out):
    words = [f"{spec.directory}:0", "--collect", str(directory), "--out", str(out)]
    return export.main(words)


def test_a_policy_is_collected_and_compared_with_its_candidate(spec, tmp_path, monkeypatch, capsys):
    """The error of a difference of independent means is the root of the sum of their squares."""
    trained, out = tmp_path / "exported" / "x", tmp_path / "o"
    trained.mkdir(parents=True)
    for name in (MODEL, "config.json"):
        shutil.copy(registry.POLICIES["embedded"] / name, trained)
    seen = []

    def evaluate(config, checkpoint, step):
        seen.append((config.seed, checkpoint))
        assert step == spec.training.steps
        return {"correctness": Estimate(0.8, 0.03), "format": Estimate(0.2, 0.0)}

    monkeypatch.setattr("gdpo_tune.training.trial.evaluate_policy", evaluate)
    assert collect(spec, trained.parent, out) == 0
    ((seed, policy),) = seen
    assert (seed, policy.parent) == (7, out)
    written = {file.name for file in policy.iterdir()}
    assert {MODEL, "config.json", "tokenizer.json", "prompts.json", "complete.json"} <= written
    assert json.loads((policy / "generation_config.json").read_text())["do_sample"]
    error = (OUTCOME.test["correctness"].se ** 2 + 0.03**2) ** 0.5
    assert f"0.800 ± 0.030  -0.100 ± {error:.3f}" in capsys.readouterr().out
    with pytest.raises(UsageError, match="move it, or choose another --out"):
        collect(spec, trained.parent, out)


@pytest.mark.parametrize("kind", ["adapter", "model", "cut"])
def test_weights_of_another_model_or_cut_ones_are_refused_and_leave_nothing(spec, tmp_path, kind):
    config = LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
    other = LlamaForCausalLM(config)
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    saved = peft.get_peft_model(other, settings) if kind == "adapter" else other
    saved.save_pretrained(tmp_path / "other")
    if kind == "cut":
        weights = (registry.POLICIES["embedded"] / MODEL).read_bytes()
        (tmp_path / "other" / MODEL).write_bytes(weights[: len(weights) // 2])
    with pytest.raises(UsageError, match="other: its weights are not those of embedded"):
        collect(spec, tmp_path / "other", tmp_path / "out")
    assert not (tmp_path / "out").exists()
