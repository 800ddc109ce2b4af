"""A training without a search in several processes: reports, stops, faults, orphans."""

import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from gdpo_tune.core.errors import NonFiniteError, TrialFailure
from gdpo_tune.training.processes import train_in_processes
from tests.support.group_training import BREAK, DIE, RAISE, WAIT
from tests.support.paths import ROOT
from tests.support.ray_nodes import has_ended
from tests.support.tuning import build_trial_config

pytestmark = pytest.mark.system

TRAIN = "tests.support.group_training:train"
ORPHANED = """
import sys
from pathlib import Path
from tests.training.test_training_processes import train

if __name__ == "__main__":
    def report(measurement, checkpoint):
        print(*(int(pid) for pid in measurement.metrics.values()), flush=True)
    train(Path(), report, fault=int(sys.argv[1]))
"""


class Reports:
    """A `report` that remembers its calls, and asks to stop at a step."""

    def __init__(self, stop_at: int = 0) -> None:
        self.steps: list[int] = []
        self.pids: set[int] = set()
        self._stop_at = stop_at

    def __call__(self, measurement, checkpoint) -> None:
        self.steps.append(measurement.step)
        self.pids |= {int(pid) for pid in measurement.metrics.values()}
        if measurement.step == self._stop_at:
            raise SystemExit


def train(directory: Path, report, fault: int = 100, resume: Path | None = None):
    config = build_trial_config(directory)
    config = replace(config, training=config.training.replace(length_limit=fault))
    return train_in_processes(config, 2, resume=resume, report=report, train=TRAIN)


@pytest.fixture
def forked(monkeypatch):
    """Fork the processes from one that has imported torch, in place of starting each anew."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gdpo_tune.training.distributed"])
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)


def test_the_first_process_reports_to_the_parent_and_has_the_outcome(tmp_path):
    reports, resume = Reports(), tmp_path / "checkpoint-1"
    outcome = train(tmp_path, reports, resume=resume)
    assert (outcome.environment, outcome.checkpoint) == ({"rank": "0"}, resume)
    assert reports.steps == [1, 2, 3]
    assert len(reports.pids - {os.getpid()}) == 2
    assert not any(map(psutil.pid_exists, reports.pids))


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("stop_at", "fault", "error", "message"),
    [
        (2, 100, SystemExit, "^$"),
        (0, RAISE, NonFiniteError, "^loss is nan at step 2$"),
        (0, BREAK, RuntimeError, "^broken at step 2$"),
        (
            0,
            DIE,
            TrialFailure,
            r"^one of its processes died \(killed, out of memory, or crashed\)$",
        ),
    ],
)
def test_a_stop_or_a_fault_of_one_ends_all_of_them(tmp_path, stop_at, fault, error, message):
    reports = Reports(stop_at)
    with pytest.raises(error, match=message):
        train(tmp_path, reports, fault)
    assert reports.steps == list(range(1, max(stop_at, 1) + 1))
    assert not any(map(psutil.pid_exists, reports.pids))


def test_no_process_outlives_a_parent_that_is_killed(tmp_path):
    script = tmp_path / "orphaned.py"
    script.write_text(ORPHANED)
    command = [sys.executable, str(script), str(WAIT)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tmp_path, env=environment) as parent:
        assert parent.stdout is not None
        children = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(children) == 2
        parent.kill()
    deadline = time.monotonic() + 30
    while not all(map(has_ended, children)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
