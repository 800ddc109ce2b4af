"""The webhook hears how runs end; it may fail, hang or redirect."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from gdpo_tune.clusters import notify
from tests.support.schedule import NIGHTLY, Scene


class Hook(BaseHTTPRequestHandler):
    """A webhook that keeps what it gets."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append(json.loads(body))
        self.send_response(self.server.answer)
        if self.server.answer == 302:
            self.send_header("Location", "/elsewhere")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[HTTPServer]:
    with HTTPServer(("127.0.0.1", 0), Hook) as server:
        server.got, server.answer = [], 200
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("HOOK", f"http://127.0.0.1:{server.server_port}/x?key=secret")
        yield server
        server.shutdown()
        thread.join()


TOLD = NIGHTLY + "notify: {webhook_env: HOOK}\n"


def test_a_webhook_hears_how_runs_end(tmp_path, hook):
    scene = Scene(tmp_path, TOLD)
    scene.tick_at(2)
    assert scene.tick_at(4) == ["ended", "sent"]
    assert scene.tick_at(5) == []
    scene.tick_at(24 * 3 + 12)
    first, skipped = hook.got
    assert first["id"] == "nightly/4"
    assert (first["occasion"], first["run"]) == ("finished", "nightly-20260101T020000Z")
    assert first["text"].startswith("nightly-20260101T020000Z finished. 3 trials, 2 on the front")
    assert (skipped["occasion"], skipped["count"]) == ("skipped", 3)
    assert "3 runs from nightly-20260102T020000Z to nightly-20260104T020000Z" in skipped["text"]


def test_only_wanted_notices_are_sent(tmp_path, hook):
    scene = Scene(tmp_path, NIGHTLY + "notify: {webhook_env: HOOK, on: [failed, stopped]}\n")
    scene.tick_at(2)
    assert scene.tick_at(4) == ["ended"]
    assert hook.got == []


def test_a_webhook_that_fails_is_tried_again_and_delays_nothing(tmp_path, hook):
    hook.answer = 500
    scene = Scene(tmp_path, TOLD)
    scene.tick_at(2)
    assert scene.tick_at(4) == ["ended", "not sent"]
    assert scene.context.events[-1].text == "nightly: HOOK: the webhook answered 500"
    assert scene.tick_at(5) == []  # tried, and known to fail already
    assert len(hook.got) == 2
    hook.answer = 200
    assert scene.tick_at(6) == ["sent"]
    assert {got["id"] for got in hook.got} == {"nightly/4"}


def test_old_notices_are_not_sent(tmp_path, hook):
    hook.answer = 500
    scene = Scene(tmp_path, TOLD)
    scene.tick_at(2)
    scene.tick_at(4)
    hook.answer = 200
    hook.got.clear()
    scene.tick_at(24 + 4.5)
    assert all(got["id"] != "nightly/4" for got in hook.got)


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
    ],
)
def test_why_a_webhook_cannot_be_reached(address, problem):
    result = notify.post_message(address, {})
    assert problem in result
    assert "secret" not in result


def test_a_webhook_that_hangs_is_left_alone(monkeypatch):
    monkeypatch.setattr(notify, "SECONDS", 0.2)
    with HTTPServer(("127.0.0.1", 0), Hook) as server:  # it accepts, and does not answer
        result = notify.post_message(f"http://127.0.0.1:{server.server_port}", {})
    assert "does not answer" in result


def test_a_redirect_of_a_webhook_is_a_failure(hook):
    hook.answer = 302
    assert notify.post_message(os.environ["HOOK"], {}) == "the webhook answered 302"
    assert len(hook.got) == 1


def test_a_webhook_that_answers_byte_by_byte_is_left_alone(monkeypatch):
    monkeypatch.setattr(notify, "SECONDS", 0.5)
    ended = threading.Event()

    def drip(server: socket.socket) -> None:
        with server.accept()[0] as connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\n")
            while not ended.wait(0.1):
                connection.sendall(b"X: y\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=drip, args=[server])
        thread.start()
        began = time.monotonic()
        result = notify.post_message(f"http://127.0.0.1:{server.getsockname()[1]}/", {})
        ended.set()
        thread.join()
    assert "does not answer within 0.5 s" in result
    assert time.monotonic() - began < 3
