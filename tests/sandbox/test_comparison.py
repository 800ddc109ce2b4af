import io
import math
import time
from decimal import Decimal
from fractions import Fraction
from functools import partial

import pytest

from gdpo_tune.sandbox.guest import grading
from gdpo_tune.sandbox.guest.grading import CandidateReport, grade_frames, matches
from gdpo_tune.sandbox.guest.protocol import dump, encode, pack_frame, parse


def compare(expected, received):
    return matches(expected, parse(dump(encode(received))))


@pytest.mark.parametrize(
    ("expected", "received"),
    [
        (1, 1), (1, True), (True, 1), (2, 2.0), (2.0, 2), (None, None), ("a", "a"), (b"a", b"a"),
        (0.3, 0.1 + 0.2), (1e-9, 1e-9 * (1 + 1e-12)), (0.0, 1e-16), (0.0, -0.0),
        (math.inf, math.inf), (math.nan, math.nan), (1e308 * 10, math.inf),
        ([1, [2.0]], [1, [2]]), ((1, "x"), (1, "x")), ([], []), (10**400, 10**400),
        ({1, 2}, frozenset({2, 1})), (frozenset({1}), {1}), ({(1, 2), (3, 4)}, {(3, 4), (1, 2)}),
        ({frozenset({1, 2}), frozenset()}, {frozenset(), frozenset({2, 1})}),
        ({0.3}, {0.1 + 0.2}), ({"a": 0.3, 1: [2]}, {1: [2], "a": 0.1 + 0.2}),
        ({(1, "k"): {2}}, {(1, "k"): {2}}), (1 + 2j, 1 + 2j), (2 + 0j, 2),
        (Decimal("1.50"), Decimal("1.5")), (2, Decimal(2)), (Fraction(1, 2), Fraction(2, 4)),
        (0.5, Fraction(1, 2)), (3, Fraction(3, 1)),
    ],
)  # fmt: skip
def test_equal(expected, received):
    assert compare(expected, received)


@pytest.mark.parametrize(
    ("expected", "received"),
    [
        (1, 2), (1, "1"), ("1", 1), (None, 0), (0, None), (False, None), (1, [1]), ([1], 1),
        (1e-9, 0.0), (0.0, 1e-9), (1.0, 1.0 + 1e-6), (3, 2.9999999999999996), (1.5, 10**400),
        (10**400, math.inf), (1.0, math.nan), (0.0, math.nan), (1, math.nan), (math.nan, 1.0),
        (math.inf, -math.inf), (math.inf, 10**400), (1.0, "1.0"), (1.0, None),
        ([1, 2], (1, 2)), ((1, 2), [1, 2]), ([1, 2], [1]), ([1], [1, 2]), ([1], {1}), ({1}, [1]),
        ({1, 2}, {1, 3}), ({1, 2}, {1}), ({}, []), ([], {}), ({1: 2}, {1: 3}), ({1: 2}, {2: 2}),
        ({"a": 1}, {"a": 1, "b": 2}), (set(), {}), ("a", b"a"), (1, object()), ([1], [object()]),
        (1j, 2j), (0.5, Fraction(1, 3)), (Fraction(1, 2), 0.25), (2, Fraction(1, 2)),
    ],
)  # fmt: skip
def test_different(expected, received):
    assert not compare(expected, received)


@pytest.mark.parametrize(
    ("expected", "forged"),
    [
        ({1, 2}, b'{"set":[1,1]}'), ({1: 2, 3: 4}, b'{"dict":[[1,2],[1,2]]}'),
        ({1, True + 1}, b'{"set":[1,true]}'), (7, b'{"opaque":"int"}'), (7, b'{"nothing":7}'),
        ([7], b'{"list":[7]}'),
    ],
)  # fmt: skip
def test_a_forged_value_does_not_match(expected, forged):
    assert not matches(expected, parse(forged))


@pytest.mark.parametrize(
    ("expected", "forged"),
    [
        ((1,), b'{"tuple":7}'), ({1}, b'{"set":"x"}'), ({1: 1}, b'{"dict":[1]}'),
        (7, b'{"int":"zz"}'), (0.5, b'{"fraction":[1,0]}'), (7, b'{"fraction":[1,2,3]}'),
        (7, b'{"fraction":["1",2]}'), (7, b'{"complex":[{"set":[]},0]}'),
        (7, b'{"timedelta":"abc"}'),
    ],
)  # fmt: skip
def test_a_forged_payload_raises_what_its_reader_expects(expected, forged):
    with pytest.raises((ValueError, TypeError, ArithmeticError)):
        matches(expected, parse(forged))


def test_foreign_keys_that_collide_do_not_stall():
    # Multiples of 2^61 - 1 all have the hash 0: a table of these takes minutes to build.
    colliding = [i * (2**61 - 1) for i in range(1, 30_000)]
    received = {"set": [encode(i) for i in colliding]}
    nested = {"set": [{"frozenset": received["set"]}]}
    started = time.process_time()
    assert not matches(set(range(29_999)), parse(dump(received)))
    assert not matches({frozenset({1})}, parse(dump(nested)))
    assert not matches({1: 1}, parse(dump({"dict": [[k, 1] for k in received["set"]]})))
    for number in ("complex", "fraction"):
        with pytest.raises(TypeError, match="number"):
            matches(7, parse(dump({number: [received, 1]})))
    # Not a measurement of speed: the attack takes some hundred times longer.
    assert time.process_time() - started < 5


def test_a_comparison_that_takes_too_long_ends(monkeypatch):
    # Every element is within the tolerance of one that is found by a search alone.
    expected = {1.0 + i for i in range(1000)}
    received = {value * (1 + 1e-12) for value in expected}
    frame = pack_frame(dump(["value", encode(received)]))

    def grade():
        report = CandidateReport()
        rule = partial(grading.grade_value, rule="exact")
        grade_frames(io.BytesIO(frame).read, [expected], len(frame), report, rule)
        return report.verdicts, report.stop

    monkeypatch.setattr(grading, "COMPARISON_SECONDS", 60.0)  # under any load
    assert grade() == (["passed"], None)
    monkeypatch.setattr(grading, "COMPARISON_SECONDS", 0.001)
    assert grade() == ([], "overload")
