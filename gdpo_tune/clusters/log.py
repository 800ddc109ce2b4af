"""The history of one schedule: numbered events that are appended, and never changed or deleted.

    <storage>/.schedule/<name>/00000001.json          one event, as one line of JSON
                               00000001-00000100.jsonl  a hundred of them again, for quick reading

Event n + 1 can be appended by whoever has seen the events up to n, and once only: the file of that
number is created, which fails if it exists. So every decision rests on all events before it, and
two callers at once cannot both take it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from gdpo_tune.clusters.shapes import EVENTS
from gdpo_tune.clusters.store import Store
from gdpo_tune.core.errors import StoreError

SEGMENT = 100
"""Events of a segment."""
EVENT_FILE = re.compile(r"(\d{8})\.json")

Kind = Literal[
    "seen",
    "started",
    "submitted",
    "retried",
    "stopping",
    "ended",
    "queued",
    "skipped",
    "told",
    "untold",
]


@dataclass(frozen=True)
class Event:
    """Something that was decided or observed."""

    kind: Kind
    at: datetime
    """When, in UTC, by the clock of who wrote it."""
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What else there is to say, as JSON."""

    def line(self) -> bytes:
        """One line of JSON."""
        head = {"event": self.kind, "at": self.at.isoformat()}
        return (json.dumps({**head, **self.about}, ensure_ascii=False) + "\n").encode()

    @classmethod
    def from_line(cls, line: bytes) -> Event:
        """The event that `line` wrote down.

        Raises:
            ValueError, TypeError, KeyError, AttributeError, RecursionError: it is none.
        """
        about = json.loads(line)
        kind = about.pop("event")
        EVENTS[kind].model_validate_json(line)
        return cls(kind, datetime.fromisoformat(about.pop("at")), about)


class TooLate(Exception):
    """Somebody else has appended an event since this history was read."""


class EventLog:
    """One schedule's history. What was read is kept, since events never change."""

    def __init__(self, store: Store, name: str) -> None:
        self.store = store
        self.folder = f".schedule/{name}"
        self.events: list[Event] = []

    def refresh(self) -> list[Event]:
        """Read what was appended since the last time; return that.

        Raises:
            StoreError: it cannot be read, or part of it is gone.
        """
        names = set(self.store.names(self.folder))
        known = len(self.events)
        last = max((int(m[1]) for m in map(EVENT_FILE.fullmatch, names) if m), default=0)
        if last < known:
            raise StoreError(
                f"storage {self.store.place}: {self.folder} has fewer events than before\n"
                "    fix: nothing, if it was moved aside on purpose: the next call begins anew"
            )
        while len(self.events) < last:
            segment = segment_name(len(self.events))
            if len(self.events) % SEGMENT == 0 and segment in names:
                (content,) = self.store.read([f"{self.folder}/{segment}"])
                lines = content.splitlines()
                if len(lines) != SEGMENT:
                    raise self.unreadable(segment)
                self.events += [self._event(segment, line) for line in lines]
                continue
            end = min(last, (len(self.events) // SEGMENT + 1) * SEGMENT)
            self._read_single(len(self.events) + 1, end, names)
        return self.events[known:]

    def unreadable(self, name: str) -> StoreError:
        """What to tell of a file that is not what was written."""
        return StoreError(
            f"storage {self.store.place}: {self.folder}/{name} is not what was written there: "
            "damaged, or by a later version\n    fix: bring it back, update this package, or move "
            "the folder aside to begin a new history"
        )

    def append(self, event: Event) -> None:
        """Append an event to those that were read.

        Raises:
            TooLate: another one was appended since; read and decide again.
            StoreError: it cannot be written.
        """
        number = len(self.events) + 1
        try:
            self.store.create(f"{self.folder}/{file_name(number)}", event.line())
        except FileExistsError:
            raise TooLate from None
        self.events.append(event)
        if number % SEGMENT == 0:
            self._write_segment(number - SEGMENT)

    def _read_single(self, first: int, last: int, names: set[str]) -> None:
        wanted = [file_name(number) for number in range(first, last + 1)]
        missing = [name for name in wanted if name not in names]
        if missing:
            raise StoreError(
                f"storage {self.store.place}: the history lacks {self.folder}/{missing[0]}\n"
                "    fix: bring it back, or move the folder aside to begin a new history"
            )
        contents = self.store.read([f"{self.folder}/{name}" for name in wanted])
        self.events += map(self._event, wanted, contents)
        if last % SEGMENT == 0:
            # whoever appended the last of them was killed before it wrote the segment
            self._write_segment(last - SEGMENT)

    def _event(self, name: str, line: bytes) -> Event:
        try:
            return Event.from_line(line)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise self.unreadable(name) from error

    def _write_segment(self, start: int) -> None:
        content = b"".join(event.line() for event in self.events[start : start + SEGMENT])
        try:
            self.store.create(f"{self.folder}/{segment_name(start)}", content)
        except FileExistsError:
            return  # with the same content: events do not change


def file_name(number: int) -> str:
    """File of an event; they are counted from 1."""
    return f"{number:08}.json"


def segment_name(start: int) -> str:
    """File of the segment that follows `start` events."""
    return f"{start + 1:08}-{start + SEGMENT:08}.jsonl"
