"""Restrictions of this process and its children, as in some containers."""

import errno
import os

from gdpo_tune.sandbox.guest import lockdown, seccomp
from gdpo_tune.sandbox.guest.seccomp import MACHINES

NAMESPACES = (
    lockdown.CLONE_NEWNS | lockdown.CLONE_NEWCGROUP | lockdown.CLONE_NEWUTS | lockdown.CLONE_NEWIPC
    | lockdown.CLONE_NEWUSER | lockdown.CLONE_NEWPID | lockdown.CLONE_NEWNET
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
        dict.fromkeys(refused.split(), seccomp.fail_with(errno.EPERM))
        | {
            "clone": seccomp.ArgumentRule(
                0,
                seccomp.JUMP_ANY_BIT,
                (NAMESPACES,),
                yes=seccomp.fail_with(errno.EPERM),
                no=seccomp.ALLOW,
            ),
            "clone3": seccomp.fail_with(errno.ENOSYS),
        }
    )


def refuse_landlock():
    """Act like a kernel that was built without Landlock."""
    _load_filter({"landlock_create_ruleset": seccomp.fail_with(errno.ENOSYS)})


def refuse_seccomp():
    """Act like a container that refuses to load a filter."""
    rule = seccomp.ArgumentRule(
        0,
        seccomp.JUMP_EQUAL,
        (PR_SET_SECCOMP,),
        yes=seccomp.fail_with(errno.EINVAL),
        no=seccomp.ALLOW,
    )
    _load_filter({"prctl": rule})


def refuse_files_in_memory():
    """Act like a kernel whose `vm.memfd_noexec` is 2."""
    _load_filter({"memfd_create": seccomp.fail_with(errno.EACCES)})


def _load_filter(rules):
    name = os.uname().machine
    machine = MACHINES[name]
    numbers = dict(machine.numbers)
    for call, number in NUMBERS.items():
        numbers[call] = number[name] if isinstance(number, dict) else number
    complete = {numbers[call]: rule for call, rule in rules.items()}
    lockdown.forbid_new_privileges()
    lockdown.Filter(
        seccomp.assemble(machine.audit, machine.first_foreign, complete, seccomp.ALLOW)
    ).load()
