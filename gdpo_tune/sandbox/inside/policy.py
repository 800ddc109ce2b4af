"""Seccomp rules of a candidate: which system calls it may make.

Computing, memory and clocks are allowed. A call that names a path fails with EACCES, as honest
code expects of a file that it may not read. A call that reaches for another process, a socket
or the kernel's own machinery kills the candidate: no honest solution makes it. Every call
that is not listed fails with EPERM.
"""

from __future__ import annotations

import errno

from .bpf import (
    ALLOW,
    JUMP_ANY_BIT,
    JUMP_EQUAL,
    KILL,
    ArgumentRule,
    Instruction,
    Rule,
    assemble,
    refuse,
)
from .syscalls import Machine

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
_NO_NEW_CODE = ArgumentRule(2, JUMP_ANY_BIT, (_PROT_EXEC,), yes=refuse(errno.EACCES), no=ALLOW)
_F_DUPFD, _F_GETFD, _F_SETFD, _F_GETFL, _F_DUPFD_CLOEXEC = 0, 1, 2, 3, 1030
_FCNTL_COMMANDS = (_F_DUPFD, _F_GETFD, _F_SETFD, _F_GETFL, _F_DUPFD_CLOEXEC)

SPECIAL: dict[str, Rule] = {
    "mmap": _NO_NEW_CODE,
    "mprotect": _NO_NEW_CODE,
    "fcntl": ArgumentRule(1, JUMP_EQUAL, _FCNTL_COMMANDS, yes=ALLOW, no=refuse(errno.EPERM)),
    "ioctl": refuse(errno.ENOTTY),
    "getcwd": refuse(errno.ENOENT),
    # NOTE: a thread fails as it does at the limit of processes; anything else is a fork.
    "clone": ArgumentRule(0, JUMP_ANY_BIT, (_CLONE_THREAD,), yes=refuse(errno.EAGAIN), no=KILL),
    # NOTE: the C library falls back to clone, whose flags a filter can read.
    "clone3": refuse(errno.ENOSYS),
}


def build_candidate_filter(machine: Machine) -> list[Instruction]:
    """Build the filter of a candidate on this machine, from the calls that the machine has."""
    rules: dict[str, Rule] = {
        **dict.fromkeys(ALLOWED.split(), ALLOW),
        **dict.fromkeys(PATHS.split(), refuse(errno.EACCES)),
        **dict.fromkeys(FORBIDDEN.split(), KILL),
        **SPECIAL,
    }
    numbers = machine.numbers
    by_number = {numbers[name]: rule for name, rule in rules.items() if name in numbers}
    return assemble(machine.audit, machine.first_foreign, by_number, refuse(errno.EPERM))
