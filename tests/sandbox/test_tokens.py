"""Printed output is compared line by line and token by token, whatever bytes it is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdpo_tune.sandbox import Call, Job, Stream
from gdpo_tune.sandbox.guest.grading import is_same_output
from gdpo_tune.sandbox.local_sandbox import encode_job


@pytest.mark.parametrize(
    ("expected", "printed"),
    [
        ("1 2\n3\n", "1 2\n3"), ("1 2", "1 2\n\n \n"), ("1 2", " 1\t 2 \n"), ("a\nb", "a\r\nb\r\n"),
        ("a\n\nb", "a\n \nb"), ("é ü", "é  ü"), ("\n1", "\n1"),
    ],
)  # fmt: skip
def test_blanks_and_the_end_of_the_output_do_not_matter(expected, printed):
    assert is_same_output(expected.encode(), printed.encode(), 0.0)


@pytest.mark.parametrize(
    ("expected", "printed"),
    [
        ("1", ""), ("1 2", "12"), ("12", "1 2"), ("1 2", "1\n2"), ("1\n2", "1 2"), ("1", "1 1"),
        ("1", "1\n1"), ("a\n\nb", "a\nb"), ("a", "A"), ("1", "1.0"), ("1", "01"), ("1", "+1"),
        ("1", "\n1"), ("1", "\u0661"), ("1", "\xa01"), ("1", "1\0"), ("é", "e\u0301"),
    ],
)  # fmt: skip
def test_other_text_differs(expected, printed):
    assert not is_same_output(expected.encode(), printed.encode(), 0.0)


@pytest.mark.parametrize(
    ("expected", "printed", "tolerance", "same"),
    [
        ("1", "1.0", 1e-6, True),
        ("1", "+1e0", 1e-6, True),
        ("0.5", ".5000004", 1e-6, True),
        ("0.5", ".500002", 1e-6, False),
        # Relative above one, absolute below.
        ("1000000", "1000000.9", 1e-6, True),
        ("1000000", "1000001.1", 1e-6, False),
        ("0", "-0.0000009", 1e-6, True),
        ("0", "-0.0000011", 1e-6, False),
        ("YES 0.5", "YES 0.5000001", 1e-6, True),
        ("YES 0.5", "NO 0.5000001", 1e-6, False),
        ("0.5\n2", "0.5 2", 1e-6, False),
        # What is no finite decimal number is text.
        ("nan", "nan", 1e-6, True),
        ("1", "nan", 1e-6, False),
        ("nan", "1", 1e-6, False),
        ("inf", "1e999", 1e-6, False),
        ("1e999", "2e999", 1e-6, False),
        ("1", "1e999", 1e-6, False),
        ("10", "1_0", 1e-6, False),
        ("16", "0x10", 1e-6, False),
        ("1", "\u0661", 1e-6, False),
        ("1" * 500, "1" * 499 + "2", 0.5, False),
    ],
)
def test_a_tolerance_is_for_decimal_numbers(expected, printed, tolerance, same):
    assert is_same_output(expected.encode(), printed.encode(), tolerance) is same


def test_bytes_that_are_no_text_differ():
    assert not is_same_output(b"1", b"\xff\xfe", 1e-6)
    assert not is_same_output("\ufffd".encode(), b"\xff", 0.0)
    assert not is_same_output(b"1", "\ud800".encode("utf-8", "surrogatepass"), 0.5)


@pytest.mark.parametrize(
    "piece", [b"9", b"9.", b"9e", b"-", b" ", b"9 ", b"9e9 ", b"\r", b"\xff", b"9 \n"]
)
def test_hostile_output_is_compared_in_time_that_grows_with_its_length(piece):
    # Quadratic work on this much would take hours.
    printed = piece * 1_000_000 + b"x"
    for expected in (b"1", b"1 " * 1_000_001, b"1 \n" * 1_000_001, b"1" * 1_000_001):
        assert not is_same_output(expected, printed, 0.5)


lines = st.lists(st.lists(st.from_regex(r"[!-~]{1,5}", fullmatch=True), min_size=1), min_size=1)


@given(lines, st.sampled_from([" ", "  ", "\t"]), st.sampled_from(["\n", " \n", "\r\n"]))
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


@given(
    st.floats(-1e12, 1e12), st.floats(-2, 2), st.sampled_from([1e-9, 1e-6, 1e-3])
)  # fmt: skip
def test_a_number_may_err_by_the_tolerance(number, error, tolerance):
    printed = number + error * tolerance * max(1.0, abs(number))
    same = is_same_output(repr(number).encode(), repr(printed).encode(), tolerance)
    if abs(error) < 0.99:
        assert same
    elif abs(error) > 1.01 and tolerance > 1e-9:
        assert not same


@pytest.mark.parametrize("expected", ["", " ", "\n\n"])
def test_a_test_that_a_program_passes_by_doing_nothing_is_refused(expected):
    with pytest.raises(ValueError, match="prints nothing"):
        Stream("2", expected)


@pytest.mark.parametrize("texts", [("\ud800", "1"), ("1", "\ud800")])
def test_text_that_is_no_unicode_is_refused(texts):
    with pytest.raises(ValueError, match="surrogates"):
        Stream(*texts)


def test_streams_are_not_mixed_with_calls():
    with pytest.raises(ValueError, match="two jobs"):
        Job("", calls=(Call("f", (), 1),), streams=(Stream("", "1"),))


@pytest.mark.parametrize("tolerance", [-1e-9, 1.0, float("nan")])
def test_a_tolerance_is_a_small_share(tolerance):
    with pytest.raises(ValueError, match="tolerance"):
        Stream("", "1", tolerance)


def test_what_is_expected_is_not_sent():
    job = encode_job(0, Job("pass", streams=(Stream("the question", "the answer"),)))
    assert b"the question" in job.request
    assert b"the answer" not in job.request
    assert job.expected == [("the answer", 0.0)]
