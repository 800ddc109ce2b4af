"""Calls that end in time or are repeated, and webhooks."""

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
from tests.support.tables import cases
from tests.support.webhooks import Hook


@cases("core", "webhook problems")
def test_why_a_webhook_cannot_be_reached(address, problem):
    result = http.post_message(address.replace("<long>", "a" * 70_000), {})
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
def pauses(monkeypatch):
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


@pytest.mark.parametrize(
    ("options", "began", "made"),
    [
        ({"patience": -1.0}, [0.0], []),
        ({"patience": 3.5}, [0, 1, 2, 3], [1, 1, 1]),
        ({"patience": 5.0, "first": 2.0}, [0, 2, 4], [2, 2]),
        ({"patience": 20.0, "longest": 5.0}, [0, 1, 3, 7, 12, 17], [1, 2, 4, 5, 5]),
        ({"patience": 9.5, "taking": 4.0}, [0, 5], [4, 1, 4]),  # a call may use up the patience
    ],
)
def test_attempts_follow_at_pauses_within_the_patience(pauses, options, began, made):
    assert attempts(pauses, **options) == began
    assert pauses == made


def test_an_interruption_is_not_waited_out(pauses):
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_retry(600.0)(interrupt)
    assert pauses == []
