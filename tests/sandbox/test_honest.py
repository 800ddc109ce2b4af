"""Honest programs: right ones pass, wrong ones fail, and neither meets the lock."""

from pathlib import Path
from typing import NamedTuple

import pytest

from gdpo_tune.sandbox import Call, CodeSandbox, Job
from gdpo_tune.sandbox.jobs import read_assert
from tests.support.tables import read_named

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
CHECKED = programs(PROGRAMS.joinpath("checked.txt").read_text())
TWINS = [name for name, program in RIGHT.items() if program.twin]


@pytest.mark.parametrize("name", [*RIGHT, *(f"checked {name}" for name in CHECKED)])
def test_a_right_program_passes(run, name):
    program = RIGHT.get(name) or CHECKED[name.removeprefix("checked ")]
    result = run(program.code, *program.tests)
    assert (result.status, result.untrusted_detail) == ("passed", "")
    assert result.verdicts == ("passed",) * len(program.tests)


@pytest.mark.parametrize("name", TWINS)
def test_its_wrong_twin_does_not(run, name):
    assert run(RIGHT[name].twin, *RIGHT[name].tests).status in ("failed", "error")


@pytest.mark.parametrize("name", CHECKED)
def test_a_program_that_does_nothing_fails_free_form_tests(run, name):
    assert run("def f(*a, **k): return 7", *CHECKED[name].tests).status in ("failed", "error")


def test_right_programs_are_tested_in_both_ways():
    by_calls = [name for name, program in RIGHT.items() if all(map(read_assert, program.tests))]
    assert len(by_calls) >= 100
    assert len(RIGHT) - len(by_calls) >= 5
    assert len(TWINS) >= 70


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


@pytest.mark.parametrize(("tests", "verdicts"), read_named("sandbox_jobs", "free_form"))
def test_free_form_tests_read_constants_and_keep_their_own_names(run, tests, verdicts):
    assert " ".join(run(FREE_FORM, *tests).verdicts) == verdicts


def test_what_cannot_leave_the_candidate_is_named(run):
    result = run(FREE_FORM, "assert make().area() == 1")
    assert "Shape, which stays in the candidate's process" in result.untrusted_detail


def test_calls_and_free_form_tests_share_a_job(run):
    result = run(
        "def f(x): return x + 1",
        *("assert f(1) == 2", "assert f(1) > f(0)", "assert f(1) > 2"),
        calls=(Call("f", (1,), 2), Call("f", (1.5,), 2.5), Call("f", (2,), 99), Call("f(", (), 1)),
    )
    by_calls, by_tests = ("passed", "passed", "failed", "error"), ("passed", "passed", "failed")
    assert result.verdicts == by_calls + by_tests
    assert result.status == "failed"


def test_results_come_in_the_order_of_the_jobs_from_several_workers():
    code = "def f(x):\n    for _ in range({}): pass\n    return x + {}"
    calls = (Call("f", (1,), 1),)
    jobs = [Job(code.format((37 * n) % 20000, n % 3), calls) for n in range(60)]
    with CodeSandbox(workers=2) as sandbox:
        statuses = [result.status for result in sandbox.run_batch(jobs)]
        assert sandbox.run_batch([]) == []
    assert statuses == ["passed", "failed", "failed"] * 20


def test_a_seed_and_the_order_of_sets_are_the_same_in_every_sandbox(sandbox):
    # The text of an error carries the values out for the comparison.
    drawn = "[random.random(), random.getrandbits(64), str({'a', 'b', 'c', 'd'})]"
    code = f"import random\ndef g(): raise ValueError(repr({drawn}))"
    probe = Job(code, (Call("g", (), 0),), seed=7)
    with CodeSandbox() as second:
        results = [each.run_batch([probe])[0] for each in (sandbox, sandbox, second)]
    (detail,) = {result.untrusted_detail for result in results}
    assert detail.startswith("ValueError: [0.")


def test_large_jobs_and_answers_fit(run):
    numbers = list(range(100_000))
    code = "# " + "x" * 3_000_000 + "\ndef f(x): return x[::-1]"
    assert run(code, calls=(Call("f", (numbers,), numbers[::-1]),)).passed
