"""Programs that read standard input: right ones pass and wrong ones fail, however they read."""

from pathlib import Path

import pytest

from gdpo_tune.sandbox import Job, Limits, Stream

pytestmark = pytest.mark.integration

LIMITS = Limits(cpu_seconds=0.5, wall_seconds=60, output_bytes=1 << 16)


def programs(text):
    """Programs by name; a section starts with `## name`."""
    parts = [part.partition("\n") for part in text.split("## ")[1:]]
    return {name: code for name, _, code in parts}


# Each prints the sum and the largest of n numbers, and has `sum(` once.
SUMS = (
    Stream("3\n1 2 3\n", "6\n3\n"),
    Stream("1\n-5\n", "-5\n-5\n"),
    Stream("4\r\n10 20  30 40", "100\n40"),
    Stream(f"1000\n{' '.join(map(str, range(1000)))}\n", "499500\n999\n"),
)
RIGHT = programs(Path(__file__).with_name("programs").joinpath("streams.txt").read_text())


def test_there_are_enough_honest_programs():
    assert len(RIGHT) >= 25
    assert all(code.count("sum(") >= 1 for code in RIGHT.values())


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_passes_and_a_wrong_one_fails(sandbox, name):
    code = RIGHT[name]
    # The complement of the negative is one more than the number.
    wrong = code.replace("sum(", "-~sum(")
    right, other = sandbox.run_batch([Job(c, streams=SUMS, limits=LIMITS) for c in (code, wrong)])
    assert right.passed, right
    assert other.status in ("failed", "error"), other
    assert set(other.verdicts) <= {"failed", "error"}


BROKEN = {
    "SyntaxError": "print(int(input()) ** 2",
    "ZeroDivisionError": "print(int(input()) ** 2)\n1 / 0",
    "SystemExit: no": "import sys\nprint(int(input()) ** 2)\nsys.exit('no')",
    "SystemExit: 3": "print(int(input()) ** 2)\nexit(3)",
    "EOFError": "n = input()\nprint(int(n) ** 2)\ninput()",
    "ValueError": "import threading\ndef f(): int('x')\nthreading.Thread(target=f).start()",
    "RecursionError": "def f(): f()\nf()",
    "UnicodeEncodeError": "print('\\ud800')",
    "ModuleNotFoundError": "import torch",
    "PermissionError": "print(open('input.txt').read())",
}


@pytest.mark.parametrize("error", BROKEN)
def test_a_program_that_raises_is_an_error_whatever_it_has_printed(sandbox, error):
    code = BROKEN[error]
    [result] = sandbox.run_batch([Job(code, streams=(Stream("3", "9"), Stream("4", "16")))])
    assert result.status == "error"
    assert error in result.untrusted_detail


def test_each_test_has_its_own_verdict(sandbox):
    code = "n = int(input())\nif n == 2: raise ValueError\nprint(n if n < 4 else -n)"
    streams = tuple(Stream(str(n), str(n)) for n in range(1, 6))
    [result] = sandbox.run_batch([Job(code, streams=streams)])
    assert result.verdicts == ("passed", "error", "passed", "failed", "failed")
    assert result.status == "error"


def test_nothing_runs_after_a_test_without_an_answer(sandbox):
    code = "n = int(input())\nprint(n)\nwhile n == 2: pass"
    streams = tuple(Stream(str(n), str(n)) for n in range(1, 5))
    [result] = sandbox.run_batch([Job(code, streams=streams, limits=LIMITS)])
    assert result.verdicts == ("passed", "error", "not_run", "not_run")
    assert result.status == "timeout"


def test_numbers_are_compared_with_the_tolerance_of_their_test(sandbox):
    code = "print(f'Case 1: {float(input()) / 3:.4f}')"
    streams = (Stream("1", "Case 1: 0.33333333", 1e-3), Stream("1", "Case 1: 0.33333333"))
    [result] = sandbox.run_batch([Job(code, streams=streams)])
    assert result.verdicts == ("passed", "failed")


def test_text_is_text_and_bytes_are_bytes(sandbox):
    text = "héllo ✓ \U0001d4b3\n"
    codes = ["print(input())", "import sys\nsys.stdout.buffer.write(b'\\xff' + input().encode())"]
    jobs = [Job(code, streams=(Stream(text, text),)) for code in codes]
    assert [result.status for result in sandbox.run_batch(jobs)] == ["passed", "failed"]


def test_a_million_numbers_come_and_go(sandbox):
    text = " ".join(map(str, range(1_000_000)))
    limits = Limits(cpu_seconds=30, wall_seconds=200, output_bytes=8 << 20)
    program = "import sys\nprint(*map(int, sys.stdin.read().split()))"
    function = "def f(n): return list(range(n))"
    jobs = [
        Job(program, streams=(Stream(text, text),), limits=limits),
        Job(function, asserts=("assert f(10**6) == list(range(10**6))",), limits=limits),
    ]
    assert [result.status for result in sandbox.run_batch(jobs)] == ["passed"] * 2


def test_as_much_as_is_allowed_may_be_printed_by_all_tests_together(sandbox):
    limits = Limits(output_bytes=1000)
    long = Stream("", "x" * 499)
    code = "print('x' * 499)"
    jobs = [Job(code, streams=(long,) * count, limits=limits) for count in (2, 3)]
    within, beyond = sandbox.run_batch(jobs)
    assert within.passed
    assert beyond.status == "output"
    assert beyond.verdicts == ("passed", "passed", "error")


def test_a_long_input_does_not_raise_the_limit_of_the_output(sandbox):
    limits = Limits(output_bytes=1000)
    job = Job("print('x' * 2000)", streams=(Stream("y" * 10_000, "x" * 2000),), limits=limits)
    assert sandbox.run_batch([job])[0].status == "output"


@pytest.mark.parametrize("depth", [1_000, 50_000, 100_000])
def test_recursion_through_c_is_as_deep_as_contests_need(sandbox, depth):
    code = """
import sys
from functools import cache
sys.setrecursionlimit(10**6)
@cache
def f(n): return f(n - 1) + 1 if n else 0
print(f(int(input())))
"""
    limits = Limits(cpu_seconds=10, wall_seconds=60)
    streams = (Stream(str(depth), str(depth)),)
    [result] = sandbox.run_batch([Job(code, streams=streams, limits=limits)])
    assert result.passed, result
