"""Calls that end in time or are repeated, and webhooks."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from http.server import HTTPServer

import pytest
from tenacity import RetryError

from gdpo_tune.core import http
from gdpo_tune.core.http import build_retry
from tests.support.clock import count_pauses_as_time
from tests.support.webhooks import Hook


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("", "not set"),
        ("http://127.0.0.1:9/x?key=secret", "does not answer"),
        ("secret", "not the address of a webhook"),
        ("http://me:secret@127.0.0.1:9/x", "it has a user or a password"),
        ("http://[secret", "not the address of a webhook"),
        ("file:///etc/secret", "not the address of a webhook"),
        ("http://127.0.0.1:9/\nsecret", "not the address of a webhook"),
        ("http://xn--/secret", "nothing can be sent to the webhook"),
        ("http://127.0.0.1:9/secret" + "a" * 70_000, "nothing can be sent to the webhook"),
    ],
)
def test_why_a_webhook_cannot_be_reached(address, problem):
    result = http.post_message(address, {})
    assert problem in result
    assert "secret" not in result


def test_a_webhook_that_hangs_is_left_alone(monkeypatch):
    monkeypatch.setattr(http, "WEBHOOK_SECONDS", 0.2)
    with HTTPServer(("127.0.0.1", 0), Hook) as server:  # it accepts, and does not answer
        result = http.post_message(f"http://127.0.0.1:{server.server_port}", {})
    assert "does not answer" in result


def test_a_redirect_of_a_webhook_is_a_failure(hook):
    hook.answer = 302
    assert http.post_message(os.environ["HOOK"], {}) == "the webhook answered 302"
    assert len(hook.got) == 1


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:9", "foo://127.0.0.1:9", "http://a:1:1"])
def test_a_proxy_of_no_use_is_a_problem_and_no_crash(monkeypatch, proxy):
    monkeypatch.setenv("ALL_PROXY", proxy)
    assert http.post_message("http://example.invalid/", {})


def test_an_answer_without_an_end_is_not_read(monkeypatch):
    monkeypatch.setattr(http, "WEBHOOK_SECONDS", 5.0)
    closed = threading.Event()

    def pour(server: socket.socket) -> None:
        with server.accept()[0] as connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            with suppress(OSError):
                while True:
                    connection.sendall(b"x" * 100_000)
            closed.set()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=pour, args=[server], daemon=True).start()
        assert http.post_message(f"http://127.0.0.1:{server.getsockname()[1]}/", {}) == ""
        assert closed.wait(5)


def test_a_webhook_that_answers_byte_by_byte_is_left_alone(monkeypatch):
    monkeypatch.setattr(http, "WEBHOOK_SECONDS", 0.5)
    ended = threading.Event()

    def drip(server: socket.socket) -> None:
        with server.accept()[0] as connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\n")
            for _ in range(100):
                if ended.wait(0.1):
                    return
                connection.sendall(b"X: y\r\n")
            connection.sendall(b"\r\n")  # an answer after all, to one who waited

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=drip, args=[server])
        thread.start()
        result = http.post_message(f"http://127.0.0.1:{server.getsockname()[1]}/", {})
        ended.set()
        thread.join()
    assert "does not answer within 0.5 s" in result


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Those that were made."""
    return count_pauses_as_time(monkeypatch)


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
