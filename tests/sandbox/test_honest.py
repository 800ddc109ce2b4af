"""Honest programs: right ones pass, wrong ones fail, and neither meets the lock."""

from pathlib import Path
from typing import NamedTuple

import pytest

from gdpo_tune.sandbox import Call, CodeSandbox, Job, Limits
from gdpo_tune.sandbox.jobs import read_assert

pytestmark = pytest.mark.integration


class Program(NamedTuple):
    code: str
    tests: tuple[str, ...]
    twin: str | None
    """The same code with one mistake."""


def programs(text):
    """Sections `## name`: a program, then its tests, one a line or each after `# test`.

    A line `# wrong: right -> wrong` is the mistake that makes the twin.
    """
    sections = {}
    for section in ("\n" + text).split("\n## ")[1:]:
        name, _, body = section.partition("\n")
        body, mistake, replaced = body.partition("# wrong: ")
        code, *tests = body.split("# test\n")
        lines = code.splitlines()
        tests += [line for line in lines if line.startswith("assert ")]
        code = "\n".join(line for line in lines if not line.startswith("assert "))
        right, _, wrong = replaced.removesuffix("\n").partition(" -> ")
        twin = code.replace(right, wrong) if mistake else None
        assert twin != code, name
        sections[name] = Program(code, tuple(tests), twin)
    return sections


PROGRAMS = Path(__file__).with_name("programs")
RIGHT = programs(PROGRAMS.joinpath("right.txt").read_text())
TWINS = {name: program for name, program in RIGHT.items() if program.twin}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_passes(sandbox, name):
    program = RIGHT[name]
    [result] = sandbox.run_batch([Job(program.code, asserts=program.tests)])
    assert (result.status, result.untrusted_detail) == ("passed", "")
    assert result.verdicts == ("passed",) * len(program.tests)


@pytest.mark.parametrize("name", TWINS)
def test_its_wrong_twin_does_not(sandbox, name):
    program = RIGHT[name]
    [result] = sandbox.run_batch([Job(program.twin, asserts=program.tests)])
    assert result.status in ("failed", "error"), result


def test_right_programs_are_tested_in_both_ways():
    by_calls = [name for name, program in RIGHT.items() if all(map(read_assert, program.tests))]
    assert len(by_calls) >= 100
    assert len(RIGHT) - len(by_calls) >= 5
    assert len(TWINS) >= 70


WRONG = {
    "value": ("def f(x): return x", "failed", ("failed", "passed")),
    "type": ("def f(x): return str(x + 1)", "failed", ("failed", "failed")),
    "raises": ("def f(x): return 1 / (x - 1)", "error", ("error", "failed")),
    "missing": ("def g(x): return x", "error", ("error", "error")),
    "syntax": ("def f(x) return x", "error", ("error", "not_run")),
    "name": ("def f(x): return y", "error", ("error", "error")),
    "arity": ("def f(): return 2", "error", ("error", "error")),
    "import": ("import torch\ndef f(x): return 2", "error", ("error", "not_run")),
    "forever": ("def f(x):\n    while True: pass", "timeout", ("error", "not_run")),
    "second_call_forever": (
        "def f(x):\n    while x == 2: pass\n    return x + 1", "timeout", ("passed", "error"),
    ),
    "load_forever": ("while True: pass", "timeout", ("error", "not_run")),
    "sleeps": ("import time\ndef f(x): time.sleep(60)", "timeout", ("error", "not_run")),
    "memory": ("def f(x): return len(bytearray(1 << 40))", "memory", ("error", "error")),
    "recursion": ("def f(x): return f(x)", "error", ("error", "error")),
    "input": ("def f(x): return int(input())", "error", ("error", "error")),
    "empty": ("", "error", ("error", "error")),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_program_gets_its_reason(sandbox, name):
    code, status, verdicts = WRONG[name]
    calls = (Call("f", (1,), 2), Call("f", (2,), 2 if name == "value" else 3))
    # Only a program that sleeps ends by the wall clock, on however busy a machine.
    limits = Limits(cpu_seconds=0.4, wall_seconds=0.8 if name == "sleeps" else 60)
    [result] = sandbox.run_batch([Job(code, calls, limits=limits)])
    assert (result.status, result.verdicts) == (status, verdicts)


CHECKED = programs(PROGRAMS.joinpath("checked.txt").read_text())


@pytest.mark.parametrize("name", CHECKED)
def test_a_right_program_passes_free_form_tests(sandbox, name):
    code, asserts, _ = CHECKED[name]
    [result] = sandbox.run_batch([Job(code, asserts=asserts)])
    assert (result.status, result.untrusted_detail) == ("passed", "")
    assert result.verdicts == ("passed",) * len(asserts)


@pytest.mark.parametrize("name", CHECKED)
def test_a_program_that_does_nothing_fails_free_form_tests(sandbox, name):
    [result] = sandbox.run_batch([Job("def f(*a, **k): return 7", asserts=CHECKED[name].tests)])
    assert result.status in ("failed", "error")


FREE_FORM = """
MODULUS = 10**9 + 7
TABLE = [1, 2]
count = 0
class Shape:
    def area(self): return 1
def f(x):
    global count
    count += 1
    return x + 1
def make(): return Shape()
"""


@pytest.mark.parametrize(
    ("tests", "verdicts"),
    [
        (("assert f(1) < MODULUS == 10**9 + 7",), ("passed",)),
        (("assert MODULUS == 7",), ("failed",)),
        (("assert [f(x) for x in TABLE] == [2, 3] and TABLE[0] == 1",), ("passed",)),
        (("assert sorted([3, 1], key=f) == [1, 3]",), ("passed",)),
        (("assert f(1) == 2 and count == 0", "assert count == 1"), ("passed", "passed")),
        (("y = f(2)\nassert y == 3", "assert y == 3"), ("passed", "passed")),
        (("def g(x): return x\nassert g(1)", "assert [*map(g, [1])] == [1]"), ("passed",) * 2),
        (("assert (lambda x: x)(f(1)) == 2",), ("passed",)),
        (("assert missing",), ("error",)),
        (("assert make().area() == 1",), ("error",)),
    ],
)
def test_free_form_tests_read_constants_and_keep_their_own_names(sandbox, tests, verdicts):
    [result] = sandbox.run_batch([Job(FREE_FORM, asserts=tests)])
    assert result.verdicts == verdicts, result


def test_what_cannot_leave_the_candidate_is_named(sandbox):
    [result] = sandbox.run_batch([Job(FREE_FORM, asserts=("assert make().area() == 1",))])
    assert "Shape, which stays in the candidate's process" in result.untrusted_detail


def test_calls_and_free_form_tests_share_a_job(sandbox):
    job = Job(
        "def f(x): return x + 1",
        calls=(Call("f", (1,), 2), Call("f", (1.5,), 2.5), Call("f", (2,), 99)),
        asserts=("assert f(1) == 2", "assert f(1) > f(0)", "assert f(1) > 2"),
    )
    [result] = sandbox.run_batch([job])
    assert result.verdicts == ("passed", "passed", "failed", "passed", "passed", "failed")
    assert result.status == "failed"


def test_results_come_in_the_order_of_the_jobs_from_several_workers():
    jobs = [
        Job(f"def f(x):\n    for _ in range({(37 * n) % 20000}): pass\n    return x + {n % 3}",
            (Call("f", (1,), 1),))
        for n in range(60)
    ]  # fmt: skip
    with CodeSandbox(workers=2) as sandbox:
        statuses = [result.status for result in sandbox.run_batch(jobs)]
        assert sandbox.run_batch([]) == []
    assert statuses == ["passed" if n % 3 == 0 else "failed" for n in range(60)]


def test_a_seed_and_the_order_of_sets_are_the_same_in_every_sandbox():
    code = (
        "import random\n"
        "def f(): return [random.random(), random.getrandbits(64), str({'a', 'b', 'c', 'd'})]"
    )
    with CodeSandbox() as first:
        # The text of an error carries the values out for the comparison.
        probe = Job(code + "\ndef g(): raise ValueError(repr(f()))", (Call("g", (), 0),), seed=7)
        [one] = first.run_batch([probe])
        [again] = first.run_batch([probe])
    with CodeSandbox() as second:
        [other] = second.run_batch([probe])
    assert one.untrusted_detail.startswith("ValueError: [0.")
    assert one.untrusted_detail == again.untrusted_detail == other.untrusted_detail


def test_large_jobs_and_answers_fit(sandbox):
    numbers = list(range(100_000))
    code = "# " + "x" * 3_000_000 + "\ndef f(x): return x[::-1]"
    [result] = sandbox.run_batch([Job(code, (Call("f", (numbers,), numbers[::-1]),))])
    assert result.status == "passed"


def test_the_tier_is_told(sandbox):
    assert "seccomp" in sandbox.info.layers
    assert sandbox.info.tier.startswith(("full", "seccomp"))
