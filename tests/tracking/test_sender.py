"""The sender delivers everything once the other side lets it, and holds nobody up until then."""

import contextlib
import threading

import pytest

from gdpo_tune.core.events import TrackingState
from gdpo_tune.tracking import sender as module
from gdpo_tune.tracking.sender import Away, Refused, Sender
from gdpo_tune.tracking.spool import Spool

LONG = 30.0


class Receiver:
    """Takes messages, unless `answer` raises for them."""

    def __init__(self, answer=lambda messages: []):
        self.answer = answer
        self.got = []
        self.attempts = 0
        self.forgotten = 0
        self.settled = 0

    def deliver(self, messages):
        self.attempts += 1
        left = self.answer(messages)
        self.got += [message for message in messages if message not in left]
        return left

    def forget(self):
        self.forgotten += 1

    def settle(self):
        self.settled += 1


@pytest.fixture
def spool(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FIRST_DELAY", 0.001)
    monkeypatch.setattr(module, "CLOSING_DELAY", 0.001)
    with contextlib.closing(Spool(tmp_path / "spool.jsonl", "here")) as spool:
        yield spool


def put(spool, count, **more):
    messages = [{"run": str(i), **more} for i in range(count)]
    for message in messages:
        spool.put(message)
    return messages


def started(spool, receiver):
    sender = Sender(spool, receiver, interval=0.001)
    sender.start()
    return sender


def test_everything_is_delivered_in_order_and_once(spool):
    receiver = Receiver()
    first = put(spool, 3)
    sender = started(spool, receiver)
    second = put(spool, 3, late=True)
    assert sender.close(LONG) == 0
    assert receiver.got == [*first, *second]
    assert receiver.settled == 1
    assert str(sender.state()) == "MLflow: up to date"


def test_a_receiver_is_met_once_even_with_nothing_to_deliver(spool):
    receiver = Receiver()
    assert started(spool, receiver).close(LONG) == 0
    assert (receiver.attempts, receiver.got) == (1, [])


def test_nobody_waits_for_a_receiver_that_is_away_with_nothing_to_deliver(spool):
    def answer(messages):
        raise Away("nobody there")

    sender = started(spool, Receiver(answer))
    sender.close(LONG)
    assert not sender._thread.is_alive()
    assert sender.problem == "nobody there"


def test_a_receiver_that_is_away_gets_everything_when_it_is_back(spool):
    back = threading.Event()
    tried = threading.Semaphore(0)

    def answer(messages):
        tried.release()
        if not back.is_set():
            raise Away("nobody there")
        return []

    receiver = Receiver(answer)
    sender = started(spool, receiver)
    messages = put(spool, 5)
    for _ in range(3):
        assert tried.acquire(timeout=LONG)
    assert sender.problem == "nobody there"
    assert receiver.forgotten > 0
    assert sender.state() == TrackingState("away", 5, "nobody there")
    assert "5 updates are kept and will be sent: nobody there" in str(sender.state())
    back.set()
    assert sender.close(LONG) == 0
    assert receiver.got == messages
    assert sender.problem == ""


def test_close_tells_how_much_is_left(spool):
    def answer(messages):
        raise Away("nobody there")

    put(spool, 7)
    sender = started(spool, Receiver(answer))
    assert sender.close(0.05) == 7
    assert sender.problem == "nobody there"
    assert spool.pending() == 7


def test_a_stale_memory_is_cleared_before_a_refusal_counts(spool):
    receiver = Receiver()

    def answer(messages):
        if receiver.forgotten == 0:
            raise Refused("that run was deleted")
        return []

    receiver.answer = answer
    messages = put(spool, 3)
    sender = started(spool, receiver)
    assert sender.close(LONG) == 0
    assert receiver.got == messages
    assert sender.refused == 0


def test_what_is_refused_does_not_hold_up_the_others(spool):
    def answer(messages):
        if any(message["run"] == "1" for message in messages):
            raise Refused("never")
        return []

    receiver = Receiver(answer)
    messages = put(spool, 3)
    sender = started(spool, receiver)
    assert sender.close(LONG) == 0
    assert receiver.got == [messages[0], messages[2]]
    assert sender.refused == 1
    assert '"never"' in spool.refused_path.read_text()


@pytest.mark.parametrize("apart", [{"artifact": {"name": "a", "text": "b"}}, {"models": {}}])
def test_what_finds_no_place_holds_up_nothing_and_is_tried_again(spool, apart):
    room = threading.Event()

    def answer(messages):
        return [] if room.is_set() else [m for m in messages if apart.keys() & m.keys()]

    receiver = Receiver(answer)
    artifact = {"run": "sweep", **apart}
    spool.put(artifact)
    messages = put(spool, 2)
    sender = started(spool, receiver)
    assert sender.close(0.05) == 1
    assert receiver.got == messages
    assert sender.state() == TrackingState("away", 1, module.UNPLACED)

    room.set()
    with contextlib.closing(Spool(spool.path, "here")) as reopened:
        assert started(reopened, receiver).close(LONG) == 0
    assert receiver.got == [*messages, artifact]


def test_a_backlog_of_more_than_a_batch_is_being_caught_up_with(spool, monkeypatch):
    monkeypatch.setattr("gdpo_tune.tracking.spool.BATCH_BYTES", 1)
    monkeypatch.setattr(module, "BATCH_BYTES", 1)
    seen = []

    def answer(messages):
        seen.append(sender.state().kind)
        return []

    put(spool, 3)
    sender = Sender(spool, Receiver(answer), interval=0.001)
    sender.start()
    assert sender.close(LONG) == 0
    assert seen == ["up to date", "catching up", "catching up"]


def test_a_settlement_that_fails_is_tried_again(spool):
    class Unsettled(Receiver):
        def settle(self):
            super().settle()
            if self.settled == 1:
                raise Away("hung again")

    receiver = Unsettled()
    put(spool, 1)
    assert started(spool, receiver).close(LONG) == 0
    assert receiver.forgotten == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_sender_that_breaks_loses_nothing_and_says_so(spool):
    def answer(messages):
        raise ZeroDivisionError

    put(spool, 2)
    sender = started(spool, Receiver(answer))
    assert sender.close(LONG) == 2
    assert "broke" in sender.problem
