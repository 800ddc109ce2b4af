"""State of a steered sweep: a pure fold over the requests in its ledger.

So a restart and a replay of the same requests give the same sweep.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gdpo_tune.core.events import RecordedRequest, RequestEffect, Setting
from gdpo_tune.core.trials import Params, TrialRecord
from gdpo_tune.spec import SweepSpec

BUDGET = "budget."
"""Prefix of the settings of `search.budget`; the others are of `search`."""


@dataclass(frozen=True)
class SteeringState:
    """Effects of all recorded requests."""

    stopped: Mapping[int, str] = field(default_factory=dict[int, str])
    """Number of a trial that has to end -> the reason."""
    added: Mapping[str, Params] = field(default_factory=dict[str, Params])
    """Id of a request -> the configuration that it adds."""
    pause: RecordedRequest | None = None
    """The request that paused the sweep; None if it is not paused."""
    pauses: tuple[tuple[float, float], ...] = ()
    """Start and end of each pause in Unix seconds; the end of one that lasts is infinite."""

    def list_waiting(self, records: Iterable[TrialRecord]) -> list[tuple[str, Params]]:
        """Return the added configurations that no trial has yet, each with its request's id."""
        if not self.added:
            return []
        started = {record.request for record in records}
        return [(id, point) for id, point in self.added.items() if id not in started]


def fold_requests(requests: Sequence[RecordedRequest]) -> SteeringState:
    """Return what requests, in order, have asked for."""
    stopped, added = dict[int, str](), dict[str, Params]()
    pause: RecordedRequest | None = None
    pauses: list[tuple[float, float]] = []
    for request in requests:
        effect = request.effect
        if effect.stop is not None:
            stopped[effect.stop] = f"stopped by {request.author}"
        if effect.point is not None:
            added[request.id] = effect.point
        if effect.paused:
            pause = request
        elif effect.paused is not None and pause is not None:
            pauses.append((pause.applied, request.applied))
            pause = None
    if pause is not None:
        pauses.append((pause.applied, math.inf))
    return SteeringState(stopped, added, pause, tuple(pauses))


def apply_settings(spec: SweepSpec, requests: Iterable[RecordedRequest]) -> SweepSpec:
    """Return the spec of a sweep's file with the settings that requests have changed.

    A change holds as long as the file has the value that it had then: a later value of the file
    wins.
    """
    changes: dict[str, float] = {}
    for request in requests:
        for name, setting in request.effect.settings.items():
            if read_setting(spec, name) == setting.file:
                changes[name] = setting.value
    return change_settings(spec, changes) if changes else spec


def change_settings(spec: SweepSpec, changes: Mapping[str, float]) -> SweepSpec:
    """Return a spec with other settings of `search`."""
    own = {name: value for name, value in changes.items() if not name.startswith(BUDGET)}
    limits = {n.removeprefix(BUDGET): v for n, v in changes.items() if n.startswith(BUDGET)}
    budget = spec.search.budget.model_copy(update=limits)
    search = spec.search.model_copy(update={**own, "budget": budget})
    return spec.model_copy(update={"search": search})


def read_setting(spec: SweepSpec, name: str) -> float:
    """Return a setting of `search` by the name that `RequestEffect.settings` has."""
    section = spec.search.budget if name.startswith(BUDGET) else spec.search
    return getattr(section, name.removeprefix(BUDGET))


def encode_recorded(request: RecordedRequest) -> dict[str, Any]:
    """Return a recorded request as JSON."""
    return asdict(request)


def decode_recorded(stored: Mapping[str, Any]) -> RecordedRequest:
    """Return a recorded request from JSON."""
    values, effect = dict(stored), dict[str, Any](stored["effect"])
    effect["settings"] = {name: Setting(**value) for name, value in effect["settings"].items()}
    values["effect"] = RequestEffect(**effect)
    return RecordedRequest(**values)
