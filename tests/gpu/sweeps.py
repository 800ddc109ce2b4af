"""Sweeps of the check by the ordinary command, and readings of a machine meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil
import pytest

from gdpo_tune import cli
from gdpo_tune.core.errors import GdpoTuneError, ResourcesError
from gdpo_tune.core.events import IS_TRIED_AGAIN
from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.spec import load_spec
from gdpo_tune.spec.machine import check_resources
from tests.gpu.processes import OVER, Processes, StepError
from tests.support.paths import ROOT

TRIAL = "ray::ImplicitFunc.train"
"""Start of the command line of a process in which a trial runs."""
KILL_AFTER = 2
"""Steps of a trial after which a process is killed: it then has a checkpoint."""
SECONDS = 300
"""Most seconds of a sweep."""
POLL = 0.1
EVERY = 0.5
"""Seconds between two readings."""
RESOLUTION = 1 / 512
"""Of a share of a GPU."""


class Peak:
    """Highest of the readings that a thread takes while the `with` block runs."""

    def __init__(self, read: Callable[[], float]) -> None:
        self.highest = 0.0
        """Highest reading, in the unit of `read`."""
        self._read = read
        self._over = threading.Event()
        self._threads = ThreadPoolExecutor(1)

    def __enter__(self) -> Self:
        """Start the thread after a first reading, so that a reading that fails does so at once."""
        self.highest = self._read()
        self._watching = self._threads.submit(self._watch)
        return self

    def __exit__(self, *_) -> None:
        """Stop the thread; raise the error of a reading, if there was one."""
        self._over.set()
        self._threads.shutdown()
        self._watching.result()

    def _watch(self) -> None:
        while not self._over.wait(EVERY):
            self.highest = max(self.highest, self._read())


def query_gpu(field: str) -> str:
    """Return a field that `nvidia-smi` reports of the one visible GPU."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    # `nvidia-smi` itself ignores this variable.
    if device := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command.append(f"--id={device}")
    answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    return answer.stdout.strip()


def measure_gpu_memory() -> float:
    """Return the MiB that all processes together use of the one visible GPU."""
    return float(query_gpu("memory.used"))


@dataclass(frozen=True)
class SweepFigures:
    """What a sweep of the check did."""

    records: Sequence[TrialRecord]
    retries: Sequence[str] = ()
    """Incidents in which a trial was tried again."""
    slots: int = 1
    """Trials that may run side by side."""
    killed: int = 0
    """Processes of trials that were killed on purpose."""

    @property
    def failures(self) -> list[str]:
        """What became of each trial that is not complete."""
        return [
            f"trial {record.number} {record.state}: {record.reason}".strip()
            for record in self.records
            if record.state != "complete"
        ]

    @property
    def trained(self) -> int:
        """Number of trials that trained."""
        return sum(r.state == "complete" and r.role != "untrained" for r in self.records)

    @property
    def side_by_side(self) -> int:
        """Number of trials that ran at once, at the moment when they were most."""
        starts = [start for start, _ in self._spans]
        at_once = [sum(start <= at < end for start, end in self._spans) for at in starts]
        return max(at_once, default=0)

    @property
    def trials_per_hour(self) -> float:
        """Trials that trained by the hours from the first start to the last end.

        The hours include those of the untrained trial, starts of processes and engines, and the end
        of the sweep, when fewer trials are left than fit; not the start of Ray.
        """
        seconds = max(end for _, end in self._spans) - min(start for start, _ in self._spans)
        return self.trained / seconds * 3600

    @property
    def _spans(self) -> list[tuple[float, float]]:
        records = self.records
        return [(r.started, r.finished) for r in records if r.started is not None and r.finished]


def find_refusal(file: Path, devices: Sequence[str] = ()) -> str:
    """Return why a sweep's trials do not fit on this machine; empty if they do.

    `devices` are the GPUs that it may use, if not those of this process.
    """
    try:
        spec = load_spec(file)
        check_resources(spec, build_environment(devices))
        cli.check_trainable(spec)
    except GdpoTuneError as error:
        return str(error)
    return ""


def find_refused_share(file: Path) -> float:
    """Find the share of a GPU below which the trials of a sweep are refused, to `RESOLUTION`.

    Raises:
        ResourcesError: they do not fit on a whole GPU.
    """
    cli.check_trainable(load_spec(file, ["resources.gpus=1"]))
    low, high = 0.0, 1.0
    while high - low > RESOLUTION:
        middle = (low + high) / 2
        try:
            cli.check_trainable(load_spec(file, [f"resources.gpus={middle}"]))
        except ResourcesError:
            low = middle
        else:
            high = middle
    return low


def run_sweep_command(
    file: Path,
    step: str,
    processes: Processes,
    *,
    kill: bool = False,
    devices: Sequence[str] = (),
) -> SweepFigures:
    """Run a sweep by its command and read its ledger; skip the test where no time is left.

    Args:
        file: of the sweep.
        step: whose log gets the output.
        processes: deadline and logs of the check.
        kill: kill the process of one trial once a trial has a checkpoint.
        devices: GPUs that it may use, if not those of this process.

    Raises:
        StepError: the command failed, or did not end in time.
    """
    spec, log = load_spec(file), processes.find_log(step)
    killed = 0
    end = time.monotonic() + min(SECONDS, processes.read_remaining())
    with (
        log.open("ab") as output,
        subprocess.Popen(
            [sys.executable, "-m", "gdpo_tune.sweep", str(file)],
            env=build_environment(devices),
            cwd=file.parent,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        ) as sweep,
    ):
        try:
            while sweep.poll() is None and time.monotonic() < end:
                if kill and not killed:
                    killed = kill_one_trial(sweep.pid, spec.directory)
                time.sleep(POLL)
            if sweep.poll() is None:
                if processes.read_remaining() <= 0:
                    pytest.skip(OVER)
                raise StepError(f"no end after {SECONDS} s: see {log}")
        finally:
            for process in list_processes(sweep.pid):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
    if error := find_error(log, sweep.returncode):
        raise StepError(error)
    with Ledger.open(spec, read_only=True) as ledger:
        records, sessions = ledger.get_records(), ledger.get_sessions()
    incidents = [incident for session in sessions for incident in session["incidents"]]
    retries = [str(one) for one in incidents if one.description.startswith(IS_TRIED_AGAIN)]
    return SweepFigures(records, retries, sessions[0]["slots"], killed)


def find_error(log: Path, status: int) -> str:
    """Return why a sweep did not end by itself; empty if it did, even if trials failed."""
    lines = log.read_text(errors="replace").splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    if status and errors:
        return errors[-1]
    return "" if status in (0, 1) else f"the sweep ended with status {status}: see {log}"


def build_environment(devices: Sequence[str] = ()) -> dict[str, str]:
    """Build the environment of a sweep, which starts its own Ray and reads the same package."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    paths = (str(ROOT), os.environ.get("PYTHONPATH", ""))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment | ({"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {})


def kill_one_trial(sweep: int, directory: Path) -> int:
    """Kill one process in which a trial runs, once a trial has done steps; return how many."""
    steps = [file.read_bytes().count(b"\n") for file in directory.glob("trials/*/steps.jsonl")]
    if max(steps, default=0) < KILL_AFTER:
        return 0
    for process in list_processes(sweep)[:-1]:
        with suppress(psutil.Error):
            if " ".join(process.cmdline()).startswith(TRIAL):
                process.kill()
                return 1
    return 0


def list_processes(root: int) -> list[psutil.Process]:
    """Return a process and those below it, the newest first; none if it has ended."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(root)
        return [*process.children(recursive=True)[::-1], process]
    return []
