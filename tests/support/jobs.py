"""A dashboard that knows its version, and a fake client of jobs."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest

from gdpo_tune.core import addresses


class Dashboard(BaseHTTPRequestHandler):
    """Answers `/api/version`, to requests with the right token if the server has one."""

    def do_GET(self) -> None:
        token, sent = self.server.token, self.headers.get("Authorization")
        code = 200 if not token or sent == f"Bearer {token}" else 401 if not sent else 403
        self.send_response(code)
        self.end_headers()
        self.wfile.write(self.server.says)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serve_dashboard() -> Iterator[HTTPServer]:
    """Serve a dashboard with `url`, `token` (empty: none is required) and the response `says`."""
    with HTTPServer(("127.0.0.1", 0), Dashboard) as server:
        server.token, server.says = "", json.dumps({"ray_version": "2.60.0"}).encode()
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        server.url = f"http://127.0.0.1:{server.server_port}"
        yield server
        server.shutdown()
        thread.join()


def hide_tokens(monkeypatch: pytest.MonkeyPatch, home: object) -> None:
    monkeypatch.setenv("HOME", str(home))
    for name in (
        addresses.RAY_AUTH_MODE,
        addresses.RAY_TOKEN,
        addresses.RAY_TOKEN_PATH,
        addresses.RAY_ADDRESS,
    ):
        monkeypatch.delenv(name, raising=False)


class Client:
    """A fake of Ray's client of jobs."""

    def __init__(self) -> None:
        self.jobs: dict[str, SimpleNamespace] = {}
        self.submitted: list[dict[str, object]] = []
        self.headers: dict[str, str] = {}
        self.logs: list[list[str]] = []
        """Parts of the log for each call; an empty part breaks the connection."""

    def submit_job(self, *, submission_id: str, **fields: object) -> None:
        if submission_id in self.jobs:
            raise RuntimeError(
                "Request failed with status code 500: ... ValueError: Job with submission_id "
                f"{submission_id} already exists. Please use a different submission_id."
            )
        self.submitted.append({"submission_id": submission_id, **fields})
        self.jobs[submission_id] = SimpleNamespace(
            submission_id=submission_id,
            metadata=fields.get("metadata"),
            status="RUNNING",
            driver_exit_code=None,
            message="Job is currently running.",
        )

    def list_jobs(self) -> list[SimpleNamespace]:
        return list(self.jobs.values())

    def get_job_info(self, name: str) -> SimpleNamespace:
        if name not in self.jobs:
            raise RuntimeError(f"Request failed with status code 404: Job {name} does not exist.")
        return self.jobs[name]

    async def tail_job_logs(self, name: str) -> AsyncIterator[str]:
        for part in self.logs.pop(0):
            if not part:
                raise RuntimeError("WebSocket connection closed unexpectedly with close code 1006")
            yield part

    def end_job(self, name: str, status: str, code: int | None) -> None:
        self.jobs[name].status, self.jobs[name].driver_exit_code = status, code

    def stop_job(self, name: str) -> bool:
        self.jobs[name].status = "STOPPED"
        return True
