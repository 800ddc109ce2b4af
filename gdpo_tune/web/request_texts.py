"""Requests of people, and the history of a sweep, in words."""

from __future__ import annotations

from typing import Any

from gdpo_tune.core.events import RecordedRequest, Request
from gdpo_tune.core.text import format_count
from gdpo_tune.results.summary import list_incidents
from gdpo_tune.web.live_sweep import Snapshot

MOST_LINES = 200
"""Most lines of the log."""
MOST_REQUESTS = 30
"""Most requests that the page lists: the latest."""


def describe_requests(snapshot: Snapshot) -> list[dict[str, Any]]:
    """Return the latest requests with their outcomes, the newest first."""
    requests: list[Request] = [*snapshot.requests, *snapshot.pending]
    return [
        {
            "id": request.id,
            "time": request.asked,
            "author": request.author,
            "action": request.action,
            "trial": request.arguments.get("trial"),
            "text": request.text,
            "outcome": request.outcome if isinstance(request, RecordedRequest) else "pending",
            "reason": request.reason if isinstance(request, RecordedRequest) else "",
        }
        for request in requests[: -MOST_REQUESTS - 1 : -1]
    ]


def list_log(snapshot: Snapshot) -> list[dict[str, Any]]:
    """Return starts and ends of drivers, and incidents, the newest first."""
    lines: list[tuple[float, str, str]] = []
    for session in snapshot.sessions:
        slots = format_count(session["slots"], "slot")
        lines.append((session["started"], "driver", f"the driver started with {slots}"))
        if "finished" in session:
            reason = session.get("ending") or "interrupted"
            lines.append((session["finished"], "driver", f"the driver ended: {reason}"))
    lines += [(i.time, "incident", str(i)) for i in list_incidents(snapshot.sessions)]
    lines.sort(key=lambda line: line[0], reverse=True)
    return [{"time": at, "kind": kind, "text": text} for at, kind, text in lines[:MOST_LINES]]
