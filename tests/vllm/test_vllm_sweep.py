"""A whole sweep through Ray whose trials sample with vLLM, two at once; one engine dies."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gdpo_tune.ledger import Ledger
from gdpo_tune.spec import load_spec
from gdpo_tune.tuning.runner import run_sweep

pytestmark = pytest.mark.vllm

TRIALS = 2
SWEEP = """
name: sweep
task: {task}:Shape
policy: embedded
objectives:
  digits: {{direction: maximize, reference: 0}}
  short: {{direction: maximize, reference: 0}}
space:
  reward_weights.digits: 1.0
  reward_weights.short: {{log: [0.1, 1.0]}}
  learning_rate: 3.0e-4
  group_size: 4
training:
  {{steps: 3, completions_per_step: 16, max_completion_length: 24, length_limit: 12,
   train_prompts: 16, validation_prompts: 8, test_prompts: 8, evaluate_every: 2,
   checkpoint_every: 1}}
data: {{max_prompt_length: 64}}
model: {{lora_rank: 4}}
rollout: {{engine: vllm}}
search:
  {{trials: {trials}, scheduler: {{type: fifo}}, replicates: {{max_runs: 0}}, merges: {{budget: 0}},
   checkpoints: {{budget: 0}}}}
resources: {{cpus: 1}}
storage: {storage}
"""


def test_two_trials_at_once_end_although_an_engine_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    task = tmp_path / "shape_file.py"
    shutil.copy(Path(__file__).with_name("shape_file.py"), task)
    file = tmp_path / "sweep.yaml"
    storage = tmp_path / "runs"
    file.write_text(SWEEP.format(task=task, trials=TRIALS, storage=storage))
    spec = load_spec(file, [])
    assert not run_sweep(spec, train="tests.vllm.shape_file:train").exit_status
    with Ledger.open(spec) as ledger:
        records = [ledger.get_record(number) for number in range(TRIALS)]
        (session,) = ledger.get_sessions()
    incidents = [str(incident) for incident in session["incidents"]]
    print("  incidents:", *incidents, sep="\n    ")
    assert [record.state for record in records] == ["complete"] * TRIALS
    (incident,) = incidents
    assert "EngineDiedError: vLLM died after" in incident
    assert "CUDA error: an illegal memory access was encountered" in incident
