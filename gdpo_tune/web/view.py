"""The content of the page, kept as the bytes that are sent: made again only after a change."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from gdpo_tune.analysis.front import Front, build_front
from gdpo_tune.core.events import Request
from gdpo_tune.figures.pairs import draw_pairs
from gdpo_tune.results.steering import Steering
from gdpo_tune.web.live_sweep import LiveSweep, Planner, Snapshot
from gdpo_tune.web.running_curves import draw_running
from gdpo_tune.web.state import build_state, describe_sweep, list_fields

IDLE_SHARE = 30
"""Drawing the front may take one part in this many of the time."""


class View:
    """State and figures of one sweep. Not safe to use from two threads at once."""

    def __init__(
        self,
        sweep: LiveSweep,
        plan: Planner,
        target: str,
        read_clock: Callable[[], float] = time.time,
    ) -> None:
        """Show `sweep`, which `target` names for `Steering`."""
        self._sweep = sweep
        self._plan = plan
        self._target = target
        self._read_clock = read_clock
        self._snapshot: Snapshot | None = None
        self._status: tuple[str, str] | None = None
        self._state = b""
        self._figures: dict[str, bytes] = {}
        self._front: Front | None = None
        self._front_key: object = None
        self._front_due = -float("inf")

    def get_state(self) -> bytes:
        """Return the present state as JSON."""
        snapshot = self._sweep.refresh()
        # A driver on another machine becomes silent as time passes, without any change.
        status = describe_sweep(snapshot, self._read_clock())
        if snapshot is not self._snapshot or status != self._status or self._is_front_due(snapshot):
            self._snapshot, self._status = snapshot, status
            self._update(snapshot)
        return self._state

    def get_figure(self, name: str) -> bytes | None:
        """Return a figure of the latest state, `front` or `running`, as JSON; None if unknown."""
        if self._snapshot is None:
            self.get_state()
        return self._figures.get(name)

    def get_space(self) -> bytes:
        """Return the fields of a form for a configuration as JSON."""
        return _dump(list_fields(self._sweep.refresh().spec))

    def request(self, action: str, arguments: Mapping[str, Any], author: str) -> Request:
        """Leave a request for the driver; raises UsageError if it cannot be carried out."""
        return Steering(self._target).request(action, arguments, author=author)

    def _update(self, snapshot: Snapshot) -> None:
        front = self._refresh_front(snapshot)
        last = snapshot.spec.training.steps
        curves = draw_running(front.objectives, snapshot.records, snapshot.steps, last)
        self._figures["running"] = _dump(curves)
        waiting = snapshot.steering.list_waiting(snapshot.records)
        plan = self._plan(snapshot.spec, snapshot.records, waiting)
        state = build_state(snapshot, front, plan, self._read_clock())
        versions = {name: hash(content) for name, content in self._figures.items()}
        self._state = _dump({**state, "figures": versions})

    def _is_front_due(self, snapshot: Snapshot) -> bool:
        return _list_ended(snapshot) != self._front_key and time.monotonic() >= self._front_due

    def _refresh_front(self, snapshot: Snapshot) -> Front:
        """Return the front of the trials that have ended; it may lag behind a little."""
        if self._front is None or self._is_front_due(snapshot):
            started = time.monotonic()
            objectives = snapshot.spec.list_objectives()
            self._front = build_front(snapshot.records, objectives)
            figure = draw_pairs(self._front, snapshot.spec.constraints)
            drawn = bool(self._front.configurations)
            self._figures["front"] = str(figure.to_json()).encode() if drawn else b"null"
            self._front_key = _list_ended(snapshot)
            now = time.monotonic()
            self._front_due = now + IDLE_SHARE * (now - started)
        return self._front


def _list_ended(snapshot: Snapshot) -> list[tuple[int, str]]:
    return [(r.number, r.state) for r in snapshot.records if r.state not in ("running", "paused")]


def _dump(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
