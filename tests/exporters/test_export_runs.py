"""Exported folders are run on a CPU: they train, and to the metrics of our own trial."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace

import pytest

from gdpo_tune.exporters.write_export import export_training
from gdpo_tune.training import train
from tests.support.export import make_request

CHOSEN = (
    "space.normalization=gdpo",
    "space.group_size=8",
    "space.learning_rate=1.5e-4",
    "space.reward_weights.format=0.5",
    "space.reward_weights.length=0.3",
)
SEEDS = (0, 1, 2)


def run_folder(directory, *arguments):
    """Start a folder as a person does, and return what TRL logged last."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = ["bash", str(directory / "run.sh"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout + done.stderr


@pytest.mark.system
@pytest.mark.parametrize("space", ["code", "math", "tools"])
def test_a_folder_for_trl_trains_on_a_cpu(tmp_path, space):
    request = make_request(("training.train_prompts=64",), space)
    export_training(request, "trl", "", tmp_path / "out")
    steps = ("--max_steps", "4", "--logging_steps", "1")
    run_folder(tmp_path / "out", *steps)
    trained = tmp_path / "out" / f"{space}-train"
    assert (trained / "model.safetensors").is_file()
    state = json.loads((trained / "checkpoint-4" / "trainer_state.json").read_text())
    logged = state["log_history"][:4]
    assert [row["step"] for row in logged] == [1, 2, 3, 4]
    for reward in ("correctness", "format", "length"):
        assert all(f"rewards/{reward}/mean" in row for row in logged)
    assert any(row["grad_norm"] > 0 for row in logged)


@pytest.mark.slow
def test_a_folder_for_trl_reaches_the_metrics_of_our_trial(tmp_path):
    request = make_request((), "code", CHOSEN)
    ours = [evaluate_trial(request, seed, tmp_path / f"ours-{seed}") for seed in SEEDS]
    export_training(request, "trl", "", tmp_path / "out")
    run_folder(tmp_path / "out")
    exported = evaluate_policy(request, tmp_path / "out" / "code-train", tmp_path / "evaluation")
    print("\nmetric        ours, by seed                exported")
    for name, estimate in exported.items():
        values = [trial[name].mean for trial in ours]
        listed = "  ".join(f"{value:7.3f}" for value in values)
        print(f"{name:12}  {listed}  {estimate.mean:7.3f} +- {estimate.se:.3f}")
        noise = 3 * (estimate.se**2 + ours[0][name].se ** 2) ** 0.5
        assert min(values) - noise <= estimate.mean <= max(values) + noise, name


def evaluate_trial(request, seed, directory):
    config = request.spec.build_trial_config(request.params, seed, directory)
    return train(config, resume=None, report=lambda *_: None).test


def evaluate_policy(request, policy, directory):
    """Return the test metrics of a policy that TRL saved, prompted as the embedded one."""
    config = request.spec.build_trial_config(request.params, 0, directory)
    model = replace(config.model, instructions="off")
    config = replace(config, train=False, policy=str(policy), model=model)
    return train(config, resume=None, report=lambda *_: None).test
