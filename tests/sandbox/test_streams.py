"""Programs that read standard input: right ones pass and wrong ones fail, however they read."""

from pathlib import Path

import pytest

from gdpo_tune.sandbox import Limits, Stream
from tests.support.tables import read_table

pytestmark = pytest.mark.integration

LIMITS = Limits(cpu_seconds=0.5, wall_seconds=60, output_bytes=1 << 16)


# Each prints the sum and the largest of n numbers, and has `sum(` once.
SUMS = (
    Stream("3\n1 2 3\n", "6\n3\n"),
    Stream("1\n-5\n", "-5\n-5\n"),
    Stream("4\r\n10 20  30 40", "100\n40"),
    Stream(f"1000\n{' '.join(map(str, range(1000)))}\n", "499500\n999\n"),
)
SECTIONS = Path(__file__).with_name("programs").joinpath("streams.txt").read_text().split("## ")[1:]
RIGHT = {text.partition("\n")[0]: text.partition("\n")[2] for text in SECTIONS}


def test_there_are_enough_honest_programs():
    assert len(RIGHT) >= 25
    assert all(code.count("sum(") >= 1 for code in RIGHT.values())


@pytest.mark.parametrize("code", RIGHT.values(), ids=RIGHT)
def test_a_right_program_passes_and_a_wrong_one_fails(run, code):
    # The complement of the negative is one more than the number.
    wrong = code.replace("sum(", "-~sum(")
    assert run(code, streams=SUMS, limits=LIMITS).passed
    other = run(wrong, streams=SUMS, limits=LIMITS)
    assert other.status in ("failed", "error"), other
    assert set(other.verdicts) <= {"failed", "error"}


@pytest.mark.parametrize(("error", "code"), read_table("sandbox_jobs")["broken"].items())
def test_a_program_that_raises_is_an_error_whatever_it_has_printed(run, error, code):
    result = run(code, streams=(Stream("3", "9"), Stream("4", "16")))
    assert result.status == "error"
    assert error in result.untrusted_detail


def numbered(count):
    return tuple(Stream(str(n), str(n)) for n in range(1, count))


def test_each_test_has_its_own_verdict(run):
    code = "n = int(input())\nif n == 2: raise ValueError\nprint(n if n < 4 else -n)"
    result = run(code, streams=numbered(6))
    assert result.verdicts == ("passed", "error", "passed", "failed", "failed")
    assert result.status == "error"


def test_nothing_runs_after_a_test_without_an_answer(run):
    code = "n = int(input())\nprint(n)\nwhile n == 2: pass"
    result = run(code, streams=numbered(5), limits=LIMITS)
    assert result.verdicts == ("passed", "error", "not_run", "not_run")
    assert result.status == "timeout"


def test_numbers_are_compared_with_the_tolerance_of_their_test(run):
    code = "print(f'Case 1: {float(input()) / 3:.4f}')"
    streams = (Stream("1", "Case 1: 0.33333333", 1e-3), Stream("1", "Case 1: 0.33333333"))
    assert run(code, streams=streams).verdicts == ("passed", "failed")


def test_text_is_text_and_bytes_are_bytes(run):
    text = "héllo ✓ \U0001d4b3\n"
    codes = ["print(input())", "import sys\nsys.stdout.buffer.write(b'\\xff' + input().encode())"]
    found = [run(code, streams=(Stream(text, text),)).status for code in codes]
    assert found == ["passed", "failed"]


def test_a_million_numbers_come_and_go(run):
    text = " ".join(map(str, range(1_000_000)))
    limits = Limits(cpu_seconds=30, wall_seconds=200, output_bytes=8 << 20)
    program = "import sys\nprint(*map(int, sys.stdin.read().split()))"
    function = "def f(n): return list(range(n))"
    assert run(program, streams=(Stream(text, text),), limits=limits).passed
    assert run(function, "assert f(10**6) == list(range(10**6))", limits=limits).passed


def test_as_much_as_is_allowed_may_be_printed_by_all_tests_together(run):
    limits = Limits(output_bytes=1000)
    within, beyond = (
        run("print('x' * 499)", streams=(Stream("", "x" * 499),) * count, limits=limits)
        for count in (2, 3)
    )
    assert within.passed
    assert (beyond.status, beyond.verdicts) == ("output", ("passed", "passed", "error"))
    # A long input does not raise the limit of the output.
    long = (Stream("y" * 10_000, "x" * 2000),)
    assert run("print('x' * 2000)", streams=long, limits=limits).status == "output"


@pytest.mark.parametrize("depth", [1_000, 50_000, 100_000])
def test_recursion_through_c_is_as_deep_as_contests_need(run, depth):
    code = """
import sys
from functools import cache
sys.setrecursionlimit(10**6)
@cache
def f(n): return f(n - 1) + 1 if n else 0
print(f(int(input())))
"""
    limits = Limits(cpu_seconds=10, wall_seconds=60)
    assert run(code, streams=(Stream(str(depth), str(depth)),), limits=limits).passed
