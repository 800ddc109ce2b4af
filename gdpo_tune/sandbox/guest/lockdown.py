"""Isolates a process of the sandbox, layer by layer, before it handles untrusted code.

Required are pidfd, `no_new_privs`, the limits and seccomp, whose filter is tried out: without one
of them the process ends and names the step. Namespaces, Landlock and the user `nobody` are added
wherever the kernel and the container allow them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .seccomp import MACHINES, Instruction, build_candidate_filter

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS = 0x00020000, 0x02000000, 0x04000000
CLONE_NEWIPC, CLONE_NEWUSER = 0x08000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP = 1, 4, 22
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 24, 38
_SECCOMP_MODE_FILTER = 2
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT = 1, 2, 4, 8, 32
_MS_REC, _MS_PRIVATE, _MNT_DETACH = 0x4000, 0x40000, 2
# These two are the same on every machine.
_NR_LANDLOCK_CREATE, _NR_LANDLOCK_RESTRICT = 444, 446
_LANDLOCK_VERSION = 1
_CAPABILITY_VERSION_3 = 0x20080522
_LAST_CAPABILITY = 63
_PROT_READ, _MAP_PRIVATE, _MAP_FAILED = 1, 2, 2**64 - 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.capset.argtypes = (ctypes.c_char_p, ctypes.c_char_p)
_libc.umount2.argtypes = (ctypes.c_char_p, ctypes.c_int)
_libc.mount.argtypes = (*[ctypes.c_char_p] * 3, ctypes.c_ulong, ctypes.c_char_p)
# NOTE: called in every fork, so what ctypes needs is made before, in memory that stays shared.
_libc_prctl = _libc.prctl
_libc_prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
_libc_mmap = _libc.mmap
_libc_mmap.restype = ctypes.c_void_p
NOBODY = 65534
OPEN_FILES = 16
_NAMESPACES = (
    CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWPID | CLONE_NEWIPC
    | CLONE_NEWUTS | CLONE_NEWCGROUP
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


class Isolation(NamedTuple):
    """Layers of a locked process."""

    layers: tuple[str, ...]
    seccomp: Filter | None
    """Filter for every fork that runs a candidate or a test; None for no isolation."""


def lock_process(control: socket.socket, parent: int, isolated: bool) -> Isolation:
    """Lock this process; return in another process, the first of its own pid namespace.

    `control` is the socket to the trainer, whose process id is `parent`. Without `isolated`, limits
    alone are set.

    Raises:
        LockdownError: a required layer is missing.
    """
    die_with_parent()
    if os.getppid() != parent:
        # NOTE: the trainer died before `die_with_parent`, so no signal will come.
        os._exit(0)
    seccomp = _build_filter() if isolated else None
    _require("pidfd", lambda: os.close(os.pidfd_open(os.getpid())))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)
    layers = _drop_rights(control) if isolated else []
    _require("limits", _set_limits)
    layers.append("limits")
    # NOTE: without isolation and root, this alone keeps a checker's memory from the candidates.
    set_dumpable(False)
    if seccomp is not None:
        die_with_parent()
        _try_filter(seccomp)
        layers.append("seccomp")
    return Isolation(tuple(layers), seccomp)


def _drop_rights(control: socket.socket) -> list[str]:
    layers: list[str] = []
    started_as_root = os.getuid() == 0
    if _enter_namespaces(control):
        layers.append("namespaces")
    if os.getuid() == 0:
        _become_nobody()
    if started_as_root and os.getuid() != 0:
        layers.append("nobody")
    drop_bounding_set()
    drop_capabilities()
    _require("no_new_privs", forbid_new_privileges)
    layers += ["no-capabilities", "no-new-privileges"]
    # NOTE: 0 where it is missing in this kernel, or switched off.
    version = max(0, _create_landlock_rules(None, 0, _LANDLOCK_VERSION))
    if version:
        _require("landlock", lambda: deny_everything_by_landlock(version))
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


def _build_filter() -> Filter:
    machine = os.uname().machine
    if machine not in MACHINES or sys.maxsize < 2**32:
        names = ", ".join(MACHINES)
        raise LockdownError(
            "seccomp", f"no system call table for {machine}; there is one for {names}"
        )
    return Filter(build_candidate_filter(MACHINES[machine]))


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
    unshare(_NAMESPACES)
    enter_empty_root(b"/proc")


def _enter_as_user() -> None:
    if os.getuid() == 0:
        _become_nobody()
        # NOTE: a change of user hands /proc/self, and with it the maps below, to root.
        set_dumpable(True)
    user, group = os.getuid(), os.getgid()
    unshare(_NAMESPACES | CLONE_NEWUSER)
    for name, line in (
        ("setgroups", "deny"),
        ("uid_map", f"{NOBODY} {user} 1"),
        ("gid_map", f"{NOBODY} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as handle:
            handle.write(line)
    enter_empty_root(b"/proc")


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
        die_with_parent()
        return
    control.close()
    if os.getuid() == 0:
        _become_nobody()
    drop_capabilities()
    die_with_parent()
    os.waitpid(child, 0)
    os._exit(0)


def _become_nobody() -> None:
    drop_bounding_set()
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


def _try_filter(seccomp: Filter) -> None:
    """Load the filter in a fork, which must fail to open a file and die at a socket."""
    child = os.fork()
    if child == 0:
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
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSYS:
        return
    code = os.waitstatus_to_exitcode(status)
    reason = _TRIAL_FAILURES.get(code, f"the trial process ended with status {code}")
    raise LockdownError("seccomp", reason)


# Kernel calls that Python does not offer; each raises OSError on refusal.


def _check(result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


def _prctl(option: int, value: int = 0) -> None:
    _check(_libc_prctl(option, value, 0, 0, 0))


def die_with_parent() -> None:
    """Ask for SIGKILL when the parent ends; a fork or a change of user clears the request."""
    _prctl(_PR_SET_PDEATHSIG, 9)


def set_dumpable(dumpable: bool) -> None:
    """Set whether processes of the same user may trace this one or read its /proc entries."""
    _prctl(_PR_SET_DUMPABLE, int(dumpable))


def forbid_new_privileges() -> None:
    """Keep the programs that this process runs from gaining rights."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def drop_bounding_set() -> None:
    """Empty the bounding set, so that no program can bring a capability back."""
    for capability in range(_LAST_CAPABILITY + 1):
        try:
            _prctl(_PR_CAPBSET_DROP, capability)
        except OSError as error:
            # NOTE: EINVAL ends the list of this kernel; EPERM: an ordinary user has none to drop.
            if error.errno not in (errno.EINVAL, errno.EPERM):
                raise
            return


def drop_capabilities() -> None:
    """Empty the permitted, effective and inheritable sets."""
    _check(_libc.capset(struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), bytes(24)))


def unshare(flags: int) -> None:
    """Leave the shared namespaces that `flags` names."""
    _check(_libc.unshare(ctypes.c_int(flags)))


def enter_empty_root(over: bytes) -> None:
    """Make an empty, read-only directory the root; `over` is any directory to mount it on."""
    _check(_libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None))
    guards = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    _check(_libc.mount(b"none", over, b"tmpfs", guards, b"size=4k,nr_inodes=2,mode=0555"))
    os.chdir(over)
    number = MACHINES[os.uname().machine].numbers["pivot_root"]
    _check(_libc.syscall(ctypes.c_long(number), ctypes.c_char_p(b"."), ctypes.c_char_p(b".")))
    _check(_libc.umount2(b".", _MNT_DETACH))
    _check(_libc.mount(None, b"/", None, _MS_REMOUNT | _MS_RDONLY | guards, None))
    os.chdir("/")


def deny_everything_by_landlock(version: int) -> None:
    """Refuse every file access, TCP port and outside signal that this version controls.

    Source: Linux `include/uapi/linux/landlock.h`; TCP was added in version 4, scopes in 6.
    """
    file_rights = {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)
    attributes = struct.pack("=Q", (1 << file_rights) - 1)
    if version >= 4:
        attributes += struct.pack("=Q", 3)
    if version >= 6:
        attributes += struct.pack("=Q", 3)
    rules = _check(_create_landlock_rules(attributes, len(attributes), 0))
    number = ctypes.c_long(_NR_LANDLOCK_RESTRICT)
    _check(_libc.syscall(number, ctypes.c_int(rules), ctypes.c_uint(0)))
    os.close(rules)


def _create_landlock_rules(attributes: bytes | None, size: int, flags: int) -> int:
    return _libc.syscall(
        ctypes.c_long(_NR_LANDLOCK_CREATE),
        ctypes.c_char_p(attributes),
        ctypes.c_size_t(size),
        ctypes.c_uint(flags),
    )


class Filter:
    """A seccomp filter in the form that the kernel reads, ready to be loaded after a fork."""

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        packed = b"".join(instruction.pack() for instruction in instructions)
        self._code = ctypes.create_string_buffer(packed, len(packed))
        head = struct.pack("@HP", len(instructions), ctypes.addressof(self._code))
        self._program = ctypes.create_string_buffer(head, len(head))
        self._address = ctypes.addressof(self._program)

    def load(self) -> None:
        """Lock this process for good; requires `forbid_new_privileges` before."""
        _check(_libc_prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, self._address, 0, 0))


class ReadOnly:
    """A mapped file in memory: a fork copies nothing of it, and cannot change it for others."""

    def __init__(self, descriptor: int) -> None:
        """Map the file and close the descriptor, the only way to write to it."""
        self._size = os.fstat(descriptor).st_size
        size, start = ctypes.c_size_t(self._size), ctypes.c_long(0)
        address = _libc_mmap(None, size, _PROT_READ, _MAP_PRIVATE, descriptor, start)
        if address == _MAP_FAILED:
            _check(-1)
        os.close(descriptor)
        self._address: int = address

    def __len__(self) -> int:
        return self._size

    def read(self, start: int, size: int) -> bytes:
        """Return a copy of a part."""
        return ctypes.string_at(self._address + start, size)
