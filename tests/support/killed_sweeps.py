"""Sweeps in a process of their own, and what kills that process at a random moment.

The moments are seeded. A quarter lie in the start-up of the process, the others come up to `LATE`
seconds after a record of the ledger's file: so they spread over the life of a sweep on a machine of
any speed. Half of the kills take the driver alone, as somebody does who names its pid. The others
take every process below it too and leave half a record at the end of the ledger's file, as the loss
of the machine does.
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
from gdpo_tune.tuning.runner import run_sweep
space, *overrides = sys.argv[1:]
run_sweep(load_spec(space, overrides), train="tests.support.fake_training:train")
"""
"""A program: a sweep that trains nothing, without tracking and display."""
WAIT = 600.0
"""Seconds after which something that was waited for is taken never to come."""
LATE = 0.4
"""Seconds, at most, from a record in the ledger to the kill that it sets off."""
STARTING = 3.0
"""Seconds in which no sweep gets past the start of Ray."""
TORN = b'{"op_code":8,"worker_id":"'


@dataclass(frozen=True)
class KilledSweep:
    """A sweep of the embedded policy, in a folder of its own."""

    folder: Path
    overrides: tuple[str, ...]
    fake: bool
    """Whether the training is the fake one, slowed down; else it is the real command."""
    address: str = ""
    """Of the Ray cluster that it joins; empty: it has one of its own."""

    @property
    def spec(self) -> SweepSpec:
        """What is asked."""
        return load_spec(SPACE, [f"storage={self.folder / 'runs'}", *self.overrides])

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        """The command, always the same, in a process group of its own."""
        given = [f"storage={self.folder / 'runs'}", *self.overrides]
        command = ["-c", FAKE, str(SPACE), *given]
        if not self.fake:
            words = [word for override in given for word in ("--set", override)]
            command = ["-m", "gdpo_tune.sweep", str(SPACE), *words]
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT)])
        if self.address:
            environment["RAY_ADDRESS"] = self.address
        self.folder.mkdir(parents=True, exist_ok=True)
        with (
            (self.folder / "errors.txt").open("ab") as errors,
            subprocess.Popen(
                [sys.executable, *command],
                cwd=self.folder,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            ) as process,
        ):
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.kill()

    def finish(self) -> None:
        """Run it to its end."""
        with self.running() as process:
            status = process.wait()
        assert status == 0, self.read_errors()

    def read_errors(self) -> str:
        """What it wrote on standard error."""
        return (self.folder / "errors.txt").read_text(errors="replace")

    def read_journal(self) -> list[str]:
        """The records of the ledger's file that are whole."""
        return read_whole_lines(self.spec.directory / "ledger.journal")

    def has_records(self, count: int) -> bool:
        """Whether so many were written."""
        return len(self.read_journal()) >= count

    @property
    def fake_folder(self) -> Path:
        """Where the fake training has its log and is told what to do."""
        return self.spec.directory

    def misbehave(self, faults: dict[str, str]) -> None:
        """Let trials of the fake training do something wrong, by their numbers, or `all`."""
        self.fake_folder.mkdir(parents=True, exist_ok=True)
        (self.fake_folder / "faults.json").write_text(json.dumps(faults))

    def slow_down(self) -> None:
        """Let each step of the fake training take a while, so that kills find it at work."""
        self.misbehave({"all": "slow"})

    def read_log(self) -> list[dict[str, Any]]:
        """What trials of the fake training have done, line by line."""
        file = self.fake_folder / "log.jsonl"
        return [json.loads(line) for line in read_whole_lines(file)]

    def list_starts(self) -> list[dict[str, Any]]:
        """Which trials have begun, where, and from which step on."""
        return [entry for entry in self.read_log() if "from" in entry]


def kill_again_and_again(sweep: KilledSweep, kills: int, records: int, seed: int) -> None:
    """Kill a sweep so many times: once in each of as many equal parts of its first records."""
    chance = random.Random(seed)
    for part in range(kills):
        moment = 1 + int((part + chance.random()) * (records - 1) / kills)
        starting, late, whole_machine = (
            chance.random() < 0.25,
            chance.random(),
            chance.random() < 0.5,
        )
        with sweep.running() as process:
            if not starting:
                wait_until(process, partial(sweep.has_records, moment), sweep.read_errors)
            time.sleep(late * (STARTING if starting else LATE))
            assert process.poll() is None, f"it ended before it was killed\n{sweep.read_errors()}"
            kill(process, whole_machine=whole_machine)
        if whole_machine and sweep.read_journal():
            with (sweep.spec.directory / "ledger.journal").open("ab") as file:
                file.write(TORN)
        what = "the whole machine" if whole_machine else "the driver"
        when = "as it started" if starting else f"from record {moment} on"
        print(f"killed {what} {when}, at record {len(sweep.read_journal())}")


def kill(process: subprocess.Popen[bytes], *, whole_machine: bool) -> None:
    """`kill -9`, of a driver alone or with all that it has started; the driver comes first, so that
    it hears of no other death."""
    below = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for child in below if whole_machine else ():
        with suppress(psutil.NoSuchProcess):
            child.kill()
    assert process.wait() == -signal.SIGKILL


def wait_until(
    process: subprocess.Popen[Any],
    condition: Callable[[], bool],
    read_errors: Callable[[], str] | None = None,
) -> None:
    """Wait for a moment in the life of a sweep that must not end before it.

    Args:
        process: of the sweep.
        condition: whether the moment has come.
        told: what the sweep says of its end; None: what comes out of its standard error.
    """
    deadline = time.monotonic() + WAIT
    while not condition():
        if process.poll() is not None:
            said = read_errors() if read_errors else process.stderr and process.stderr.read()
            raise AssertionError(f"it ended too soon\n{said}")
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def read_steps_written(directory: Path) -> list[int]:
    """The step of every line that a trial has written, repeated ones too."""
    file = directory / "steps.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("}")]


def read_whole_lines(file: Path) -> list[str]:
    """Those that were written to their end; none of a file that is not there yet."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [line for line in lines if line.endswith("\n")]
