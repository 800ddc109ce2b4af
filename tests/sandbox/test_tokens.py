"""Printed output is compared line by line and token by token, whatever bytes it is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdpo_tune.sandbox import Job, Stream
from gdpo_tune.sandbox.guest.grading import is_same_output
from gdpo_tune.sandbox.local_sandbox import encode_job
from tests.support.tables import read_sourced


@pytest.mark.parametrize(
    ("expected", "printed", "tolerance", "same"), read_sourced("printed", "printed")
)
def test_printed_output_is_compared_by_tokens(expected, printed, tolerance, same):
    assert is_same_output(expected.encode(), printed.encode(), tolerance) is same


def test_bytes_that_are_no_text_differ():
    assert not is_same_output(b"1", b"\xff\xfe", 1e-6)
    assert not is_same_output("\ufffd".encode(), b"\xff", 0.0)
    assert not is_same_output(b"1", "\ud800".encode("utf-8", "surrogatepass"), 0.5)
    assert not is_same_output(b"1" * 500, b"1" * 499 + b"2", 0.5)


@pytest.mark.parametrize(
    "piece", [b"9", b"9.", b"9e", b"-", b" ", b"9 ", b"9e9 ", b"\r", b"\xff", b"9 \n"]
)
def test_hostile_output_is_compared_in_time_that_grows_with_its_length(piece):
    # Quadratic work on this much would take hours.
    printed = piece * 1_000_000 + b"x"
    for expected in (b"1", b"1 " * 1_000_001, b"1 \n" * 1_000_001, b"1" * 1_000_001):
        assert not is_same_output(expected, printed, 0.5)


TOKENS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=5)
LINES = st.lists(st.lists(TOKENS, min_size=1, max_size=4), min_size=1, max_size=4)


@given(LINES, st.sampled_from([" ", "  ", "\t"]), st.sampled_from(["\n", " \n", "\r\n"]))
def test_output_is_what_its_tokens_are(tokens, blank, end):
    expected = "\n".join(" ".join(line) for line in tokens)
    printed = end.join(blank.join(line) for line in tokens) + end
    assert is_same_output(expected.encode(), printed.encode(), 0.0)
    assert not is_same_output(expected.encode(), printed.encode() + b"x", 0.0)


@given(st.binary(), st.binary(), st.sampled_from([0.0, 1e-6]))
def test_bytes_are_the_same_when_their_tokens_are(expected, printed, tolerance):
    def tokens(data):
        return [line.split() for line in data.rstrip().split(b"\n")]

    same = is_same_output(expected, printed, tolerance)
    if tolerance:
        assert same or tokens(expected) != tokens(printed)
    else:
        assert same == (tokens(expected) == tokens(printed))


@given(st.floats(-1e12, 1e12), st.floats(-2, 2), st.sampled_from([1e-9, 1e-6, 1e-3]))
def test_a_number_may_err_by_the_tolerance(number, error, tolerance):
    printed = number + error * tolerance * max(1.0, abs(number))
    same = is_same_output(repr(number).encode(), repr(printed).encode(), tolerance)
    if abs(error) < 0.99:
        assert same
    elif abs(error) > 1.01 and tolerance > 1e-9:
        assert not same


def test_what_is_expected_is_not_sent():
    job = encode_job(0, Job("pass", streams=(Stream("the question", "the answer"),)))
    assert b"the question" in job.request
    assert b"the answer" not in job.request
    assert job.expected == [("the answer", 0.0)]
