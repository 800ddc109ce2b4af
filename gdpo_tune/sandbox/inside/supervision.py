"""Watches one locked fork until it ends: CPU clock first, wall clock as a backstop."""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
import struct
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from . import linux
from .enclosure import OPEN_FILES, within_hard_limit
from .frames import READY

_PULSE = 0.002
"""Seconds between two looks at a CPU clock that is about to reach its limit."""
PARTNER_DESCRIPTOR = 3
"""Where a fork finds its connection to the partner that waits for it."""
_PARKING = 10


class TrainerGone(Exception):
    """The other end of the control socket is closed: nobody waits for an answer."""


class Allowance(NamedTuple):
    """Limits of one fork."""

    cpu_seconds: float
    wall_seconds: float
    memory_bytes: int
    file_bytes: int = 0
    """What files may hold; without any, the fork has none."""

    FORMAT = struct.Struct("=ddQQ")

    def pack(self) -> bytes:
        """The request for one fork, as the zygote reads it."""
        clocks = (self.cpu_seconds, self.wall_seconds)
        return self.FORMAT.pack(*clocks, self.memory_bytes, self.file_bytes)

    @classmethod
    def unpack(cls, data: bytes) -> Allowance:
        """Read what `pack` wrote."""
        return cls(*cls.FORMAT.unpack(data))


class Ending(NamedTuple):
    """How one fork ended."""

    signal: int
    """The signal that ended it; 0 after an exit."""
    timed_out: bool
    """Whether it was killed at a limit of its clocks."""
    cpu_seconds: float
    peak_bytes: int

    FORMAT = struct.Struct("=i?dQ")

    def pack(self) -> bytes:
        """The zygote's answer to one request."""
        return self.FORMAT.pack(self.signal, self.timed_out, self.cpu_seconds, self.peak_bytes)

    @classmethod
    def unpack(cls, data: bytes) -> Ending:
        """Read what `pack` wrote."""
        return cls(*cls.FORMAT.unpack(data))


def fork_limited(
    allowance: Allowance,
    seccomp: linux.Filter | None,
    descriptors: Sequence[int],
    program: Callable[[], NoReturn],
) -> int:
    """Fork, limit the child and lock it in, tell its partner that it is ready, run `program` in it.

    Args:
        allowance: memory and CPU limits of the child; wall time is up to `supervise`.
        seccomp: filter to load, if any.
        descriptors: what stays open, numbered from `PARTNER_DESCRIPTOR` on. The first is the
            connection to the partner.
        program: never returns.

    Returns:
        Process id of the child.
    """
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        linux.die_with_parent()
        if os.getppid() != parent:
            os._exit(1)
        _keep_only(descriptors)
        _limit(resource.RLIMIT_AS, allowance.memory_bytes)
        if allowance.file_bytes:
            _limit(resource.RLIMIT_FSIZE, allowance.file_bytes)
        _limit(resource.RLIMIT_CPU, int(allowance.cpu_seconds) + 2)
        if seccomp is not None:
            seccomp.load()
        os.write(PARTNER_DESCRIPTOR, READY)
        program()
    finally:
        os._exit(1)


def _limit(kind: int, amount: int) -> None:
    most = within_hard_limit(kind, amount)
    resource.setrlimit(kind, (most, most))


def _keep_only(descriptors: Sequence[int]) -> None:
    if descriptors != [PARTNER_DESCRIPTOR]:
        # NOTE: parked above first, because a target may be the number of one that comes later.
        parked = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _PARKING) for descriptor in descriptors]
        for target, descriptor in enumerate(parked, PARTNER_DESCRIPTOR):
            os.dup2(descriptor, target)
    os.closerange(PARTNER_DESCRIPTOR + len(descriptors), OPEN_FILES)


def supervise(child: int, allowance: Allowance, control: int) -> Ending:
    """Wait for the child, kill it at its limits, and reap it.

    Raises:
        TrainerGone: `control` was closed at the other end; the child is killed and reaped.
    """
    handle = os.pidfd_open(child)
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    # NOTE: no event is asked for, so that only a hang-up wakes us, not the next request.
    poll.register(control, 0)
    deadline = time.monotonic() + allowance.wall_seconds
    timed_out = gone = False
    left = min(allowance.cpu_seconds, allowance.wall_seconds)
    while not (ready := poll.poll(1000 * max(left, _PULSE))):
        left = min(deadline - time.monotonic(), allowance.cpu_seconds - _cpu_clock(child))
        if left <= 0:
            timed_out = True
            break
    if ready and all(descriptor == control for descriptor, _ in ready):
        gone = True
    if timed_out or gone:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    os.close(handle)
    _, status, usage = os.wait4(child, 0)
    if gone:
        raise TrainerGone
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    cpu_seconds = usage.ru_utime + usage.ru_stime
    if ended_by in (signal.SIGKILL, signal.SIGXCPU) and cpu_seconds >= allowance.cpu_seconds:
        # The kernel's own CPU limit, which a candidate can neither ignore nor outrun.
        timed_out = True
    return Ending(ended_by, timed_out, cpu_seconds, usage.ru_maxrss * 1024)


def _cpu_clock(process: int) -> float:
    """CPU seconds of another process.

    Source: Linux `include/linux/posix-timers_types.h`, CPUCLOCK_SCHED of a process.
    """
    return time.clock_gettime((~process << 3) | 2)
