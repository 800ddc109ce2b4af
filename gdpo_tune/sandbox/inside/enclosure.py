"""Locks a process of the sandbox, layer by layer, before it meets any candidate.

Required are pidfd, `no_new_privs`, the limits and seccomp, whose filter is tried out: without one
of them the process ends and names the step. Namespaces, Landlock and the user `nobody` are added
wherever the kernel and the container allow them.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from typing import NamedTuple

from . import linux
from .syscalls import MACHINES, build_candidate_filter

NOBODY = 65534
OPEN_FILES = 16
_NAMESPACES = (
    linux.CLONE_NEWNS | linux.CLONE_NEWNET | linux.CLONE_NEWPID | linux.CLONE_NEWIPC
    | linux.CLONE_NEWUTS | linux.CLONE_NEWCGROUP
)  # fmt: skip
_NOT_LOADED, _FILE_OPENED, _SOCKET_OPENED = 3, 4, 5
_TRIAL_FAILURES = {
    _NOT_LOADED: "the kernel or the container refuses to load a filter",
    _FILE_OPENED: "a locked process could open a file",
    _SOCKET_OPENED: "a locked process could open a socket",
}


class LockdownError(Exception):
    """A required step of the lockdown is not possible on this machine."""

    def __init__(self, step: str, reason: object) -> None:
        super().__init__(f"{step}: {reason}")


class Enclosure(NamedTuple):
    """Isolation of a locked process."""

    layers: tuple[str, ...]
    seccomp: linux.Filter | None
    """Filter for every fork that runs a candidate or a test; None for no isolation."""


def enclose(control: socket.socket, parent: int, isolated: bool) -> Enclosure:
    """Lock this process; return in another process, the first of its own pid namespace.

    Args:
        control: socket to the trainer.
        parent: process id of the trainer, which must still be the parent.
        isolated: False sets limits alone, for code that may do whatever the trainer may.

    Raises:
        LockdownError: a required layer is missing.
    """
    linux.die_with_parent()
    if os.getppid() != parent:
        # NOTE: the trainer died before `die_with_parent`, so no signal will come.
        os._exit(0)
    seccomp = _build_filter() if isolated else None
    _require("pidfd", lambda: os.close(os.pidfd_open(os.getpid())))
    _silence_standard_streams()
    layers = _drop_rights(control) if isolated else []
    _require("limits", _set_limits)
    layers.append("limits")
    # NOTE: without isolation and root, this alone keeps the judge's memory from the candidates.
    linux.set_dumpable(False)
    if seccomp is not None:
        linux.die_with_parent()
        _try_filter(seccomp)
        layers.append("seccomp")
    return Enclosure(tuple(layers), seccomp)


def _drop_rights(control: socket.socket) -> list[str]:
    """Add every layer around the filter that is possible here, and return their names."""
    layers: list[str] = []
    started_as_root = os.getuid() == 0
    if _enter_namespaces(control):
        layers.append("namespaces")
    if os.getuid() == 0:
        _become_nobody()
    if started_as_root and os.getuid() != 0:
        layers.append("nobody")
    linux.drop_bounding_set()
    linux.drop_capabilities()
    _require("no_new_privs", linux.forbid_new_privileges)
    layers += ["no-capabilities", "no-new-privileges"]
    version = linux.get_landlock_version()
    if version:
        _require("landlock", lambda: linux.deny_everything_by_landlock(version))
        layers.append(f"landlock-{version}")
    return layers


def cap_at_hard_limit(kind: int, amount: int) -> int:
    """Return the amount, or the hard limit of a `resource.RLIMIT_*` where that is lower."""
    hard = resource.getrlimit(kind)[1]
    return amount if hard == resource.RLIM_INFINITY else min(amount, hard)


def _require(step: str, action: Callable[[], None]) -> None:
    try:
        action()
    except OSError as error:
        raise LockdownError(step, error.strerror) from error


def _build_filter() -> linux.Filter:
    machine = os.uname().machine
    if machine not in MACHINES or sys.maxsize < 2**32:
        names = ", ".join(MACHINES)
        raise LockdownError(
            "seccomp", f"no system call table for {machine}; there is one for {names}"
        )
    return linux.Filter(build_candidate_filter(MACHINES[machine]))


def _silence_standard_streams() -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)


def _enter_namespaces(control: socket.socket) -> bool:
    """Enter new namespaces, as root or else as an ordinary user; return whether that worked.

    Each way is tried in a fork first: a container may allow `unshare` and refuse the mounts after
    it, which would leave this process half way.
    """
    for enter in (_enter_as_root, _enter_as_user) if os.getuid() == 0 else (_enter_as_user,):
        if _succeeds_in_fork(enter):
            enter()
            _become_first_process(control)
            return True
    return False


def _enter_as_root() -> None:
    linux.unshare(_NAMESPACES)
    linux.enter_empty_root(b"/proc")


def _enter_as_user() -> None:
    if os.getuid() == 0:
        _become_nobody()
        # NOTE: a change of user hands /proc/self, and with it the maps below, to root.
        linux.set_dumpable(True)
    user, group = os.getuid(), os.getgid()
    linux.unshare(_NAMESPACES | linux.CLONE_NEWUSER)
    for name, line in (
        ("setgroups", "deny"),
        ("uid_map", f"{NOBODY} {user} 1"),
        ("gid_map", f"{NOBODY} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as handle:
            handle.write(line)
    linux.enter_empty_root(b"/proc")


def _succeeds_in_fork(action: Callable[[], None]) -> bool:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            action()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0


def _become_first_process(control: socket.socket) -> None:
    """Continue in a child, since only children are in the new pid namespace."""
    child = os.fork()
    if child == 0:
        linux.die_with_parent()
        return
    control.close()
    if os.getuid() == 0:
        _become_nobody()
    linux.drop_capabilities()
    linux.die_with_parent()
    os.waitpid(child, 0)
    os._exit(0)


def _become_nobody() -> None:
    linux.drop_bounding_set()
    # NOTE: a container can take root's right to become another user.
    with contextlib.suppress(PermissionError):
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)


def _set_limits() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE):
        resource.setrlimit(kind, (0, 0))
    # NOTE: a fork that runs a program, whose streams are files, raises its own.
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _try_filter(seccomp: linux.Filter) -> None:
    """Load the filter in a fork, which must fail to open a file and die at a socket."""
    child = os.fork()
    if child == 0:
        _attempt_forbidden_calls(seccomp)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSYS:
        return
    code = os.waitstatus_to_exitcode(status)
    reason = _TRIAL_FAILURES.get(code, f"the trial process ended with status {code}")
    raise LockdownError("seccomp", reason)


def _attempt_forbidden_calls(seccomp: linux.Filter) -> None:
    try:
        seccomp.load()
    except OSError:
        os._exit(_NOT_LOADED)
    try:
        os.open("/", os.O_RDONLY)
    except PermissionError:
        socket.socket()
        os._exit(_SOCKET_OPENED)
    os._exit(_FILE_OPENED)
