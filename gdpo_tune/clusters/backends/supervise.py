"""The process that stays beside a sweep on this machine.

A command that ends leaves its exit status to the process that started it, and whoever called `tick`
is long gone by then. So the sweep has a parent of its own, detached from the caller, which waits:

    <folder>/job.json      what to run, and where: written by whoever submits
             lock          held by the supervisor; the second one of a job finds it held, and ends
             state.json    machine, pids and times of creation of supervisor and sweep
             beat          touched again and again while the supervisor lives
             end.json      exit status of the sweep
             log.txt       what the sweep has printed
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import TextIO

import psutil

from gdpo_tune.core.files import write_whole

JOB, LOCK, STATE, BEAT, END, LOG = (
    "job.json",
    "lock",
    "state.json",
    "beat",
    "end.json",
    "log.txt",
)
BEAT_SECONDS = 15.0
BEGINNING_SECONDS = 0.05
"""Between two looks at another supervisor that is just beginning."""
READY = b"1"


def main(folder: Path) -> int:
    """Detach, run the job of a folder unless it was begun before, and return at once.

    Returns:
        0 once the sweep runs or is known to have been begun; 1 if it could not be started.
    """
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        return 0 if os.read(reader, 1) == READY else 1
    os.close(reader)
    os.setsid()
    supervise(folder, writer)
    return 0


def supervise(folder: Path, ready: int) -> None:
    """Start the sweep, tell the descriptor `ready`, and stay until the sweep has ended."""
    with (folder / LOCK).open("w") as lock, (folder / LOG).open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        if not taken(lock, folder / STATE):
            os.write(ready, READY)
            return
        job = json.loads((folder / JOB).read_bytes())
        with subprocess.Popen(job["command"], cwd=job["root"], stdin=subprocess.DEVNULL) as sweep:
            forward_signals(sweep)
            write_whole(folder / STATE, json.dumps(state_of(sweep)))
            os.write(ready, READY)
            os.close(ready)
            status = wait(sweep, folder / BEAT)
        write_whole(folder / END, json.dumps({"status": status}))


def taken(lock: TextIO, state: Path) -> bool:
    """Take the lock of a job; false once another supervisor has begun it.

    One that holds the lock and has written no state yet is just beginning, or about to fail:
    whoever called here is told nothing before that is decided.
    """
    while not state.exists():
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(BEGINNING_SECONDS)
        else:
            return not state.exists()
    return False


def state_of(sweep: subprocess.Popen[bytes]) -> dict[str, object]:
    """What tells this job's processes from any other."""
    processes = [psutil.Process(), psutil.Process(sweep.pid)]
    return {
        "machine": socket.gethostname(),
        "processes": [(process.pid, process.create_time()) for process in processes],
    }


def wait(sweep: subprocess.Popen[bytes], beat: Path) -> int:
    """The exit status of the sweep; negative if a signal has ended it."""
    while True:
        beat.touch()
        try:
            return sweep.wait(BEAT_SECONDS)
        except subprocess.TimeoutExpired:
            continue


def forward_signals(sweep: subprocess.Popen[bytes]) -> None:
    """Let a machine that shuts down end the sweep the orderly way."""

    def forward(number: int, frame: FrameType | None) -> None:
        sweep.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
