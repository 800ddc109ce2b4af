"""The parent process of a sweep on this machine, which records its exit status.

The process that calls `tick` does not wait for the end of a sweep, so the sweep needs another
parent, detached from the caller:

    <directory>/job.json    command and working directory: written before the supervisor starts
                lock        held by the supervisor; a second one finds it held, and ends
                state.json  machine, pids and starts of supervisor and sweep
                beat        touched every `HEARTBEAT_SECONDS` while the supervisor lives
                end.json    exit status of the sweep
                log.txt     output of the sweep
                stop        created by the caller when it sends the sweep its one SIGTERM
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
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from gdpo_tune.core.files import write_atomically
from gdpo_tune.core.locks import is_locked, lock_file
from gdpo_tune.core.system import identify_start

JOB, LOCK, STATE = "job.json", "lock", "state.json"
HEARTBEAT, END, LOG = "beat", "end.json", "log.txt"
HEARTBEAT_SECONDS = 15.0
READY = b"1"


def main(directory: Path) -> int:
    """Start the job of a directory in a detached process, unless it was started before.

    That process supervises the sweep: it records its end.

    Returns:
        0 once the sweep runs or another supervisor has started it; 1 if it could not be started.
    """
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        return 0 if os.read(reader, 1) == READY else 1
    os.close(reader)
    os.setsid()
    with (directory / LOCK).open("w") as lock, (directory / LOG).open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        if not _take_lock(lock, directory / STATE):
            os.write(writer, READY)
            return 0
        job = json.loads((directory / JOB).read_bytes())
        with subprocess.Popen(job["command"], cwd=job["root"], stdin=subprocess.DEVNULL) as sweep:
            for number in (signal.SIGTERM, signal.SIGINT):  # from a machine that shuts down
                signal.signal(number, lambda received, _: sweep.send_signal(received))
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            processes = [(pid, identify_start(pid)) for pid in (os.getpid(), sweep.pid)]
            state = {"machine": socket.gethostname(), "processes": processes}
            write_atomically(directory / STATE, json.dumps(state))
            os.write(writer, READY)
            os.close(writer)
            exit_status = None
            while exit_status is None:
                (directory / HEARTBEAT).touch()
                try:
                    exit_status = sweep.wait(HEARTBEAT_SECONDS)  # negative after a signal
                except subprocess.TimeoutExpired:
                    continue
        write_atomically(directory / END, json.dumps({"status": exit_status}))
    return 0


def _take_lock(lock: TextIO, state: Path) -> bool:
    """Take the lock of a job; return False once another supervisor has started the job.

    One that holds the lock without a state file is just starting, or about to fail: wait for it.
    """
    while not state.exists():
        try:
            lock_file(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB, state)
        except BlockingIOError:
            time.sleep(0.05)
        else:
            return not state.exists()
    return False


def has_supervisor(directory: Path) -> bool:
    """Return whether a living supervisor holds the lock of a job."""
    with suppress(OSError):
        return is_locked(directory / LOCK)
    return False


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
