"""Sweeps in their own processes, which are killed at random moments.

The moments are seeded. A quarter lie in the start-up of the process, the others come up to `LATE`
seconds after a record of the ledger's file: so they spread over the life of a sweep on a machine of
any speed. Half of the kills end the driver alone, like `kill -9 PID`. The others also end every
process below it and leave half a record at the end of the ledger's file, like the loss of the
machine.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from gdpo_tune.spec import SweepSpec, load_spec
from tests.support.paths import ROOT

SPACE = ROOT / "search_spaces" / "code.yaml"
FAKE = """
import sys
from gdpo_tune.spec import load_spec
from gdpo_tune.tuning import runner
runner.find_mixture = lambda *_: ""  # of GPUs that nodes only say they have
space, *overrides = sys.argv[1:]
runner.run_sweep(load_spec(space, overrides), train="tests.support.fake_training:train")
"""
"""A program: a sweep that trains nothing, without tracking and display."""
WAIT = 600.0
"""Seconds after which a wait fails."""
LATE = 0.4
"""Maximum seconds from a record in the ledger to the kill after it."""
STARTING = 3.0
"""Seconds within which no sweep gets past the start of Ray."""
TORN = b'{"op_code":8,"worker_id":"'


@dataclass(frozen=True)
class KilledSweep:
    """A sweep of the embedded policy, in its own directory."""

    directory: Path
    overrides: tuple[str, ...]
    fake: bool
    """True if the training is the fake one; otherwise the real command runs."""
    address: str = ""
    """Address of the Ray cluster to join; empty: the sweep starts its own."""

    @property
    def spec(self) -> SweepSpec:
        return load_spec(SPACE, [f"storage={self.directory / 'runs'}", *self.overrides])

    @contextmanager
    def start(self) -> Iterator[subprocess.Popen[bytes]]:
        """Start the command in its own process group; kill it at the end if it still runs."""
        overrides = [f"storage={self.directory / 'runs'}", *self.overrides]
        command = ["-c", FAKE, str(SPACE), *overrides]
        if not self.fake:
            words = [word for override in overrides for word in ("--set", override)]
            command = ["-m", "gdpo_tune.sweep", str(SPACE), *words]
        self.directory.mkdir(parents=True, exist_ok=True)
        address = {"RAY_ADDRESS": self.address} if self.address else {}
        with start_program(command, self.directory, "errors.txt", **address) as process:
            yield process

    def finish(self) -> None:
        """Run the command to its end."""
        with self.start() as process:
            status = process.wait()
        assert status == 0, self.read_errors()

    def read_errors(self) -> str:
        return (self.directory / "errors.txt").read_text(errors="replace")

    def read_journal(self) -> list[str]:
        """Read the complete records of the ledger's file."""
        return read_whole_lines(self.spec.directory / "ledger.journal")

    def has_records(self, count: int) -> bool:
        return len(self.read_journal()) >= count

    @property
    def fake_directory(self) -> Path:
        """The directory with the log and the faults of the fake training."""
        return self.spec.directory

    def set_faults(self, faults: dict[str, str]) -> None:
        """Set the faults of the fake training, by trial number or for `all`."""
        self.fake_directory.mkdir(parents=True, exist_ok=True)
        (self.fake_directory / "faults.json").write_text(json.dumps(faults))

    def slow_down(self) -> None:
        """Slow down each step of the fake training, so that kills hit running trials."""
        self.set_faults({"all": "slow"})

    def read_log(self) -> list[dict[str, Any]]:
        """Read the log entries of the fake training."""
        file = self.fake_directory / "log.jsonl"
        return [json.loads(line) for line in read_whole_lines(file)]

    def list_starts(self) -> list[dict[str, Any]]:
        """List the log entries of starts: trial, node and first step."""
        return [entry for entry in self.read_log() if "from" in entry]


def build_environment(**more: str) -> dict[str, str]:
    """Build the environment of commands that find this package and start a cluster of their own."""
    kept = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return {**kept, "PYTHONPATH": str(ROOT), **more}


@contextmanager
def start_program(
    words: list[str], directory: Path, log: str, **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Start Python in a process group of its own; kill it at the end if it still runs."""
    with (
        (directory / log).open("ab") as output,
        subprocess.Popen(
            [sys.executable, *words],
            cwd=directory,
            env=build_environment(**environment),
            stdout=output,
            stderr=output,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def kill_repeatedly(sweep: KilledSweep, kills: int, records: int, seed: int) -> None:
    chance = random.Random(seed)
    for part in range(kills):
        moment = 1 + int((part + chance.random()) * (records - 1) / kills)
        starting, late = chance.random() < 0.25, chance.random()
        whole_machine = chance.random() < 0.5
        with sweep.start() as process:
            if not starting:
                wait_for_condition(process, partial(sweep.has_records, moment), sweep.read_errors)
            time.sleep(late * (STARTING if starting else LATE))
            assert process.poll() is None, (
                f"the sweep ended before it was killed\n{sweep.read_errors()}"
            )
            kill_driver(process, whole_machine=whole_machine)
        if whole_machine and sweep.read_journal():
            with (sweep.spec.directory / "ledger.journal").open("ab") as file:
                file.write(TORN)
        victim = "the whole machine" if whole_machine else "the driver"
        when = "as it started" if starting else f"from record {moment} on"
        print(f"killed {victim} {when}, at record {len(sweep.read_journal())}")


def kill_driver(process: subprocess.Popen[bytes], *, whole_machine: bool) -> None:
    """Kill a driver with SIGKILL, alone or with all its children.

    The driver is killed first, so that it does not notice the end of a child.
    """
    below = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for child in below if whole_machine else ():
        with suppress(psutil.NoSuchProcess):
            child.kill()
    assert process.wait() == -signal.SIGKILL


def wait_for_condition(
    process: subprocess.Popen[Any],
    condition: Callable[[], bool],
    read_errors: Callable[[], str] | None = None,
) -> None:
    """Wait for a condition during a sweep that must not end before it.

    Args:
        process: of the sweep.
        condition: returns whether the wait is over.
        read_errors: reads the errors of the sweep; None: its standard error is read.
    """
    deadline = time.monotonic() + WAIT
    while not condition():
        if process.poll() is not None:
            errors = read_errors() if read_errors else process.stderr and process.stderr.read()
            raise AssertionError(f"the process ended too soon\n{errors}")
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.02)


def read_steps_written(directory: Path) -> list[int]:
    """Read the step of every line that a trial has written, with repetitions."""
    file = directory / "steps.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("}")]


def read_whole_lines(file: Path) -> list[str]:
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [line for line in lines if line.endswith("\n")]
