"""The sender delivers everything once the server takes it, and delays nothing until then."""

import contextlib
import threading

import pytest

from gdpo_tune.core.events import TrackingState
from gdpo_tune.tracking import mlflow_sink as module
from gdpo_tune.tracking.mlflow_sink import Sender
from gdpo_tune.tracking.spool import MessageRefused, ServerUnavailable, Spool

LONG = 30.0


class Writer:
    """Takes messages, unless `answer` raises for them."""

    def __init__(self, answer=lambda messages: []):
        self.answer = answer
        self.received = []
        self.attempts = 0
        self.resets = 0
        self.deletions = 0

    def deliver(self, messages):
        self.attempts += 1
        left = self.answer(messages)
        self.received += [message for message in messages if message not in left]
        return left

    def reset(self):
        self.resets += 1

    def delete_duplicates(self):
        self.deletions += 1


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


def start(spool, writer):
    sender = Sender(spool, writer, interval=0.001)
    sender.start()
    return sender


def test_everything_is_delivered_in_order_and_once(spool):
    writer = Writer()
    first = put(spool, 3)
    sender = start(spool, writer)
    second = put(spool, 3, late=True)
    assert sender.close(LONG) == 0
    assert writer.received == [*first, *second]
    assert writer.deletions == 1
    assert str(sender.get_state()) == "MLflow: up to date"


def test_the_writer_connects_once_even_with_nothing_to_deliver(spool):
    writer = Writer()
    assert start(spool, writer).close(LONG) == 0
    assert (writer.attempts, writer.received) == (1, [])


def test_close_does_not_wait_for_a_server_if_there_is_nothing_to_deliver(spool):
    def answer(messages):
        raise ServerUnavailable("nobody there")

    sender = start(spool, Writer(answer))
    sender.close(LONG)
    assert not sender._thread.is_alive()
    assert sender.problem == "nobody there"


def test_a_server_that_was_unavailable_gets_everything_later(spool):
    back = threading.Event()
    tried = threading.Semaphore(0)

    def answer(messages):
        tried.release()
        if not back.is_set():
            raise ServerUnavailable("nobody there")
        return []

    writer = Writer(answer)
    sender = start(spool, writer)
    messages = put(spool, 5)
    for _ in range(3):
        assert tried.acquire(timeout=LONG)
    assert sender.problem == "nobody there"
    assert writer.resets > 0
    assert sender.get_state() == TrackingState("away", 5, "nobody there")
    assert "5 updates are kept and will be sent: nobody there" in str(sender.get_state())
    back.set()
    assert sender.close(LONG) == 0
    assert writer.received == messages
    assert sender.problem == ""


def test_close_returns_how_much_is_left(spool):
    def answer(messages):
        raise ServerUnavailable("nobody there")

    put(spool, 7)
    sender = start(spool, Writer(answer))
    assert sender.close(0.05) == 7
    assert sender.problem == "nobody there"
    assert spool.count_pending() == 7


def test_the_writer_is_reset_before_a_refusal_counts(spool):
    writer = Writer()

    def answer(messages):
        if writer.resets == 0:
            raise MessageRefused("that run was deleted")
        return []

    writer.answer = answer
    messages = put(spool, 3)
    sender = start(spool, writer)
    assert sender.close(LONG) == 0
    assert writer.received == messages
    assert sender.refused == 0


def test_a_refused_message_does_not_delay_the_others(spool):
    def answer(messages):
        if any(message["run"] == "1" for message in messages):
            raise MessageRefused("never")
        return []

    writer = Writer(answer)
    messages = put(spool, 3)
    sender = start(spool, writer)
    assert sender.close(LONG) == 0
    assert writer.received == [messages[0], messages[2]]
    assert sender.refused == 1
    assert '"never"' in spool.refused_path.read_text()


@pytest.mark.parametrize("separate", [{"artifact": {"name": "a", "text": "b"}}, {"models": {}}])
def test_a_message_that_cannot_be_stored_delays_nothing_and_is_tried_again(spool, separate):
    room = threading.Event()

    def answer(messages):
        return [] if room.is_set() else [m for m in messages if separate.keys() & m.keys()]

    writer = Writer(answer)
    artifact = {"run": "sweep", **separate}
    spool.put(artifact)
    messages = put(spool, 2)
    sender = start(spool, writer)
    assert sender.close(0.05) == 1
    assert writer.received == messages
    assert sender.get_state() == TrackingState("away", 1, module.LEFTOVER)

    room.set()
    with contextlib.closing(Spool(spool.path, "here")) as reopened:
        assert start(reopened, writer).close(LONG) == 0
    assert writer.received == [*messages, artifact]


def test_a_backlog_of_more_than_a_batch_is_catching_up(spool, monkeypatch):
    monkeypatch.setattr("gdpo_tune.tracking.spool.BATCH_BYTES", 1)
    monkeypatch.setattr(module, "BATCH_BYTES", 1)
    seen = []

    def answer(messages):
        seen.append(sender.get_state().kind)
        return []

    put(spool, 3)
    sender = Sender(spool, Writer(answer), interval=0.001)
    sender.start()
    assert sender.close(LONG) == 0
    assert seen == ["up to date", "catching up", "catching up"]


def test_a_deletion_of_duplicates_that_fails_is_tried_again(spool):
    class Failing(Writer):
        def delete_duplicates(self):
            super().delete_duplicates()
            if self.deletions == 1:
                raise ServerUnavailable("hung again")

    writer = Failing()
    put(spool, 1)
    assert start(spool, writer).close(LONG) == 0
    assert writer.resets == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_sender_that_crashes_loses_nothing_and_reports_it(spool):
    def answer(messages):
        raise ZeroDivisionError

    put(spool, 2)
    sender = start(spool, Writer(answer))
    assert sender.close(LONG) == 2
    assert "crashed" in sender.problem
