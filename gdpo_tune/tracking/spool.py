"""A queue of messages in a file, which outlives the process.

The driver appends one JSON line per message. One thread delivers the lines in batches and records
how far it got. So a slow or dead server never delays the driver, and the next process delivers what
this one leaves behind. A message may be delivered twice; the receiver stores it once.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Required, TypedDict

from gdpo_tune.core.files import write_atomically

BATCH_BYTES = 1 << 20
Point = list[Any]
"""`[name, value, time, step]` of a metric. A time of None becomes the time of spooling."""


class Message(TypedDict, total=False):
    """New content of one MLflow run. Times are milliseconds since 1970.

    `artifact` and `models` have no other content beside them.
    """

    run: Required[str]  # `sweep`, or the number of a trial
    name: str  # only in the first message of a run, as `start` and `inputs`
    start: int
    inputs: list[dict[str, str]]  # data sets, see `run_content.build_inputs`
    tags: dict[str, str]
    params: dict[str, str]
    metrics: list[Point]  # finite values only
    status: str  # MLflow's word for the state
    end: int
    experiment: dict[str, str]  # tags of the experiment; only in messages of the sweep
    artifact: dict[str, str]  # `name` and `text`, or `file`, read when it is sent, and `sha256`
    models: dict[str, Any]  # `name`, and `versions` with `trial`, `tags` and `aliases`
    renew: bool  # replaces an earlier run: the ledger lost it in a crash, and gave its number again


class ServerUnavailable(Exception):
    """The server cannot take anything now; the same request may succeed later."""


class MessageRefused(Exception):
    """The server refused a message, and would refuse it again."""


def is_separate(message: Message) -> bool:
    """Return whether `message` is a file or about the registry, so that no run waits for it."""
    return "artifact" in message or "models" in message


@dataclass
class SpooledRun:
    """Content of one run that is on the spool, so that only changes are added."""

    tags: dict[str, str] = field(default_factory=dict[str, str])
    params: dict[str, str] = field(default_factory=dict[str, str])
    experiment: dict[str, str] = field(default_factory=dict[str, str])
    values: dict[str, float] = field(default_factory=dict[str, float])
    """Latest value of every metric."""
    steps: dict[str, int] = field(default_factory=dict[str, int])
    """Highest step of every metric; 0 for a metric that is measured once."""
    artifacts: dict[str, str] = field(default_factory=dict[str, str])
    """Name or path -> text or SHA-256."""
    models: dict[str, Any] = field(default_factory=dict[str, Any])
    status: str = ""
    start: int = 0
    """0 if the run does not exist yet."""

    def update(self, message: Message) -> None:
        """Add the content of `message`."""
        self.tags |= message.get("tags", {})
        self.params |= message.get("params", {})
        self.experiment |= message.get("experiment", {})
        for name, value, _, step in message.get("metrics", ()):
            self.values[name] = value
            self.steps[name] = max(step, self.steps.get(name, step))
        if "artifact" in message:
            name, content = message["artifact"].values()
            self.artifacts[name] = content
        self.models = message.get("models", self.models)
        self.status = message.get("status", self.status)
        self.start = message.get("start", self.start)

    def select_new(self, content: Message, now: int) -> Message:
        """Return the part of `content` that is not spooled yet; `run` alone if all of it is.

        `now` is later than every time spooled before.
        """
        new: Message = {"run": content["run"]}
        if not self.start:
            new["name"], new["start"] = content.get("name", ""), content.get("start", now)
            if "inputs" in content:
                new["inputs"] = content["inputs"]
        if tags := _find_changes(self.tags, content.get("tags", {})):
            new["tags"] = tags
        if params := {k: v for k, v in content.get("params", {}).items() if k not in self.params}:
            new["params"] = params
        if points := [point for point in content.get("metrics", ()) if self._is_new(point)]:
            new["metrics"] = [[k, v, now if t is None else t, step] for k, v, t, step in points]
        if tags := _find_changes(self.experiment, content.get("experiment", {})):
            new["experiment"] = tags
        if "status" in content and content["status"] != self.status:
            new["status"] = content["status"]
            if "end" in content:
                new["end"] = content["end"]
        if "models" in content and content["models"] != self.models:
            new["models"] = content["models"]
        if "artifact" in content:
            name, text = content["artifact"].values()
            if self.artifacts.get(name) != text:
                new["artifact"] = content["artifact"]
        return new

    def _is_new(self, point: Point) -> bool:
        """Return whether the step is new, or the value of a metric that is measured once."""
        name, value, _, step = point
        last = self.steps.get(name, -1)
        return step > last or (last == 0 and value != self.values[name])


def _find_changes(spooled: Mapping[str, str], content: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in content.items() if spooled.get(name, "") != text}


class Spool:
    """An append-only file of messages, and a small file with the position of delivery.

    One process writes. A line that a crash cut short is dropped when the file is opened. The
    position is in the file with the suffix `.offset`; one that belongs to another destination
    counts as nothing delivered. Only a hash of the destination, such as a tracking URI, is written,
    because a URI may hold a password.
    """

    def __init__(self, path: Path, destination: str) -> None:
        self.path = path
        self.refused_path = path.with_suffix(".refused.jsonl")
        self._destination = hashlib.sha256(destination.encode()).hexdigest()
        self._position = path.with_suffix(".offset")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._size = _cut_torn_line(path)
        self.offset = 0
        """Bytes of the file that are delivered."""
        self.leftover: list[Message] = []
        """Messages before the offset that could not be stored; they are tried again."""
        self._load_position()
        self.runs: dict[str, SpooledRun] = {}
        """`sweep` or the number of a trial -> its content on the spool."""
        for message in _parse(_read_lines(path, 0, self._size)):
            self._update_run(message)
        self._added = sum(1 for _ in _read_lines(path, self.offset, self._size))
        """Messages since the offset at which this file was opened. Only the driver writes it."""
        self._taken = 0
        """Number of these that are delivered. Only the sending thread writes it."""

    def put(self, message: Message) -> None:
        """Append `message`, which from now on survives the end of this process.

        Raises:
            ValueError: the message holds NaN or inf.
        """
        line = json.dumps(message, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        self._file.write(line)
        self._size += len(line)
        self._added += 1
        self._update_run(message)

    def put_new(self, content: Message, now: int, *, renew: bool = False) -> None:
        """Put the part of `content` that is new; `renew` replaces the run."""
        run = SpooledRun() if renew else self.runs.get(content["run"], SpooledRun())
        message = run.select_new(content, now)
        if renew:
            message["renew"] = True
        if len(message) > 1:
            self.put(message)

    def count_pending(self) -> int:
        """Return the number of messages that are not delivered, without disk access."""
        return len(self.leftover) + self._added - self._taken

    def is_drained(self) -> bool:
        """Return whether everything is delivered."""
        return self.offset >= self._size and not self.leftover

    def read_delivered(self) -> Iterator[Message]:
        """Yield every delivered message, oldest first."""
        return _parse(_read_lines(self.path, 0, self.offset))

    def read_batch(self) -> tuple[list[Message], int]:
        """Return the next messages, about `BATCH_BYTES` of them, and the offset after them."""
        lines: list[bytes] = []
        length = 0
        for line in _read_lines(self.path, self.offset, self._size):
            lines.append(line)
            length += len(line)
            if length >= BATCH_BYTES:
                break
        return list(_parse(lines)), self.offset + length

    def commit(self, offset: int, leftover: list[Message]) -> None:
        """Record that everything before `offset` is delivered, except `leftover`."""
        if (offset, leftover) == (self.offset, self.leftover):
            return
        self._taken += sum(1 for _ in _read_lines(self.path, self.offset, offset))
        self.offset, self.leftover = offset, leftover
        position = {"destination": self._destination, "offset": offset, "leftover": leftover}
        write_atomically(self._position, json.dumps(position))

    def set_aside(self, message: Message, reason: str) -> None:
        """Keep a message that the receiver refuses in a file of its own."""
        with self.refused_path.open("a") as file:
            file.write(json.dumps({"reason": reason, "message": message}) + "\n")

    def move_aside(self) -> None:
        """Close the file and rename it, because it belongs to a sweep that was replaced."""
        self.close()
        self.path.replace(self.path.with_suffix(".old.jsonl"))
        self._position.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file; pending messages stay in it."""
        self._file.close()

    def _update_run(self, message: Message) -> None:
        if "renew" in message:
            self.runs[message["run"]] = SpooledRun()
        self.runs.setdefault(message["run"], SpooledRun()).update(message)

    def _load_position(self) -> None:
        try:
            position = json.loads(self._position.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return
        # With a damaged file, everything is delivered again, and stored once.
        if isinstance(position, dict) and position["destination"] == self._destination:
            self.offset = min(position["offset"], self._size)
            self.leftover = position["leftover"]


def _cut_torn_line(path: Path) -> int:
    if not path.stat().st_size:
        return 0  # nothing to map
    with path.open("rb+") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            end = content.rfind(b"\n") + 1
        file.truncate(end)
    return end


def _read_lines(path: Path, start: int, end: int) -> Iterator[bytes]:
    if start >= end:
        return
    with path.open("rb") as file:
        file.seek(start)
        while start < end:
            line = file.readline()
            start += len(line)
            yield line


def _parse(lines: Iterable[bytes]) -> Iterator[Message]:
    for line in lines:
        # A power cut may leave blocks of zeros inside the file; the lines after them are whole.
        with suppress(ValueError):
            yield json.loads(line)
