"""System call numbers of the machines on which the sandbox can lock a process.

Only the calls that the filter decides about are here: every other one is refused by default.
"""

from __future__ import annotations

from typing import NamedTuple

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
"""Entries `name x86-64 aarch64`; `-` where the machine has no such call.

Source: Linux 6.1 `asm/unistd_64.h` and `asm-generic/unistd.h`.
"""


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
