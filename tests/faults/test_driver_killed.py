"""The real command, stopped midway: by `kill -9`, by Ctrl-C, by the loss of Ray's servers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from gdpo_tune.ledger import Ledger
from gdpo_tune.spec import SweepSpec, load_spec
from gdpo_tune.training.checkpoints import find_newest_checkpoint, read_checkpoint
from tests.support.killed_sweeps import SPACE, WAIT, read_steps_written, wait_for_condition
from tests.support.paths import ROOT
from tests.support.sweep_properties import find_mlflow_trials

pytestmark = pytest.mark.fault

SHORT = (
    "search.trials=4",
    "search.scheduler={type: fifo}",
    "search.replicates={per_point: 1, max_runs: 1}",
    # the only trials that may be stopped early; test_random_kills has them
    "search.merges={budget: 0}",
    "search.checkpoints={budget: 0}",
    "training.steps=20",
    "training.checkpoint_every=5",
    "training.validation_prompts=16",
    "training.test_prompts=16",
)


def list_arguments() -> list[str]:
    return [str(SPACE), *(word for override in SHORT for word in ("--set", override))]


def load_short_spec(directory: Path) -> SweepSpec:
    return load_spec(SPACE, [f"storage={directory / 'runs'}", *SHORT])


@contextmanager
def start_sweep(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Start the command in `directory`, in its own process group."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with subprocess.Popen(
        [sys.executable, "-m", "gdpo_tune.sweep", *list_arguments()],
        cwd=directory,
        env={**environment, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def test_a_driver_killed_again_and_again_ends_every_trial_exactly_once(tmp_path: Path):
    sweep = load_short_spec(tmp_path).directory
    moments: list[Callable[[], bool]] = [
        lambda: (sweep / "ledger.journal").exists(),
        lambda: len(read_steps_written(sweep / "trials" / "1")) >= 3,
        lambda: find_newest_checkpoint(sweep / "trials" / "2") is not None,
        lambda: (sweep / "trials" / "4").exists(),
    ]
    for moment in moments:
        with start_sweep(tmp_path) as process:
            wait_for_condition(process, moment)
            process.send_signal(signal.SIGKILL)
            process.wait()
    with start_sweep(tmp_path) as process:
        _, errors = process.communicate()
        assert process.returncode == 0, errors

    with Ledger.open(load_short_spec(tmp_path), read_only=True) as ledger:
        records = ledger.get_records()
        sessions = ledger.get_sessions()
    assert {record.state for record in records} == {"complete"}
    assert Counter(record.role for record in records) == {
        "untrained": 1,
        "published": 1,
        "search": 4,
        "replicate": 1,
    }
    ends = [
        entry["trial_id"]
        for line in (sweep / "ledger.journal").read_text().splitlines()
        if "outcome" in (entry := json.loads(line)).get("user_attr", {})
    ]
    assert sorted(ends) == [record.number for record in records]
    assert 1 <= sum("finished" not in session for session in sessions) <= len(moments)

    runs = find_mlflow_trials(tmp_path, "code")
    assert sorted(int(run.data.tags["trial"]) for run in runs) == [r.number for r in records]
    assert {run.info.status for run in runs} == {"FINISHED"}


def test_ctrl_c_prints_how_to_resume_and_the_trial_resumes_at_its_step(tmp_path: Path):
    trial = load_short_spec(tmp_path).directory / "trials" / "1"
    with start_sweep(tmp_path) as process:
        wait_for_condition(process, lambda: len(read_steps_written(trial)) >= 3)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process of the group
        _, errors = process.communicate()
        assert process.returncode == 130, errors
    assert f"Resume with:\n  python -m gdpo_tune.sweep {SPACE} --set search.trials=4" in errors
    checkpoint = find_newest_checkpoint(trial)
    assert checkpoint is not None
    stopped = read_checkpoint(checkpoint).step
    assert read_steps_written(trial) == list(
        range(1, stopped + 1)
    )  # nothing after the checkpoint is lost

    with start_sweep(tmp_path) as process:
        wait_for_condition(process, lambda: len(read_steps_written(trial)) > stopped)
        os.killpg(process.pid, signal.SIGINT)
        process.communicate()
    assert read_steps_written(trial) == list(range(1, len(read_steps_written(trial)) + 1))


@pytest.mark.parametrize("server", ["raylet", "gcs_server"])
def test_a_killed_ray_server_ends_the_command_which_then_resumes(tmp_path: Path, server: str):
    trial = load_short_spec(tmp_path).directory / "trials" / "1"
    with start_sweep(tmp_path) as process:
        wait_for_condition(process, lambda: find_newest_checkpoint(trial) is not None)
        below = psutil.Process(process.pid).children(recursive=True)
        (victim,) = [child for child in below if child.name() == server]
        victim.kill()
        _, errors = process.communicate(timeout=WAIT)
        assert process.returncode == 1, errors
    assert "error: a server of Ray is gone" in errors
    assert f"Resume with:\n  python -m gdpo_tune.sweep {SPACE} --set search.trials=4" in errors
    _, alive = psutil.wait_procs(below, timeout=WAIT)  # no trial keeps writing
    assert alive == []
    written, checkpoint = read_steps_written(trial), find_newest_checkpoint(trial)
    assert checkpoint is not None

    with start_sweep(tmp_path) as process:
        wait_for_condition(process, lambda: len(read_steps_written(trial)) > len(written))
        os.killpg(process.pid, signal.SIGINT)
        process.communicate()
    assert read_steps_written(trial)[: len(written)] == written
    assert read_steps_written(trial)[len(written)] == read_checkpoint(checkpoint).step + 1
