"""Seccomp filters: what a candidate may ask of the kernel, as BPF.

Computing, memory and clocks are allowed. A call that names a path fails with EACCES, as of a file
that it may not read. One that reaches for another process, a socket or the kernel's own machinery
kills the candidate: no honest solution makes it. Every other call fails with EPERM.

The table of decisions becomes a binary search, which costs the kernel about eight comparisons per
system call where a list costs hundreds. The kernel also tries every number once whenever a filter
is loaded, here once per candidate.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

LOAD, JUMP, JUMP_EQUAL, JUMP_NOT_LESS, JUMP_ANY_BIT, RETURN = 0x20, 0x05, 0x15, 0x35, 0x45, 0x06
OFFSET_NUMBER, OFFSET_MACHINE, OFFSET_ARGUMENTS = 0, 4, 16
ALLOW = 0x7FFF0000
KILL = 0x80000000
_REACH = 255
"""Instructions that a conditional jump can skip. One position is left free: a long jump, which
the other branch may need, is written between this one and its target."""


def fail_with(error: int) -> int:
    """Return the decision that lets a system call fail with `error` without running it."""
    return 0x00050000 | error


class Instruction(NamedTuple):
    """One instruction of classic BPF; the two jumps count instructions to skip."""

    code: int
    if_true: int
    if_false: int
    operand: int

    def pack(self) -> bytes:
        """Return the eight bytes that the kernel reads."""
        return struct.pack("=HBBI", *self)


class ArgumentRule(NamedTuple):
    """Decision by the low word of an argument: `yes` if it passes one of the tests, else `no`."""

    argument: int
    test: int
    """`JUMP_EQUAL` or `JUMP_ANY_BIT`."""
    values: tuple[int, ...]
    """Operands of the tests: numbers to equal, or sets of bits to have any of."""
    yes: int
    no: int

    def assemble(self) -> list[Instruction]:
        """Return one test per value, each followed by its decision."""
        tests: list[Instruction] = []
        for value in self.values:
            tests += [Instruction(self.test, 0, 1, value), _return_decision(self.yes)]
        load = Instruction(LOAD, 0, 0, OFFSET_ARGUMENTS + 8 * self.argument)
        return [load, *tests, _return_decision(self.no)]


Rule: TypeAlias = int | ArgumentRule
"""Treatment of a system call: a decision, or one that depends on an argument."""


def assemble(
    audit: int, first_foreign: int, rules: Mapping[int, Rule], otherwise: int
) -> list[Instruction]:
    """Assemble the filter of one machine, by its facts (see `Machine`) and rules by number.

    Calls under another `audit`, or from `first_foreign` on, kill the process.
    """
    native = {number: rule for number, rule in rules.items() if number < first_foreign}
    search = _Search()
    search.add(_merge_intervals({**native, first_foreign: KILL}, otherwise, first_foreign))
    return [
        Instruction(LOAD, 0, 0, OFFSET_MACHINE),
        Instruction(JUMP_EQUAL, 1, 0, audit),
        _return_decision(KILL),
        Instruction(LOAD, 0, 0, OFFSET_NUMBER),
        *reversed(search.instructions),
    ]


def _merge_intervals(
    rules: Mapping[int, Rule], otherwise: int, first_foreign: int
) -> list[tuple[int, Rule]]:
    """Merge neighbours with one rule: (first number, rule), from number 0 upwards."""
    intervals: list[tuple[int, Rule]] = [(0, rules.get(0, otherwise))]
    for edge in sorted({edge for number in rules for edge in (number, number + 1)}):
        rule = rules.get(edge, KILL if edge >= first_foreign else otherwise)
        if rule != intervals[-1][1]:
            intervals.append((edge, rule))
    return intervals


class _Search:
    """A binary search, written from its end, so that the target of each jump exists already.

    Every decision is written once, however many numbers it is for. A position is the number of
    instructions from it to the end.
    """

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []
        """The last one first."""
        self._positions: dict[Rule, int] = {}

    def add(self, intervals: Sequence[tuple[int, Rule]]) -> int:
        """Write the search through the intervals and return its position."""
        first, rule = intervals[len(intervals) // 2]
        if len(intervals) == 1:
            if rule not in self._positions:
                block = [_return_decision(rule)] if isinstance(rule, int) else rule.assemble()
                self.instructions += reversed(block)
                self._positions[rule] = len(self.instructions)
            return self._positions[rule]
        above = self.add(intervals[len(intervals) // 2 :])
        below = self.add(intervals[: len(intervals) // 2])
        above, below = self._bring_near(above), self._bring_near(below)
        end = len(self.instructions)
        self.instructions.append(Instruction(JUMP_NOT_LESS, end - above, end - below, first))
        return end + 1

    def _bring_near(self, position: int) -> int:
        distance = len(self.instructions) - position
        if distance < _REACH:
            return position
        self.instructions.append(Instruction(JUMP, 0, 0, distance))
        return len(self.instructions)


def _return_decision(decision: int) -> Instruction:
    return Instruction(RETURN, 0, 0, decision)


TABLE = """
read 0 63, write 1 64, open 2 -, close 3 57, stat 4 -, fstat 5 80, lstat 6 -, poll 7 -,
lseek 8 62, mmap 9 222, mprotect 10 226, munmap 11 215, brk 12 214, rt_sigaction 13 134,
rt_sigprocmask 14 135, rt_sigreturn 15 139, ioctl 16 29, pread64 17 67, readv 19 65, writev 20 66,
access 21 -, select 23 -, sched_yield 24 124, mremap 25 216, madvise 28 233, shmget 29 194,
shmat 30 196, dup 32 23, dup2 33 -, nanosleep 35 101, getitimer 36 102, alarm 37 -,
setitimer 38 103, getpid 39 172, socket 41 198, connect 42 203, accept 43 202, sendto 44 206,
recvfrom 45 207, sendmsg 46 211, recvmsg 47 212, bind 49 200, listen 50 201, socketpair 53 199,
clone 56 220, fork 57 -, vfork 58 -, execve 59 221, exit 60 93, kill 62 129, uname 63 160,
semget 64 190, msgget 68 186, fcntl 72 25, truncate 76 45, getdents 78 -, getcwd 79 17,
chdir 80 49, rename 82 -, mkdir 83 -, rmdir 84 -, creat 85 -, link 86 -, unlink 87 -,
symlink 88 -, readlink 89 -, chmod 90 -, chown 92 -, lchown 94 -, gettimeofday 96 169,
getrlimit 97 163, getrusage 98 165, sysinfo 99 179, times 100 153, ptrace 101 117, getuid 102 174,
getgid 104 176, setuid 105 146, setgid 106 144, geteuid 107 175, getegid 108 177, getppid 110 173,
setreuid 113 145, setregid 114 143, setgroups 116 159, setresuid 117 147, setresgid 119 149,
capset 126 91, rt_sigqueueinfo 129 138, sigaltstack 131 132, mknod 133 -, personality 135 92,
statfs 137 43, modify_ldt 154 -, pivot_root 155 41, chroot 161 51, mount 165 40, umount2 166 39,
swapon 167 224, swapoff 168 225, reboot 169 142, iopl 172 -, ioperm 173 -, init_module 175 105,
delete_module 176 106, gettid 186 178, tkill 200 130, time 201 -, futex 202 98,
sched_getaffinity 204 123, io_setup 206 0, getdents64 217 61, restart_syscall 219 128,
clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115, exit_group 231 94,
mq_open 240 180, kexec_load 246 104, add_key 248 217, request_key 249 218, keyctl 250 219,
openat 257 56, mkdirat 258 34, mknodat 259 33, fchownat 260 54, newfstatat 262 79,
unlinkat 263 35, renameat 264 38, linkat 265 37, symlinkat 266 36, readlinkat 267 78,
fchmodat 268 53, faccessat 269 48, pselect6 270 72, ppoll 271 73, unshare 272 97,
set_robust_list 273 99, utimensat 280 88, accept4 288 242, dup3 292 24, rt_tgsigqueueinfo 297 240,
perf_event_open 298 241, recvmmsg 299 243, fanotify_init 300 262, name_to_handle_at 303 264,
open_by_handle_at 304 265, sendmmsg 307 269, setns 308 268, process_vm_readv 310 270,
process_vm_writev 311 271, kcmp 312 272, finit_module 313 273, renameat2 316 276, seccomp 317 277,
getrandom 318 278, kexec_file_load 320 294, bpf 321 280, execveat 322 281, userfaultfd 323 282,
membarrier 324 283, statx 332 291, rseq 334 293, pidfd_send_signal 424 424,
io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427, open_tree 428 428,
move_mount 429 429, fsopen 430 430, fsconfig 431 431, fsmount 432 432, fspick 433 433,
pidfd_open 434 434, clone3 435 435, openat2 437 437, pidfd_getfd 438 438, faccessat2 439 439,
process_madvise 440 440, mount_setattr 442 442, memfd_secret 447 447
"""
"""Entries `name x86-64 aarch64`; `-` where the machine has no such call. Calls without a rule are
missing, because they are refused by default.

Source: Linux 6.1 `asm/unistd_64.h` and `asm-generic/unistd.h`.
"""
ALLOWED = """
read write readv writev pread64 close fstat lseek dup dup2 dup3 poll ppoll select pselect6
sched_yield munmap brk mremap madvise membarrier rt_sigaction rt_sigprocmask rt_sigreturn
restart_syscall sigaltstack nanosleep clock_gettime clock_getres clock_nanosleep time times
gettimeofday getitimer setitimer alarm getpid getppid gettid getuid geteuid getgid getegid
getrlimit getrusage sysinfo uname sched_getaffinity futex set_robust_list rseq getrandom exit
exit_group
"""
PATHS = """
open openat openat2 creat stat lstat newfstatat statx statfs access faccessat faccessat2
readlink readlinkat getdents getdents64 chdir rename renameat renameat2 mkdir mkdirat rmdir
unlink unlinkat link linkat symlink symlinkat mknod mknodat chmod fchmodat chown lchown
fchownat truncate utimensat
"""
FORBIDDEN = """
socket socketpair connect accept accept4 bind listen sendto recvfrom sendmsg recvmsg sendmmsg
recvmmsg fork vfork execve execveat kill tkill rt_sigqueueinfo rt_tgsigqueueinfo ptrace
process_vm_readv process_vm_writev process_madvise pidfd_open pidfd_getfd pidfd_send_signal
kcmp unshare setns chroot pivot_root mount umount2 move_mount fsopen fsconfig fsmount fspick
open_tree mount_setattr bpf perf_event_open userfaultfd io_uring_setup io_uring_enter
io_uring_register io_setup add_key request_key keyctl init_module finit_module delete_module
kexec_load kexec_file_load reboot swapon swapoff iopl ioperm modify_ldt personality
name_to_handle_at open_by_handle_at fanotify_init setuid setgid setreuid setregid setresuid
setresgid setgroups capset seccomp shmget shmat msgget semget mq_open memfd_secret
"""

_PROT_EXEC = 0x4
_CLONE_THREAD = 0x10000
_F_DUPFD, _F_GETFD, _F_SETFD, _F_GETFL, _F_DUPFD_CLOEXEC = 0, 1, 2, 3, 1030
_FCNTL_COMMANDS = (_F_DUPFD, _F_GETFD, _F_SETFD, _F_GETFL, _F_DUPFD_CLOEXEC)
_EACCES, _EPERM = fail_with(errno.EACCES), fail_with(errno.EPERM)
_NO_NEW_CODE = ArgumentRule(2, JUMP_ANY_BIT, (_PROT_EXEC,), yes=_EACCES, no=ALLOW)
# NOTE: a thread fails as it does at the limit of processes; anything else is a fork.
_NO_FORK = ArgumentRule(0, JUMP_ANY_BIT, (_CLONE_THREAD,), yes=fail_with(errno.EAGAIN), no=KILL)

SPECIAL: dict[str, Rule] = {
    "mmap": _NO_NEW_CODE,
    "mprotect": _NO_NEW_CODE,
    "fcntl": ArgumentRule(1, JUMP_EQUAL, _FCNTL_COMMANDS, yes=ALLOW, no=_EPERM),
    "ioctl": fail_with(errno.ENOTTY),
    "getcwd": fail_with(errno.ENOENT),
    "clone": _NO_FORK,
    # NOTE: the C library falls back to clone, whose flags a filter can read.
    "clone3": fail_with(errno.ENOSYS),
}


class Machine(NamedTuple):
    """Facts about a processor architecture that a filter needs."""

    audit: int
    """`AUDIT_ARCH_*` constant that the kernel shows to the filter."""
    numbers: dict[str, int]
    first_foreign: int
    """Numbers from here on belong to another calling convention (x32 on x86-64)."""


def _read_column(index: int) -> dict[str, int]:
    rows = [entry.split() for entry in TABLE.split(",")]
    return {row[0]: int(row[index]) for row in rows if row[index] != "-"}


MACHINES = {
    "x86_64": Machine(0xC000003E, _read_column(1), 0x40000000),
    "aarch64": Machine(0xC00000B7, _read_column(2), 0x40000000),
}


def build_candidate_filter(machine: Machine) -> list[Instruction]:
    """Build the filter of a candidate on this machine, from the calls that the machine has."""
    rules: dict[str, Rule] = {
        **dict.fromkeys(ALLOWED.split(), ALLOW),
        **dict.fromkeys(PATHS.split(), _EACCES),
        **dict.fromkeys(FORBIDDEN.split(), KILL),
        **SPECIAL,
    }
    numbers = machine.numbers
    by_number = {numbers[name]: rule for name, rule in rules.items() if name in numbers}
    return assemble(machine.audit, machine.first_foreign, by_number, _EPERM)
