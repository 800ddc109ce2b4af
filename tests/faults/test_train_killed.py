"""A training that is killed goes on by the same command and ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gdpo_tune.policies.load_policy import load_policy
from tests.support.killed_sweeps import SPACE, wait_until
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


def start(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "gdpo_tune.train", *ARGUMENTS],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def result(folder: Path) -> dict[str, object]:
    kept = json.loads((folder / "runs" / "code-train-8" / "result.json").read_text())
    return {split: kept[split] for split in ("validation", "test", "checkpoint")}


def finish(folder: Path) -> str:
    process = start(folder)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    return printed


def test_a_training_that_is_killed_is_continued_bitwise(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    finish(whole)
    process = start(broken)
    checkpoint = broken / "runs" / "code-train-8" / "checkpoint-4"
    wait_until(process, checkpoint.exists, lambda: process.communicate()[0])
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert "resumes from checkpoint-" in finish(broken)
    assert result(broken) == result(whole)
    load_policy(str(broken / "runs" / "code-train-8" / "checkpoint-8"))
