"""The head of a cluster that was joined: who notices that it is gone, and when."""

from __future__ import annotations

import socket

import pytest

from gdpo_tune.tuning.ray import head
from gdpo_tune.tuning.ray.cluster import head_is_there
from gdpo_tune.tuning.ray.head import HeadWatch


class Silent:
    """A head that answers until it does not, and a clock."""

    def __init__(self) -> None:
        self.now, self.there, self.left = 100.0, True, 0
        self.watch = HeadWatch(lambda: self.there, self.leave, lambda: self.now)

    def leave(self) -> None:
        self.left += 1

    def after(self, seconds: float) -> HeadWatch:
        self.now += seconds
        self.watch.ask()
        return self.watch


def test_a_head_is_silent_and_then_lost_and_then_somebody_has_to_leave():
    found = Silent()
    assert not found.after(1000.0).is_silent()
    found.there = False
    assert not found.after(2.0).is_silent()
    assert found.after(5.0).is_silent()
    assert not found.watch.is_lost()
    assert found.after(head.SILENT_SECONDS).is_lost()
    assert found.left == 0
    found.after(head.LEAVE_SECONDS)
    assert found.left == 1


def test_a_head_that_answers_again_was_never_lost():
    found = Silent()
    found.there = False
    found.after(head.SILENT_SECONDS - 1)
    found.there = True
    assert not found.after(2.0).is_silent()


@pytest.mark.parametrize("known", [True, False])
def test_a_silent_head_is_not_asked_through_ray(known: bool):
    found = Silent()
    asked = list[bool]()

    def is_known() -> bool:
        asked.append(known)
        return known

    assert head_is_there(found.watch, is_known) is known
    found.there = False
    assert head_is_there(found.after(head.SILENT_SECONDS), is_known)
    assert not head_is_there(found.after(1.0), is_known)
    assert asked == [known]


def test_who_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert head.listens(address)
    assert not head.listens(address)
