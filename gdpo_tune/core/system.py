"""This machine and its processes: memory, CPUs, signals, pids and ports.

The pid and the start of a process tell it from a later one with its pid. A clock that is set moves
the creation time in Unix seconds, but neither the start in ticks since boot (field 22 of
proc_pid_stat(5)) nor the id of the boot.

Of signals, the first Ctrl-C asks a command to stop, and the second aborts it. A terminal that
closes asks too, but never aborts: the shell and the kernel each send SIGHUP.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from types import FrameType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    import psutil

SHARE_FOR_CANDIDATES = 0.5
"""Share of the memory for all candidates of one sandbox; the trainer needs the rest."""


class CloseableResource(ABC):
    """Base class of resources that are closed explicitly or by a `with` block."""

    @abstractmethod
    def close(self) -> None:
        """Release everything that the resource holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()


def count_parallel_candidates(memory: int, bytes_each: int) -> int:
    """Return how many candidates may run side by side in `memory` bytes; at least one."""
    return max(1, int(SHARE_FOR_CANDIDATES * memory / bytes_each))


def read_machine_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes of memory that the processes of this machine or control group share.

    This is the smallest of `MemTotal` and the limits of this process's control group and of its
    parents, version 2 or 1, without swap; None where the kernel reports none (not Linux). `root`
    contains `proc` and `sys`.
    """
    lines = map(str.split, _read_lines(root / "proc/meminfo"))
    totals = [int(words[1]) << 10 for words in lines if words[:1] == ["MemTotal:"]]
    limits = _read_group_files(root, "memory", "memory.max", "memory.limit_in_bytes")
    return min([*totals, *(int(words[0]) for words in limits if words[0] != "max")], default=None)


def count_local_cpus(root: Path = Path("/")) -> int:
    """Return the CPU cores that this process may use: its affinity, or less where a quota says so.

    A quota of this process's control group, or of a parent, counts in whole cores, as in Ray, and
    as one at least. `root` contains `proc` and `sys`.

    Source: `cpu.max` in the kernel's cgroup-v2.rst; `cpu.cfs_quota_us`, -1 for none, in its
    sched-bwc.rst.
    """
    has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    files = _read_group_files(root, "cpu", "cpu.max", "cpu.cfs_quota_us cpu.cfs_period_us")
    quotas = [int(words[0]) // int(words[1]) for words in files if words[0].isdecimal()]
    return max(1, min([cores, *quotas]))


def count_free_threads(root: Path = Path("/")) -> int | None:
    """Return how many more threads this user and control group may start; None: no limit is known.

    Source: `RLIMIT_NPROC` in getrlimit(2), which counts threads and does not bind root; `pids.max`
    and `pids.current` in the kernel's cgroup-v2.rst and pids.rst.
    """
    import psutil

    files = _read_group_files(root, "pids", "pids.max pids.current", "pids.max pids.current")
    pairs = [words for words in files if len(words) == 2 and words[0].isdecimal()]
    free = [int(most) - int(now) for most, now in pairs]
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if os.geteuid() and limit != resource.RLIM_INFINITY:
        ours = psutil.process_iter(["uids", "num_threads"])
        threads = (p.info["num_threads"] or 0 for p in ours if p.info["uids"].real == os.getuid())
        free.append(limit - sum(threads))
    return min(free, default=None)


def _read_group_files(
    root: Path, controller: str, names: str, names_of_version_1: str
) -> Iterator[list[str]]:
    """Yield the words of files of this process's control group, then of each parent that has them.

    A container may see the path that its group has outside; then only the last of these files is
    there, and it is the container's own.
    """
    for line in _read_lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        inner = PurePosixPath(path.lstrip("/"))
        for group in (inner, *inner.parents):
            files = (names_of_version_1 if controllers else names).split()
            lines = [line for name in files for line in _read_lines(mount / group / name)]
            if words := " ".join(lines).split():
                yield words


def _read_lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []  # which of these files exist differs from machine to machine


@contextmanager
def stop_on_signals(stop: Callable[[int], None]) -> Generator[None]:
    """Call `stop` at the first SIGINT, SIGTERM or SIGHUP; a second one raises KeyboardInterrupt.

    `stop` gets the exit status of a command that the signal ends, as shells have it: 128 and its
    number. A KeyboardInterrupt that leaves the block has it as its argument.

    A SIGHUP is never the second one. A command that was started with SIGHUP ignored, as by `nohup`,
    keeps ignoring it. Outside of the main thread, where Python receives no signals, this does
    nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    statuses = list[int]()
    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            # to print to a closed terminal is an error, which would keep a command from its end
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for descriptor in terminals:
                if not os.isatty(descriptor):
                    os.dup2(nowhere, descriptor)
            os.close(nowhere)
        elif statuses:
            raise KeyboardInterrupt
        statuses.append(128 + number)
        if len(statuses) == 1:
            stop(statuses[0])

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    except KeyboardInterrupt as error:
        error.args = tuple(statuses[:1])
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def block_hangups() -> Generator[None]:
    """Block SIGHUP in this thread until the end, and for good in processes started meanwhile.

    The kernel sends it to every process of a terminal that is closed.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SAME_START = 2.0
"""Largest difference in seconds between two creation times of one process, where there is no /proc:
they follow a clock that may be set."""


def identify_start(pid: int) -> str:
    """Return boot and start tick of a process; without /proc its creation time in Unix seconds.

    Empty if it is gone or not accessible.
    """
    import psutil

    try:
        boot, stat = BOOT_ID.read_text().strip(), Path(f"/proc/{pid}/stat").read_bytes()
        return f"{boot}.{int(stat.rpartition(b')')[2].split()[19])}"  # a name may hold blanks
    except OSError:
        try:
            return f"{psutil.Process(pid).create_time():.2f}"
        except psutil.Error:
            return ""


def find_process(pid: int, start: str | float) -> psutil.Process | None:
    """Return the process with this pid and start; None if it is gone, a zombie or not accessible.

    `start` is from `identify_start`, or a creation time in Unix seconds.
    """
    import psutil

    try:
        process = psutil.Process(pid)
        is_same = bool(start) and identify_start(pid) == start
        is_same = is_same or abs(process.create_time() - float(start)) < SAME_START
        return process if is_same and process.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.Error, ValueError):  # ValueError: the start of another process
        return None


RENDEZVOUS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables by which the processes of one training find each other."""
_MPI = ("PMI_", "PMIX_", "OMPI_", "MV2_", "MPI_LOCAL")
"""Beginnings of the variables of MPI's launchers, which Accelerate reads in the same way."""


def clear_rendezvous() -> None:
    """Delete the variables that a trial of one process has inherited from a launcher.

    Two such trials would share a `MASTER_PORT`, and one with a `WORLD_SIZE` would wait for others.
    """
    for name in [*RENDEZVOUS, *(name for name in os.environ if name.startswith(_MPI))]:
        os.environ.pop(name, None)


def find_free_port() -> int:
    """Return a port that the system has just given and taken back."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
