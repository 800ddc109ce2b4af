"""A server on this machine with the part of OpenAI's API that a judge uses.

Its score is the last digit in the last line of what it reads, without the request for JSON.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKENS = {"prompt_tokens": 30, "completion_tokens": 7}


class JudgeServer(ThreadingHTTPServer):
    """The server's state; `begin` and `end` let it live and die at one address."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler, bind_and_activate=False)
        self.allow_reuse_address = True
        self.port = 0
        self.delay = 0.0
        self.first = threading.Barrier(1)
        """Its parties, the first requests, get no answer until all of them are here."""
        self.answers: Counter[str] = Counter()
        """Text -> how often it got an answer."""
        self.requests: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        """Headers with a key."""
        self.statuses: dict[int, int] = {}
        """Number of a request, from 1 on -> its status in place of an answer."""
        self.said: dict[str, str] = {}
        """Text that a message ends with -> the answer in place of a score."""
        self.broken: dict[str, bytes] = {}
        """Text -> the body in place of an answer."""
        self.most = 10**9
        """Answers after which it answers no more."""
        self.released = threading.Event()
        """Set to let all calls end that get no answer."""
        self.lock = threading.Lock()
        self.open = self.most_open = 0
        self.begin()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def begin(self) -> None:
        if self.port:
            self.socket = type(self.socket)(self.address_family, self.socket_type)
        self.is_alive = True
        self.server_address = ("127.0.0.1", self.port)
        self.server_bind()
        self.server_activate()
        self.port = self.server_port
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def end(self) -> None:
        self.is_alive = False
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: JudgeServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][0]["content"].rpartition("\n\nAnswer with JSON alone")[0]
        with server.lock:
            server.requests.append(body)
            server.keys.add(self.headers["Authorization"])
            number = len(server.requests)
            status = server.statuses.get(number, 200)
            server.open += 1
            server.most_open = max(server.most_open, server.open)
        if number <= server.first.parties:
            server.first.wait(60)
        time.sleep(server.delay)
        with server.lock:
            server.open -= 1
            is_held = status == 200 and server.answers.total() >= server.most
            server.answers[text] += status == 200 and not is_held and server.is_alive
        self.close_connection = not server.is_alive  # a connection outlives its listener
        if self.close_connection:
            return
        if is_held:
            server.released.wait()
        found = re.findall("[0-9]", text.rpartition("\n")[2])
        score = json.dumps({"score": int(found[-1]) if found else 0})
        said = next((said for end, said in server.said.items() if text.endswith(end)), score)
        content = {
            "id": "1",
            "object": "chat.completion",
            "created": 1,
            "model": body["model"],
            "choices": [
                {
                    "index": 0,
                    "finish_reason": "stop",
                    "message": {"role": "assistant", "content": said},
                }
            ],
            "usage": TOKENS | {"total_tokens": 37},
        }
        if status != 200:
            content = {"error": {"message": f"no {self.headers['Authorization']}"}}
        answer = server.broken.get(text, json.dumps(content).encode())
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        with suppress(ConnectionError):  # nobody waits any more
            self.wfile.write(answer)
