"""Waiting for what does not answer: how often, and for how long."""

from __future__ import annotations

import pytest

from gdpo_tune.core import outages
from gdpo_tune.core.outages import attempts


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Those that were made, in a time in which nothing else takes any."""
    made: list[float] = []
    monkeypatch.setattr(outages.time, "sleep", made.append)
    monkeypatch.setattr(outages.time, "monotonic", lambda: sum(made))
    return made


def test_the_first_attempt_is_made_at_once_however_short_the_patience(pauses: list[float]):
    assert list(attempts(-1.0)) == [0.0]
    assert pauses == []


def test_attempts_follow_at_equal_pauses_within_the_patience(pauses: list[float]):
    assert list(attempts(3.5)) == [0, 1, 2, 3]
    assert list(attempts(5.0, first=2.0)) == [0, 2, 4]


def test_pauses_double_up_to_the_longest(pauses: list[float]):
    assert list(attempts(20.0, longest=5.0)) == [0, 1, 3, 7, 12, 17]
    assert pauses == [1, 2, 4, 5, 5]


def test_an_attempt_that_takes_long_uses_up_the_patience(pauses: list[float]):
    found = []
    for waited in attempts(9.5):
        found.append(waited)
        pauses.append(4.0)  # the attempt itself
    assert found == [0, 5]
