"""The command that checks a GPU, in its small form: on a CPU, and to its last line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.integration


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py"), *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # the same wherever this runs
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.slow  # `make bench-small` runs it without sweeps
def test_a_cpu_does_what_a_cpu_can_do(tmp_path: Path):
    done = run("--small", "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert line == json.loads((tmp_path / "figures.json").read_text())
    assert (line["device"], line["did_not_hold"]) == ("cpu", 0)
    results = {(row["step"], row["check"]): row["result"] for row in line["rows"]}
    held = {
        ("device", "version of trl"),
        ("adapters", "base after 2 steps"),
        ("resume", "on a CPU"),
        ("evaluation", "untrained policy"),
        ("step", "completions of ours and TRL"),
        ("sweep", "one process killed"),
        ("packing", "1/2 of the cores"),
    }
    assert held <= {check for check, result in results.items() if result == "held"}
    not_run = [("memory", "bound against peak"), ("packing", "1/4 of the GPU")]
    not_run += [("shards", "two workers under FSDP2"), ("sleep", "engine asleep during a step")]
    for check in not_run:
        assert results[check] == "not run"
    assert (tmp_path / "table.txt").read_text() in done.stdout
    assert (tmp_path / "sweep.log").is_file()


@pytest.mark.slow  # as above
def test_single_steps_can_be_run(tmp_path: Path):
    done = run("--small", "--only", "memory", "packing", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert {row["step"] for row in line["rows"]} == {"memory", "packing"}
    assert line["not_run"] == len(line["rows"])


def test_a_machine_without_a_gpu_is_refused(tmp_path: Path):
    done = run("--output", str(tmp_path))
    assert done.returncode == 2
    assert "0 GPUs" in done.stderr
    assert "--small" in done.stderr
