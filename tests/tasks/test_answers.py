r"""Answers: where completions state them, and which of them are equal.

Sources: `is_equiv` of github.com/hendrycks/math; Math-Verify 0.9; the graders of
github.com/QwenLM/Qwen2.5-Math; arithmetic.
"""

import os
import signal
import threading

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


@pytest.mark.parametrize(
    "completion",
    [
        r"<think>6 \cdot 7</think> So the result is \boxed{42}",
        r"Thus \fbox{41}, no: \[ \boxed{42}. \] I hope it is correct.",
        r"\boxed 4 is wrong, $\boxed{ 42 }$",
        r"<think>\boxed{41}</think> <answer>Then \boxed{42}</answer>",
        "Final Answer: The final answer is $42$. I hope it is correct.",  # Minerva's prompt
        "6 * 7 is it.\n**Answer:** 42\n",  # simple-evals
        "The answer is 42.",  # chain-of-thought prompts of GSM8K
        "The answer is: 41.\nNo, the correct answer is: 42",
        "6 * 7 = <<6*7=42>>42\n#### 42",  # GSM8K's own form
        "<answer>The answer is 42.</answer>",
        "thoughts of a template that opened them: 41</think>\n42",
        "<thinking>41</thinking>\n42",
        "<reasoning>\n41\n</reasoning>\n<answer>\n42\n</answer>",
        "<think>Perhaps <answer>41</answer></think>\n<answer>42</answer>",
    ],
)
def test_an_answer_is_found_as_benchmarks_find_it(completion):
    assert is_same_answer(extract_answer(completion), "42")


@pytest.mark.parametrize(
    "completion",
    [
        "<think>Perhaps 41? No, wait, it may be\n42",
        "<think>A draft: <answer>42</answer> but I doubt it. Let me try",
        r"<think>So \boxed{42}, or",
        "<think>a</think> <think>The answer is 42",
        "<think>Done.</think> <think>\n42",
        "<reasoning>Perhaps\n#### 42",
        "<think>42</think>",
        r"The result is \boxed{42",
    ],
)
def test_nothing_is_earned_within_open_thoughts_or_boxes(completion):
    """Source: TRL's `reasoning_accuracy_reward`; trl#4563, TinyZero#120."""
    assert score_one(rewards.answer, completion, answer="42") == 0
    assert score_one(rewards.exact_answer, completion, answer="42") == 0
    assert score_one(rewards.integer, completion) == 0


def test_thoughts_that_end_in_an_answer_block_have_an_answer():
    assert find_answer("<think>41<answer>42</answer>\n") == ("42", True)


def test_problems_of_the_task_itself_are_scored_as_ever():
    for completion in (
        "<think>41<answer>42",
        "<think>41<answer>42</answer> I hope so",
        "<think>\n42",
    ):
        assert score_one(rewards.answer, completion, answer="42", calculation="6*7=42") == 1
        assert score_one(rewards.answer, completion, answer="42") == 0


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{1} and \boxed{2}", "2"),
        (r"\boxed7", "7"),
        (r"\boxed{\text{a } \}}", r"\text{a } \}"),
        (r"\boxed{1", ""),
        (r"\boxedx{1}", ""),
        ("", ""),
    ],
)
def test_the_last_box_counts_with_its_inner_braces(text, content):
    assert extract_box(text) == content


EQUAL = {
    "MATH's judge": [
        (r"\frac{1}{2}", r"\dfrac{1}{2}", r"\tfrac12", r"\frac12", "0.5", "1/2", r"\frac{1}2"),
        (r"10,\!000", "10,000", "10000"),
        (r"90^\circ", "90", r"90^{\circ}", "90°", "90 degrees"),
        ("5", "x=5", "x = 5", "$x=5$"),
        (r"\$32.50", "32.50"),
        (r"\sqrt3", r"\sqrt{3}"),
        (r"\left(3,4\right)", "(3, 4)"),
        ("0.25", ".25"),
        (r"12\text{ cm}", "12"),
        (r"50\%", "50"),
    ],
    "numbers by value": [
        ("1000", "1,000", "$1,000", "1000.00", "1e3", r"10^3", "1 000", "+1000", "1{,}000"),
        ("-5", "\u22125", "-$5", r"-\$5", "- 5"),
        ("18", "18 dollars", "18.", "**18**", "$18$", r"\(18\)", r"\[18\]", r"\boxed{18}", "`18`"),
        (r"\frac{1}{3}", "0.333333", "2/6"),
        ("2.5", "2 1/2", r"2\frac{1}{2}", r"\frac{5}{2}"),
        ("5%", "5", r"5\%", "0.05", "5 percent"),
        ("0.05", "5%"),
        ("66", "66 ft", "66 km/h", r"66\mathrm{~cm}", r"66 \text{ m}^2"),
        ("2.887e-6", r"2.887 \times 10^{-6}"),
    ],
    "words": [
        (r"\text{Monday}", "monday", "Monday."),
        (r"\text{(A)}", "A", "(A)"),
        ("73", r"\textbf{(073)}"),
        ("Yes", "yes."),
    ],
    "Math-Verify": [
        ("1,2", "2, 1", r"1 \text{ and } 2", "$1$, $2$"),
        (r"\{1,2\}", r"\{2,1\}"),
        (r"\pm 2", "2,-2"),
        ("[1,2)", r"\left[1, 2\right)"),
        (r"(-\infty, 2)\cup(3,\infty)", "(\u2212∞,2)\u222a(3,∞)"),
        (r"\sqrt{12}", r"2\sqrt{3}"),
        ("x^2-1", "(x-1)(x+1)", r"(x+1)\cdot(x-1)"),
        ("10-4 n", "-4n+10"),
        (r"100\pi", "100π"),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"),
        (r"5\sqrt{2}\text{ cm}", r"5\sqrt{2}"),
    ],
}


@pytest.mark.parametrize("judge", EQUAL)
def test_equal_answers_are_equal(judge):
    for gold, *others in EQUAL[judge]:
        for other in others:
            assert is_same_answer(other, gold), (gold, other)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("1,2", "12"),  # a separator stands before three digits. Source: Math-Verify#14, #47
        ("12", "1,2"),
        ("12", "1 2"),
        ("1,2", "1.2"),
        ("123", "1,23"),
        ("1,000", "1,00"),
        ("(1,2)", "(2,1)"),
        ("[1,2]", "(1,2)"),
        ("2.5", "21/2"),
        ("1/3", "0.33"),
        ("42", "42.0000001"),
        ("5", "0.05"),
        ("5", "-5"),
        ("5", "5 or 6"),
        ("18", "18 hundred"),
        ("9", "3 squared"),
        ("1", r"\frac{1}{0}"),
        ("dog", "god"),  # no product of letters
        ("Monday", "Sunday"),
        ("A", "B"),
        ("even", "2"),
        ("x>2", "x<2"),
        ("2", "2x"),
        ("5", ""),
        ("", ""),
        ("$", "$"),
        ("12", "12:30"),
        ("3", "{3"),
    ],
)
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


@pytest.mark.parametrize(
    "answer",
    [
        "9^{9^{9^{9}}}",
        "9^9^9^9",
        "9^{{9^{9}}}",
        "(9)^{(9)^{9}}",
        "9^{9!}",
        "((99^9)!)",
        "9^{999999999}",
        "(x+1)^{100000}",
        "100000000!",
        "(1000!)!",
        r"\binom{1000000000}{100000000}",
        r"\sum_{i=1}^{1000000000} i",
        "(" * 500 + "1" + ")" * 500,
        "1+" * 5000 + "1",
        "x^" * 60 + "x",
        "\\" * 3000,
        "{" * 3000,
        "1" * 100_000,
        "1," * 5000,
        "\x00",
        "\ud800",
        "x" * 50_000,
        "5" + " " * 300_000 + "x",  # patterns would take minutes
    ],
)
def test_what_no_algebra_system_survives_is_unequal_at_once(answer, monkeypatch):
    def refuse(gold, answer):
        raise AssertionError("Math-Verify was asked")

    if not answer.startswith(("\x00", "\ud800")):
        monkeypatch.setattr(answers._VERIFIER, "is_equal", refuse)
    assert not is_same_answer(answer, "42")
    assert not is_same_answer(answer, r"\sqrt{2}+1")


def test_an_answer_that_uses_up_the_limits_is_unequal_and_the_next_is_judged(monkeypatch):
    verifier = answers._Verifier()
    monkeypatch.setattr(verifier, "_CPU_SECONDS", 0)  # a second is left, and it is not enough
    try:
        assert not verifier.is_equal("42", "9^{9^{9^{9}}}")
        monkeypatch.undo()  # on a busy machine a second may not be enough for any
        assert verifier.is_equal("x+1", "1+x")
    finally:
        verifier.close()


def test_a_fork_and_threads_have_answers_of_their_own():
    assert is_same_answer("x+2", "2+x")
    pid = os.fork()
    if pid == 0:
        os._exit(not is_same_answer("x+3", "3+x"))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    right = []
    threads = [
        threading.Thread(target=lambda n=n: right.append(is_same_answer(f"y+{n}", f"{n}+y")))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 8


def test_a_missing_library_is_named_and_no_answer_is_wrong(monkeypatch):
    verifier = answers._Verifier()
    monkeypatch.setattr(answers.sys, "path", [])
    with pytest.raises(MathVerifyError, match=r"math_verify.*\n    fix: pip install"):
        verifier.is_equal("x", "y")


def test_an_answer_that_nothing_can_equal_is_named():
    assert find_answer_problem(r"\sum_k 2^k+x").startswith("'\\\\sum_k 2^k+x' is no number")
    assert find_answer_problem("$$") == "nothing is left of it without marks"
    fine = ("5", "Monday", r"\sqrt{2}", "(x+1)^2", "e^{x^2}", r"3^{x^{2}}", "2^{1009}", "100x^{99}")
    assert not any(map(find_answer_problem, (*fine, r"\binom{2n}{n}", "1,2")))


@pytest.mark.parametrize(
    ("completion", "gold", "is_right"),
    [
        # Math-Verify, tests/test_open_thoughts.py: boxes that a word or comma joins are one list.
        (r"\boxed{1} and \boxed{2} and \boxed{3}", "1,2,3", True),
        (r"$\boxed{(2, 2)} \quad \text{and} \quad \boxed{(6, 2)}$", "(2,2),(6,2)", True),
        (r"$\boxed{k = 45}$, $\boxed{n = 2}$", "k = 45, n = 2", True),
        (r"\boxed{3} or \boxed{4}", "4", False),
        (r"\boxed{3}. Wait, no: \boxed{4}", "4", True),
        (r"\boxed{4} and again \boxed{4}", "4", True),
        # Chat models: a sentence that says the answer, displayed mathematics, an option.
        ("So the answer is 42, which is even.", "42", True),
        ("So the answer is 42 because 6 * 7 = 42.", "42", True),
        ("Final Answer: The largest $n$ is 34.", "34", True),  # Math-Verify, tests/test_all.py
        ("Hence the final answer is\n\\[\n42\n\\]", "42", True),
        ("The correct answer is (B) 17.", "B", True),
        (r"\boxed{\textbf{(B)}\ 17}", "17", True),
        (r"\boxed{\textbf{(B)}\ 17}", "C", False),
        # MMLU-Pro, whose own `extract_answer` reads `answer is \(?([A-J])\)?`.
        ("The answer is (H) 12 m/s.", "H", True),
        ("The answer is C. 12", "C", True),
        ("<answer>C. 12</answer>", "12", True),
        ("The answer is option D.", "D", True),
        ("The answer is option D.", "E", False),
        ("The answer is J.", "J", True),
        ("<answer>A. Lincoln</answer>", "A. Lincoln", True),
    ],
)
def test_boxes_and_sentences_of_chat_models(completion, gold, is_right):
    assert is_same_answer(extract_answer(completion), gold) is is_right


@pytest.mark.parametrize(
    ("gold", "answer", "is_right"),
    [
        # The rows of a matrix are not its columns.
        (
            r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
            r"\begin{bmatrix}1&2\\3&4\end{bmatrix}",
            1,
        ),
        (
            r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
            r"\begin{pmatrix}1&3\\2&4\end{pmatrix}",
            0,
        ),
        (
            r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
            r"\begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}",
            0,
        ),
        ("32349", "32, 349", 0),  # Math-Verify, tests/test_all.py
        (r"32,\! 349", "32349", 1),
        ("52_8", "52_9", 0),
        ("(1,2)", r"\{1,2\}", 0),
        # Math-Verify, tests/test_all.py: equations of one line.
        ("2x+4y-3=0", r"y=-\frac{1}{2}x+\frac{3}{4}", 1),
        ("y=2x+1", "2x-y+1=0", 1),
        ("y=2x-1", "2x-y+1=0", 0),
        (r"125\textnormal{ miles}", "125", 1),
        (r"\frac{1}{3}\textbf{meters}", "1/3", 1),
        (r"120^{\circ}C", "120", 1),
        (r"\text{12 apples}", "12", 1),
        (r"2.5 \text{ million}", "2500000", 1),
        ("5", "5 million", 0),
        (r"11\sqrt{2}", "11\u221a2", 1),
        ("x^2", "x\u00b2", 1),
        ("7/2", "3\u00bd", 1),
        (r"\emptyset", r"\varnothing", 1),
        (r"x \cdot y", "yx", 1),
        (r"\text{BC}", r"\text{CB}", 0),
    ],
)
def test_answers_as_graders_and_arithmetic_have_them(gold, answer, is_right):
    assert is_same_answer(answer, gold) == bool(is_right)
    assert is_same_answer(gold, answer) == bool(is_right)


def test_towers_of_e_are_unequal_at_once(monkeypatch):
    """e to its own power, four times, has more digits than there is memory."""
    monkeypatch.setattr(answers._VERIFIER, "is_equal", lambda *_: pytest.fail("too large"))
    assert not is_same_answer("e^{e^{e^{e^{e}}}}", "5")


def test_a_killed_process_costs_no_right_answer():
    """A limit ends the process by SIGXCPU or an error of memory, so SIGKILL is from outside."""
    verifier = answers._Verifier()
    try:
        for _ in range(2):
            assert verifier.is_equal("x+1", "1+x")
            os.kill(verifier._process.pid, signal.SIGKILL)
            verifier._process.wait()
    finally:
        verifier.close()


def test_a_fork_does_not_wait_for_a_thread_that_it_does_not_have():
    with answers._VERIFIER._lock:
        pid = os.fork()
        if pid == 0:
            os._exit(not is_same_answer("z+3", "3+z"))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_the_process_starts_again_after_its_file_was_replaced(monkeypatch):
    monkeypatch.setattr("inspect.getsource", lambda _: pytest.fail("read from the disk"))
    verifier = answers._Verifier()
    try:
        assert verifier.is_equal("x+1", "1+x")
    finally:
        verifier.close()


def test_what_the_library_prints_is_no_answer_and_fills_no_pipe(tmp_path, monkeypatch):
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
    verifier = answers._Verifier()
    try:
        assert [verifier.is_equal("x", answer) for answer in ("x", "y", "x")] == [True, False, True]
    finally:
        verifier.close()
