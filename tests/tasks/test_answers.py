"""Answers: where completions state them, and which of them are equal."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdpo_tune import rewards
from gdpo_tune.tasks import answers
from gdpo_tune.tasks.answers import (
    MathVerifyError,
    extract_answer,
    extract_box,
    find_answer,
    find_answer_problem,
    is_same_answer,
)
from tests.support.data import score_one
from tests.support.tables import read_table

TABLE = read_table("answers")


@pytest.mark.parametrize("completion", TABLE["found"])
def test_an_answer_is_found_as_benchmarks_find_it(completion):
    assert is_same_answer(extract_answer(completion), "42")


@pytest.mark.parametrize("completion", TABLE["open"])
def test_nothing_is_earned_within_open_thoughts_or_boxes(completion):
    """Source: TRL's `reasoning_accuracy_reward`; trl#4563, TinyZero#120."""
    assert score_one(rewards.answer, completion, answer="42") == 0
    assert score_one(rewards.exact_answer, completion, answer="42") == 0
    assert score_one(rewards.integer, completion) == 0


def test_thoughts_that_end_in_an_answer_block_have_an_answer():
    assert find_answer("<think>41<answer>42</answer>\n") == ("42", True)


def test_problems_of_the_task_itself_are_scored_as_ever():
    for completion in ("<think>41<answer>42", "<think>41<answer>42</answer> Yes", "<think>\n42"):
        assert score_one(rewards.answer, completion, answer="42", calculation="6*7=42") == 1
        assert score_one(rewards.answer, completion, answer="42") == 0


@pytest.mark.parametrize(("text", "content"), TABLE["boxes"])
def test_the_last_box_counts_with_its_inner_braces(text, content):
    assert extract_box(text) == content


@pytest.mark.parametrize("judge", TABLE["equal"])
def test_equal_answers_are_equal(judge):
    for gold, *others in TABLE["equal"][judge]:
        for other in others:
            assert is_same_answer(other, gold), (gold, other)


@pytest.mark.parametrize(("gold", "answer"), TABLE["other"])
def test_other_answers_are_not_equal(gold, answer):
    assert not is_same_answer(answer, gold)


@given(st.fractions(max_denominator=10**4))
def test_every_fraction_equals_itself_and_no_other(value):
    top, bottom = value.numerator, value.denominator
    sign = "-" if top < 0 else ""
    for written in (f"{top}/{bottom}", rf"{sign}\frac{{{abs(top)}}}{{{bottom}}}"):
        assert is_same_answer(written, rf"\frac{{{top}}}{{{bottom}}}")
        assert not is_same_answer(written, rf"\frac{{{top + 1}}}{{{bottom}}}")


def test_a_tolerance_is_of_the_value():
    """Source: OlympiadBench, whose column `error` is the largest absolute error."""
    assert is_same_answer("8.45", "8.4", tolerance=0.1)
    assert not is_same_answer("8.51", "8.4", tolerance=0.1)
    assert score_one(rewards.answer, "8.45", answer="8.4", tolerance=0.1) == 1


HOPELESS = [
    "9^{9^{9^{9}}}", "9^9^9^9", "9^{{9^{9}}}", "(9)^{(9)^{9}}", "9^{9!}", "((99^9)!)",
    "9^{999999999}", "(x+1)^{100000}", "100000000!", "(1000!)!", r"\binom{1000000000}{100000000}",
    r"\sum_{i=1}^{1000000000} i", "(" * 500 + "1" + ")" * 500, "1+" * 5000 + "1", "x^" * 60 + "x",
    "\\" * 3000, "{" * 3000, "1" * 100_000, "1," * 5000, "x" * 50_000, "\x00", "\ud800",
    "5" + " " * 300_000 + "x",  # patterns would take minutes
    "e^{e^{e^{e^{e}}}}",  # more digits than there is memory
]  # fmt: skip


@pytest.mark.parametrize("answer", HOPELESS)
def test_what_no_algebra_system_survives_is_unequal_at_once(answer, monkeypatch):
    if not answer.startswith(("\x00", "\ud800")):
        monkeypatch.setattr(answers._VERIFIER, "is_equal", lambda *_: pytest.fail("was asked"))
    assert not is_same_answer(answer, "42")
    assert not is_same_answer(answer, r"\sqrt{2}+1")


@pytest.fixture
def verifier():
    verifier = answers._Verifier()
    yield verifier
    verifier.close()


def test_an_answer_that_uses_up_the_limits_is_unequal_and_the_next_is_judged(verifier, monkeypatch):
    monkeypatch.setattr(verifier, "_CPU_SECONDS", 0)  # a second is left, and it is not enough
    assert not verifier.is_equal("42", "9^{9^{9^{9}}}")
    monkeypatch.undo()  # on a busy machine a second may not be enough for any
    assert verifier.is_equal("x+1", "1+x")


def test_the_process_of_math_verify_has_a_limit_of_memory(verifier):
    """Source: prlimit(2), by which psutil asks for the limits of another process."""
    assert verifier.is_equal("x+1", "1+x")
    process = psutil.Process(verifier._process.pid)
    assert process.rlimit(psutil.RLIMIT_AS)[0] == verifier._MEMORY
    assert process.rlimit(psutil.RLIMIT_CORE) == (0, 0)


def equals_in_a_fork(letter):
    pid = os.fork()
    if pid == 0:
        os._exit(not is_same_answer(f"{letter}+3", f"3+{letter}"))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_fork_and_threads_have_answers_of_their_own():
    assert is_same_answer("x+2", "2+x")
    assert equals_in_a_fork("x")
    with answers._VERIFIER._lock:  # which a thread that the fork does not have may hold
        assert equals_in_a_fork("z")
    with ThreadPoolExecutor(8) as pool:
        right = pool.map(lambda n: is_same_answer(f"y+{n}", f"{n}+y"), range(8))
        assert [*right] == [True] * 8


def test_a_missing_library_is_named_and_no_answer_is_wrong(verifier, monkeypatch):
    monkeypatch.setattr(answers.sys, "path", [])
    with pytest.raises(MathVerifyError, match=r"math_verify.*\n    fix: pip install"):
        verifier.is_equal("x", "y")


def test_an_answer_that_nothing_can_equal_is_named():
    assert find_answer_problem(r"\sum_k 2^k+x").startswith("'\\\\sum_k 2^k+x' is no number")
    assert find_answer_problem("$$") == "nothing is left of it without marks"
    fine = ("5", "Monday", r"\sqrt{2}", "(x+1)^2", "e^{x^2}", r"3^{x^{2}}", "2^{1009}", "100x^{99}")
    assert not any(map(find_answer_problem, (*fine, r"\binom{2n}{n}", "1,2")))


@pytest.mark.parametrize(("completion", "gold", "is_right"), TABLE["chat"])
def test_boxes_and_sentences_of_chat_models(completion, gold, is_right):
    assert is_same_answer(extract_answer(completion), gold) is is_right


@pytest.mark.parametrize(("gold", "answer", "is_right"), TABLE["both_ways"])
def test_answers_as_graders_and_arithmetic_have_them(gold, answer, is_right):
    assert is_same_answer(answer, gold) is is_right
    assert is_same_answer(gold, answer) is is_right


def test_a_killed_process_costs_no_right_answer(verifier):
    """A limit ends the process by SIGXCPU or an error of memory, so SIGKILL is from outside."""
    for _ in range(2):
        assert verifier.is_equal("x+1", "1+x")
        os.kill(verifier._process.pid, signal.SIGKILL)
        verifier._process.wait()


def test_the_process_starts_again_after_its_file_was_replaced(verifier, monkeypatch):
    monkeypatch.setattr("inspect.getsource", lambda _: pytest.fail("read from the disk"))
    assert verifier.is_equal("x+1", "1+x")


def test_what_the_library_prints_is_no_answer_and_fills_no_pipe(verifier, tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text("""
import sys
LatexExtractionConfig = dict
def parse(text, form, parsing_timeout):
    print("false\\n" * 50_000)
    print("line 1:3 no viable alternative\\n" * 10_000, file=sys.stderr)
    return [text]
def verify(gold, answer, timeout_seconds):
    return gold == answer
""")
    monkeypatch.setattr(answers.sys, "path", [str(tmp_path), *answers.sys.path])
    assert [verifier.is_equal("x", answer) for answer in ("x", "y", "x")] == [True, False, True]
