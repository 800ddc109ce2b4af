"""Kernel calls that Python does not offer, through ctypes; each raises OSError on refusal."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Sequence

from .bpf import Instruction
from .syscalls import MACHINES

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


def get_landlock_version() -> int:
    """Return the version of Landlock in this kernel; 0 where it is missing or switched off."""
    return max(0, _create_landlock_rules(None, 0, _LANDLOCK_VERSION))


def deny_everything_by_landlock(version: int) -> None:
    """Refuse every file access, TCP port and outside signal that this version controls.

    Source: Linux `include/uapi/linux/landlock.h`; rights were added in versions 2, 3 and 5,
    TCP in 4, scopes in 6.
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
