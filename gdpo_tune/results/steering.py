"""Steering of a running sweep, for the command `steer`, the web page and notebooks.

    steering = Steering("runs/code")
    request = steering.request("stop", {"trial": 7}, author="anna")
    steering.wait(request.id, 10)       # RecordedRequest: what came of it

Actions and their arguments:

    stop    {"trial": 7}
    add     {"params": {"learning_rate": 1e-4}}
    clone   {"trial": 7, "changes": {"learning_rate": 2e-4}}
    trials  {"number": 24}
    budget  {"completions": 100000}     one or more of trials, completions, gpu_hours, hours
    pause   {}
    resume  {}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gdpo_tune.core.requests import RecordedRequest, Request


class Steering:
    """Requests to one sweep."""

    def __init__(self, target: str | Path) -> None:
        """Find the sweep: its directory, its name under `runs`, or its file.

        Raises:
            UsageError: there is no sweep.
        """
        raise NotImplementedError

    @property
    def is_running(self) -> bool:
        """True if a process works on the sweep now."""
        raise NotImplementedError

    @property
    def pause(self) -> RecordedRequest | None:
        """The request that paused the sweep; None if it is not paused."""
        raise NotImplementedError

    def request(
        self, action: str, arguments: Mapping[str, Any], author: str | None = None
    ) -> Request:
        """Check a request and leave it for the driver, which applies it within 5 seconds.

        `author` is by default the user of this process.

        Raises:
            UsageError: it cannot be carried out; the message is one clear line, and a fix.
        """
        raise NotImplementedError

    def find(self, id: str) -> RecordedRequest | None:
        """Return what came of a request; None as long as the driver has not taken it."""
        raise NotImplementedError

    def wait(self, id: str, seconds: float) -> RecordedRequest | None:
        """Wait until the driver has taken a request; None if it has not within the time."""
        raise NotImplementedError

    def list_requests(self) -> list[RecordedRequest]:
        """Return every request that was applied or refused, in order."""
        raise NotImplementedError

    def list_pending(self) -> list[Request]:
        """Return the requests that the driver has not taken yet, in order."""
        raise NotImplementedError
