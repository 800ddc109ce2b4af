"""A training without a search in several processes: reports, stops, faults, orphans."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from gdpo_tune.core.errors import NonFiniteError, TrialFailure
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.core.trials import Measurement
from gdpo_tune.training.processes import train_in_processes
from tests.support.group_training import BREAK, DIE, RAISE, WAIT
from tests.support.paths import ROOT
from tests.support.ray_nodes import has_ended
from tests.support.tuning import build_trial_config

TRAIN = "tests.support.group_training:train"
ORPHANED = """
import sys
from dataclasses import replace
from pathlib import Path
from gdpo_tune.training.processes import train_in_processes
from tests.support.tuning import build_trial_config

if __name__ == "__main__":
    config = build_trial_config(Path())
    config = replace(config, training=config.training.replace(length_limit=int(sys.argv[1])))
    def report(measurement, checkpoint):
        print(*(int(pid) for pid in measurement.metrics.values()), flush=True)
    train_in_processes(config, 2, resume=None, report=report, train=sys.argv[2])
"""


class Reports:
    """A `report` that remembers its calls, and asks to stop at a step."""

    def __init__(self, stop_at: int = 0) -> None:
        self.steps: list[int] = []
        self.pids: set[int] = set()
        self._stop_at = stop_at

    def __call__(self, measurement: Measurement, checkpoint: Path | None) -> None:
        self.steps.append(measurement.step)
        self.pids |= {int(pid) for pid in measurement.metrics.values()}
        if measurement.step == self._stop_at:
            raise SystemExit


def build_config(directory: Path, fault: int = 100) -> TrialConfig:
    config = build_trial_config(directory)
    return replace(config, training=config.training.replace(length_limit=fault))


def test_the_first_process_reports_to_the_parent_and_has_the_outcome(tmp_path: Path):
    reports, resume = Reports(), tmp_path / "checkpoint-1"
    outcome = train_in_processes(
        build_config(tmp_path), 2, resume=resume, report=reports, train=TRAIN
    )
    assert (outcome.environment, outcome.checkpoint) == ({"rank": "0"}, resume)
    assert reports.steps == [1, 2, 3]
    assert len(reports.pids - {os.getpid()}) == 2
    assert not any(map(psutil.pid_exists, reports.pids))


def test_a_stop_ends_all_of_them(tmp_path: Path):
    reports = Reports(stop_at=2)
    with pytest.raises(SystemExit):
        train_in_processes(build_config(tmp_path), 2, resume=None, report=reports, train=TRAIN)
    assert reports.steps == [1, 2]
    assert not any(map(psutil.pid_exists, reports.pids))


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (RAISE, NonFiniteError, "^loss is nan at step 2$"),
        pytest.param(BREAK, RuntimeError, "^broken at step 2$", marks=pytest.mark.slow),
        (DIE, TrialFailure, r"^one of its processes died \(killed, out of memory, or crashed\)$"),
    ],
)
def test_a_fault_of_one_ends_the_others(
    tmp_path: Path, fault: int, error: type[Exception], message: str
):
    reports = Reports()
    with pytest.raises(error, match=message):
        train_in_processes(
            build_config(tmp_path, fault), 2, resume=None, report=reports, train=TRAIN
        )
    assert reports.steps == [1]
    assert not any(map(psutil.pid_exists, reports.pids))


def test_no_process_outlives_a_parent_that_is_killed(tmp_path: Path):
    script = tmp_path / "orphaned.py"
    script.write_text(ORPHANED)
    command = [sys.executable, str(script), str(WAIT), TRAIN]
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
