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
from tests.support.killed_sweeps import SPACE, WAIT, read_steps_written, wait_until
from tests.support.paths import ROOT
from tests.support.sweep_properties import find_mlflow_trials

pytestmark = pytest.mark.fault

SHORT = (
    "search.trials=4",
    "search.scheduler={type: fifo}",
    "search.replicates={per_point: 1, max_runs: 1}",
    "training.steps=20",
    "training.checkpoint_every=5",
    "training.validation_prompts=16",
    "training.test_prompts=16",
)


def arguments() -> list[str]:
    return [str(SPACE), *(word for override in SHORT for word in ("--set", override))]


def spec_in(folder: Path) -> SweepSpec:
    return load_spec(SPACE, [f"storage={folder / 'runs'}", *SHORT])


@contextmanager
def sweep_in(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """The command, as a person runs it in `folder`, in a process group of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with subprocess.Popen(
        [sys.executable, "-m", "gdpo_tune.sweep", *arguments()],
        cwd=folder,
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
    sweep = spec_in(tmp_path).directory
    moments: list[Callable[[], bool]] = [
        lambda: (sweep / "ledger.journal").exists(),
        lambda: len(read_steps_written(sweep / "trials" / "1")) >= 3,
        lambda: find_newest_checkpoint(sweep / "trials" / "2") is not None,
        lambda: (sweep / "trials" / "4").exists(),
    ]
    for moment in moments:
        with sweep_in(tmp_path) as process:
            wait_until(process, moment)
            process.send_signal(signal.SIGKILL)
            process.wait()
    with sweep_in(tmp_path) as process:
        _, told = process.communicate()
        assert process.returncode == 0, told

    with Ledger.open(spec_in(tmp_path), read_only=True) as ledger:
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


def test_ctrl_c_says_how_to_go_on_and_the_trial_does_at_the_step_it_stopped_at(tmp_path: Path):
    trial = spec_in(tmp_path).directory / "trials" / "1"
    with sweep_in(tmp_path) as process:
        wait_until(process, lambda: len(read_steps_written(trial)) >= 3)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process of the group
        _, told = process.communicate()
        assert process.returncode == 130, told
    assert f"Resume with:\n  python -m gdpo_tune.sweep {SPACE} --set search.trials=4" in told
    checkpoint = find_newest_checkpoint(trial)
    assert checkpoint is not None
    stopped = read_checkpoint(checkpoint).step
    assert read_steps_written(trial) == list(
        range(1, stopped + 1)
    )  # nothing after the checkpoint is lost

    with sweep_in(tmp_path) as process:
        wait_until(process, lambda: len(read_steps_written(trial)) > stopped)
        os.killpg(process.pid, signal.SIGINT)
        process.communicate()
    assert read_steps_written(trial) == list(range(1, len(read_steps_written(trial)) + 1))


@pytest.mark.parametrize("server", ["raylet", "gcs_server"])
def test_a_killed_server_of_ray_ends_the_command_which_then_goes_on(tmp_path: Path, server: str):
    trial = spec_in(tmp_path).directory / "trials" / "1"
    with sweep_in(tmp_path) as process:
        wait_until(process, lambda: find_newest_checkpoint(trial) is not None)
        below = psutil.Process(process.pid).children(recursive=True)
        (victim,) = [child for child in below if child.name() == server]
        victim.kill()
        _, told = process.communicate(timeout=WAIT)
        assert process.returncode == 1, told
    assert "error: a server of Ray is gone" in told
    assert f"Resume with:\n  python -m gdpo_tune.sweep {SPACE} --set search.trials=4" in told
    _, alive = psutil.wait_procs(below, timeout=WAIT)  # no trial goes on writing
    assert alive == []
    written, checkpoint = read_steps_written(trial), find_newest_checkpoint(trial)
    assert checkpoint is not None

    with sweep_in(tmp_path) as process:
        wait_until(process, lambda: len(read_steps_written(trial)) > len(written))
        os.killpg(process.pid, signal.SIGINT)
        process.communicate()
    assert read_steps_written(trial)[: len(written)] == written
    assert read_steps_written(trial)[len(written)] == read_checkpoint(checkpoint).step + 1
