"""Locked forks of a zygote, each supervised until it ends.

CPU time counts first; the wall clock is a backstop.
"""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from . import lockdown
from .lockdown import OPEN_FILES, cap_at_hard_limit
from .protocol import READY, Allowance, ExitStatus

_PULSE = 0.002
"""Seconds between two reads of a CPU clock that is about to reach its limit."""
PARTNER_DESCRIPTOR = 3
"""Number of a fork's connection to the partner that waits for it."""
_PARKING = 10


class TrainerGone(Exception):
    """The control socket was closed at the other end, so no answer is needed."""


def fork_with_limits(
    allowance: Allowance,
    seccomp: lockdown.Filter | None,
    descriptors: Sequence[int],
    program: Callable[[], NoReturn],
) -> int:
    """Fork, lock the child, tell its partner that it is ready, and run `program` in it.

    Return its process id. The descriptors stay open, numbered from `PARTNER_DESCRIPTOR` on; the
    first is the connection to the partner. `supervise_fork` measures wall time.
    """
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        lockdown.die_with_parent()
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
    most = cap_at_hard_limit(kind, amount)
    resource.setrlimit(kind, (most, most))


def _keep_only(descriptors: Sequence[int]) -> None:
    if descriptors != [PARTNER_DESCRIPTOR]:
        # NOTE: parked above first, because a target may be the number of a later one.
        parked = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _PARKING) for descriptor in descriptors]
        for target, descriptor in enumerate(parked, PARTNER_DESCRIPTOR):
            os.dup2(descriptor, target)
    os.closerange(PARTNER_DESCRIPTOR + len(descriptors), OPEN_FILES)


def supervise_fork(child: int, allowance: Allowance, control: int) -> ExitStatus:
    """Wait for the child, kill it at its limits, and reap it.

    Raises:
        TrainerGone: `control` was closed at the other end; the child is killed and reaped.
    """
    handle = os.pidfd_open(child)
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    # NOTE: no event is asked for, so that only a hang-up wakes this process, not a next request.
    poll.register(control, 0)
    deadline = time.monotonic() + allowance.wall_seconds
    timed_out = False
    left = min(allowance.cpu_seconds, allowance.wall_seconds)
    while not (ready := poll.poll(1000 * max(left, _PULSE))):
        # Source: Linux `include/linux/posix-timers_types.h`, CPUCLOCK_SCHED of a process.
        used = time.clock_gettime((~child << 3) | 2)
        left = min(deadline - time.monotonic(), allowance.cpu_seconds - used)
        if left <= 0:
            timed_out = True
            break
    has_gone = bool(ready) and all(descriptor == control for descriptor, _ in ready)
    if timed_out or has_gone:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    os.close(handle)
    _, status, usage = os.wait4(child, 0)
    if has_gone:
        raise TrainerGone
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    cpu_seconds = usage.ru_utime + usage.ru_stime
    if ended_by in (signal.SIGKILL, signal.SIGXCPU) and cpu_seconds >= allowance.cpu_seconds:
        # NOTE: the kernel's own CPU limit, which a candidate can neither ignore nor outrun.
        timed_out = True
    return ExitStatus(ended_by, timed_out, cpu_seconds, usage.ru_maxrss * 1024)
