"""A webhook on this machine that keeps what it gets."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest


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
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv("HOOK", f"http://127.0.0.1:{server.server_port}/x?key=secret")
        yield server
        server.shutdown()
        thread.join()
