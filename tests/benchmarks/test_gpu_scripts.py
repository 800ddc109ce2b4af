"""The commands that take the GPU figures, in their small form: on a CPU, and to their last line."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.integration

BENCHMARKS = ROOT / "benchmarks"


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # the same wherever this runs
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def figures(script: str) -> dict:
    done = run(script, "--small")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow  # `make bench-small` runs the same command
def test_a_step_of_both_trainers():
    result = figures("gpu_step.py")
    assert (result["device"], result["engine"]) == ("cpu", "transformers")
    assert result["blocks"] == result["steps_per_block"] == 2
    assert 0 < result["ratio_low"] <= result["ratio"] <= result["ratio_high"]
    # The same policy, prompts, seeds and engine: both sides sample the same.
    assert 1 < result["ours_mean_length"] == result["trl_mean_length"] <= 16
    assert result["ours_peak_mib"] is result["trl_peak_mib"] is None


@pytest.mark.slow  # half a minute; `make bench-small` runs the same command
def test_trials_on_shares_of_the_cores():
    result = figures("gpu_packing.py")
    assert (result["device"], result["engine"], result["trials"]) == ("cpu", "lean", 2)
    alone, half = result["shares"]["1"], result["shares"]["0.5"]
    assert (alone["side_by_side"], half["side_by_side"]) == (1, 2)
    assert alone["ratio"] == 1
    expected = half["trials_per_hour"] / alone["trials_per_hour"]
    assert half["ratio"] == pytest.approx(expected, abs=1e-3)
    # Two trials are two processes, and each of them holds a torch of its own.
    assert half["peak_mib"] > alone["peak_mib"] > 500


@pytest.mark.parametrize("script", ["gpu_step.py", "gpu_packing.py"])
def test_a_machine_without_a_gpu_is_refused(script: str):
    done = run(script)
    assert done.returncode == 2
    assert "0 GPUs" in done.stderr
    assert "--small" in done.stderr
