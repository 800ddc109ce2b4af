"""Sweeps on a real Ray, with the fake or the real training, here or in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import pytest

from gdpo_tune.spec import SweepSpec
from tests.support.paths import ROOT

SPACE = ROOT / "search_spaces" / "code.yaml"
MARKS = [
    pytest.mark.system,
    pytest.mark.integration,
    pytest.mark.usefixtures("importable"),
    # Ray leaves sockets and subprocess handles to the garbage collector
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
PROGRAM = """
import sys
from gdpo_tune.spec import load_spec
from gdpo_tune.tuning.runner import run_sweep
train, space, *overrides = sys.argv[1:]
sys.exit(run_sweep(load_spec(space, overrides, "sweep"), train=train).exit_status)
"""


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the package and the fake training on the PYTHONPATH of the trials."""
    directories = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, directories)))


def write_faults(spec: SweepSpec, **by_trial: str) -> None:
    """Set the faults of the fake training, for `all` or for trials, as `t3`."""
    spec.directory.mkdir(parents=True, exist_ok=True)
    plan = {name.removeprefix("t"): fault for name, fault in by_trial.items()}
    (spec.directory / "faults.json").write_text(json.dumps(plan))


@contextmanager
def start_sweep(train: str, *overrides: str) -> Generator[subprocess.Popen[bytes]]:
    """Start a sweep in a process group of its own; kill it at the end if it still runs."""
    command = [sys.executable, "-c", PROGRAM, train, str(SPACE), *overrides]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def wait_until(condition: Callable[[], object], seconds: float = 240.0) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.05)
