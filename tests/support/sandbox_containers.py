"""Restrictions of this process and its children, as in some containers."""

import errno
import os

from gdpo_tune.sandbox.inside import bpf, linux
from gdpo_tune.sandbox.inside.syscalls import MACHINES

NAMESPACES = (
    linux.CLONE_NEWNS | linux.CLONE_NEWCGROUP | linux.CLONE_NEWUTS | linux.CLONE_NEWIPC
    | linux.CLONE_NEWUSER | linux.CLONE_NEWPID | linux.CLONE_NEWNET
)  # fmt: skip
PR_SET_SECCOMP = 22
# These are missing in the sandbox's table, which has no calls that its filter refuses by default.
NUMBERS = {
    "prctl": {"x86_64": 157, "aarch64": 167},
    "memfd_create": {"x86_64": 319, "aarch64": 279},
    "landlock_create_ruleset": 444,
}


def refuse_namespaces():
    """Refuse the calls that Docker's default profile refuses without capabilities."""
    refused = "unshare setns mount umount2 pivot_root fsopen fsmount move_mount open_tree"
    _load_filter(
        dict.fromkeys(refused.split(), bpf.refuse(errno.EPERM))
        | {
            "clone": bpf.ArgumentRule(
                0, bpf.JUMP_ANY_BIT, (NAMESPACES,), yes=bpf.refuse(errno.EPERM), no=bpf.ALLOW
            ),
            "clone3": bpf.refuse(errno.ENOSYS),
        }
    )


def refuse_landlock():
    """Act like a kernel that was built without Landlock."""
    _load_filter({"landlock_create_ruleset": bpf.refuse(errno.ENOSYS)})


def refuse_seccomp():
    """Act like a container that refuses to load a filter."""
    rule = bpf.ArgumentRule(
        0, bpf.JUMP_EQUAL, (PR_SET_SECCOMP,), yes=bpf.refuse(errno.EINVAL), no=bpf.ALLOW
    )
    _load_filter({"prctl": rule})


def refuse_files_in_memory():
    """Act like a kernel whose `vm.memfd_noexec` is 2."""
    _load_filter({"memfd_create": bpf.refuse(errno.EACCES)})


def _load_filter(rules):
    name = os.uname().machine
    machine = MACHINES[name]
    numbers = dict(machine.numbers)
    for call, number in NUMBERS.items():
        numbers[call] = number[name] if isinstance(number, dict) else number
    complete = {numbers[call]: rule for call, rule in rules.items()}
    linux.forbid_new_privileges()
    linux.Filter(bpf.assemble(machine.audit, machine.first_foreign, complete, bpf.ALLOW)).load()
