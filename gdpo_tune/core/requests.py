"""Requests to a running sweep, such as `stop 7`, and what came of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gdpo_tune.core.formatting import format_parameter
from gdpo_tune.core.trial_config import Params


@dataclass(frozen=True)
class Request:
    """A change to a running sweep that a person asks for."""

    id: str
    """Random; nothing else tells apart two equal requests."""
    action: str
    """A key of `ACTIONS`, such as `stop`."""
    arguments: Mapping[str, Any]
    """JSON that the action takes, such as `{"trial": 7}`."""
    author: str
    """Name of the person who asked."""
    asked: float
    """Unix time in seconds."""

    @property
    def text(self) -> str:
        """Return the request as a person types it, such as `clone 7 learning_rate=0.0002`."""
        words = [self.action]
        for name, value in self.arguments.items():
            if isinstance(value, Mapping):
                words += [f"{name}={format_parameter(v)}" for name, v in value.items()]
            elif self.action == "budget":
                text = f"{value:g}" if isinstance(value, float) else format_parameter(value)
                words.append(f"{name}={text}")
            elif not isinstance(value, bool):
                words.append(str(value))
        return " ".join(words)


@dataclass(frozen=True)
class Setting:
    """A new value of a setting of `search:`, which holds while the file has the same value."""

    value: float
    file: float
    """Value in the sweep's file when the request was applied."""


@dataclass(frozen=True)
class RequestEffect:
    """Change that an applied request makes; all of them in order give the state of a sweep."""

    stop: int | None = None
    """Number of a trial that has to end."""
    point: Params | None = None
    """Parameters of a trial to start next; a missing one gets a quasi-random value."""
    settings: Mapping[str, Setting] = field(default_factory=dict[str, Setting])
    """`trials` or `budget.<name>` -> its new value."""
    paused: bool | None = None
    """True: no further trial starts; False: trials start again."""


@dataclass(frozen=True)
class RecordedRequest(Request):
    """A request in the ledger: the driver has applied or refused it."""

    applied: float
    """Unix time in seconds at which the driver took it."""
    outcome: Literal["applied", "refused"]
    reason: str
    """Result of the request, in one line for a person."""
    effect: RequestEffect = field(default_factory=RequestEffect)
    """Empty if it was refused."""

    def __str__(self) -> str:
        """Return a line for a person."""
        return f"{self.text}, asked by {self.author}: {self.outcome}: {self.reason}"
