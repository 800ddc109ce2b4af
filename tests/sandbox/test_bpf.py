"""The filter, run by a small interpreter of BPF over every system call number."""

import errno
import fcntl
import struct
from pathlib import Path

import pytest

from gdpo_tune.sandbox.guest import seccomp
from gdpo_tune.sandbox.guest.seccomp import (
    ALLOWED,
    FORBIDDEN,
    MACHINES,
    PATHS,
    SPECIAL,
    build_candidate_filter,
)


def run_filter(program, machine, number, arguments=(0,) * 6):
    data = struct.pack("=IIQ6Q", number, machine, 0, *arguments)
    accumulator, position = 0, 0
    while True:
        code, if_true, if_false, operand = program[position]
        position += 1
        if code == seccomp.RETURN:
            return operand
        if code == seccomp.LOAD:
            (accumulator,) = struct.unpack_from("=I", data, operand)
        elif code == seccomp.JUMP:
            position += operand
        else:
            holds = {
                seccomp.JUMP_EQUAL: accumulator == operand,
                seccomp.JUMP_NOT_LESS: accumulator >= operand,
                seccomp.JUMP_ANY_BIT: bool(accumulator & operand),
            }[code]
            position += if_true if holds else if_false


@pytest.fixture(params=MACHINES)
def machine(request):
    return MACHINES[request.param]


def test_every_number_gets_its_decision(machine):
    program = build_candidate_filter(machine)
    groups = {
        seccomp.ALLOW: ALLOWED.split(),
        seccomp.fail_with(errno.EACCES): PATHS.split(),
        seccomp.KILL: FORBIDDEN.split(),
    }
    decisions = {call: decision for decision, calls in groups.items() for call in calls}
    named = {number: call for call, number in machine.numbers.items()}
    assert len(named) == len(machine.numbers), "a number stands for two calls"
    for number in range(1024):
        call = named.get(number)
        if call not in SPECIAL:
            expected = decisions.get(call, seccomp.fail_with(errno.EPERM))
            assert run_filter(program, machine.audit, number) == expected, (number, call)


def test_arguments_decide_about_memory_and_threads(machine):
    program = build_candidate_filter(machine)

    def decision(call, index, value):
        arguments = [0] * 6
        arguments[index] = value
        return run_filter(program, machine.audit, machine.numbers[call], arguments)

    allow, deny = seccomp.ALLOW, seccomp.fail_with
    for call in ("mmap", "mprotect"):
        assert [decision(call, 2, value) for value in (3, 7)] == [allow, deny(errno.EACCES)]
    clones = [decision("clone", 0, flags) for flags in (0x11, 0x3D0F00)]
    assert clones == [seccomp.KILL, deny(errno.EAGAIN)]
    taken = fcntl.F_DUPFD, fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL, fcntl.F_DUPFD_CLOEXEC
    assert {decision("fcntl", 1, command) for command in taken} == {allow}
    others = {decision("fcntl", 1, c) for c in range(2000) if c not in taken}
    assert others == {deny(errno.EPERM)}


def test_another_calling_convention_kills(machine):
    program = build_candidate_filter(machine)
    (other,) = {each.audit for each in MACHINES.values()} - {machine.audit}
    assert run_filter(program, other, machine.numbers["read"]) == seccomp.KILL
    assert run_filter(program, 0x40000003, machine.numbers["read"]) == seccomp.KILL
    for number in (0x40000000, 0x40000001, 0x400000FF, 0xFFFFFFFF):
        assert run_filter(program, machine.audit, number) == seccomp.KILL


def test_a_tree_too_large_for_conditional_jumps_still_decides_right():
    rules = {number: seccomp.fail_with(number % 97) for number in range(0, 3000, 2)}
    program = seccomp.assemble(1, 1 << 30, rules, seccomp.ALLOW)
    assert max(max(step.if_true, step.if_false) for step in program) <= 255
    for number in (0, 1, 2, 777, 778, 1499, 1500, 2998, 2999, 3000):
        assert run_filter(program, 1, number) == rules.get(number, seccomp.ALLOW)


def test_a_filter_is_short_and_ends_whatever_it_decides(machine):
    # The kernel checks and translates it anew for every candidate, step by step.
    program = build_candidate_filter(machine)
    assert len(program) < 220
    for position, step in enumerate(program):
        jumps = [step.operand] if step.code == seccomp.JUMP else [step.if_true, step.if_false]
        reach = 0 if step.code == seccomp.RETURN else 1 + max(jumps)
        assert position + reach < len(program), step


def test_instructions_are_eight_bytes_in_the_order_of_the_kernel():
    packed = seccomp.Instruction(seccomp.JUMP_EQUAL, 1, 2, 0xC000003E).pack()
    assert packed == b"\x15\x00\x01\x02\x3e\x00\x00\xc0"


@pytest.mark.parametrize(
    ("machine", "header"),
    [
        ("x86_64", "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
        ("aarch64", "/usr/include/asm-generic/unistd.h"),
    ],
)
def test_numbers_are_those_of_the_kernel_headers(machine, header):
    if not Path(header).exists():
        pytest.skip(f"no {header} here")
    words = [line.split() for line in Path(header).read_text().splitlines()]
    defined = {
        line[1].removeprefix("__NR3264_").removeprefix("__NR_"): int(line[2])
        for line in words
        if len(line) >= 3 and line[0] == "#define" and line[2].isdigit()
    }
    # The generic header calls what it shares between word sizes by its 32-bit name.
    aliases = {"newfstatat": "fstatat"}
    for call, number in MACHINES[machine].numbers.items():
        known = defined.get(call, defined.get(aliases.get(call, "")))
        assert known == number, call
