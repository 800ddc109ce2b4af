"""Waiting for what does not answer: how often, and for how long."""

from __future__ import annotations

import time

import pytest
from tenacity import RetryError

from gdpo_tune.core.http import build_retry


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Those that were made, in a time in which nothing else takes any."""
    made: list[float] = []
    monkeypatch.setattr(time, "sleep", made.append)
    monkeypatch.setattr(time, "monotonic", lambda: sum(made))
    return made


def attempts(pauses: list[float], taking: float = 0.0, **options: float) -> list[float]:
    """When each attempt began, of a call that always fails after so many seconds."""
    began: list[float] = []

    def fail() -> None:
        began.append(sum(pauses))
        if taking:
            pauses.append(taking)
        raise OSError("no route")

    with pytest.raises(RetryError):
        build_retry(**options)(fail)
    return began


def test_the_first_attempt_is_made_at_once_however_short_the_patience(pauses: list[float]):
    assert attempts(pauses, patience=-1.0) == [0.0]
    assert pauses == []


def test_attempts_follow_at_equal_pauses_within_the_patience(pauses: list[float]):
    assert attempts(pauses, patience=3.5) == [0, 1, 2, 3]
    pauses.clear()
    assert attempts(pauses, patience=5.0, first=2.0) == [0, 2, 4]


def test_pauses_double_up_to_the_longest(pauses: list[float]):
    assert attempts(pauses, patience=20.0, longest=5.0) == [0, 1, 3, 7, 12, 17]
    assert pauses == [1, 2, 4, 5, 5]


def test_an_attempt_that_takes_long_uses_up_the_patience(pauses: list[float]):
    assert attempts(pauses, taking=4.0, patience=9.5) == [0, 5]


def test_an_interruption_is_not_waited_out(pauses: list[float]):
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_retry(600.0)(interrupt)
    assert pauses == []
