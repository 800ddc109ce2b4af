"""A killed training resumes by the same command and has the same result as without the kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gdpo_tune.policies.load_policy import load_policy
from tests.support.killed_sweeps import SPACE, wait_for_condition
from tests.support.paths import ROOT

ARGUMENTS = [
    str(SPACE),
    *("--set", "space={normalization: gdpo, group_size: 8, learning_rate: 1e-4}"),
    *("--set", "space.reward_weights.format=0.5", "--set", "space.reward_weights.length=0.5"),
    *("--set", "training.validation_prompts=8"),
    *("--set", "training.test_prompts=8"),
    *("--set", "training.checkpoint_every=2"),
    *("--steps", "8"),
]

pytestmark = pytest.mark.fault


def start_training(directory: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "gdpo_tune.train", *ARGUMENTS],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def read_result(directory: Path) -> dict[str, object]:
    result = json.loads((directory / "runs" / "code-train-8" / "result.json").read_text())
    return {split: result[split] for split in ("validation", "test", "checkpoint")}


def finish_training(directory: Path) -> str:
    process = start_training(directory)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    return printed


def test_a_training_that_is_killed_is_continued_bitwise(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    finish_training(whole)
    process = start_training(broken)
    checkpoint = broken / "runs" / "code-train-8" / "checkpoint-4"
    wait_for_condition(process, checkpoint.exists, lambda: process.communicate()[0])
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert "resumes from checkpoint-" in finish_training(broken)
    assert read_result(broken) == read_result(whole)
    load_policy(str(broken / "runs" / "code-train-8" / "checkpoint-8"))
