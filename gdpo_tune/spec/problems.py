"""Collecting what is wrong with a file, so that a person sees all of it at once."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from gdpo_tune.core.errors import Problem, SpecError
from gdpo_tune.core.trials import ParamValue

KeyPath = tuple[str | int, ...]

UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")
"""Control characters, tabs and line breaks aside, and halves of characters."""
LONGEST = 300
"""Characters of a value that a message shows; a long list hides what is wrong with it."""


class Mark(NamedTuple):
    """Where a value was written."""

    source: str
    """A file as the user would name it, or a command-line option as typed."""
    line: int = 0
    """From 1; 0 where the source has no lines."""

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


@dataclass(frozen=True)
class Node:
    """A value of the file together with where it was written."""

    mark: Mark
    value: object = None
    """A scalar; None for a mapping, a list, and a key without a value."""
    entries: dict[str, Node] | None = None
    """Of a mapping."""
    elements: list[Node] | None = None
    """Of a list."""

    def is_empty(self) -> bool:
        """Whether this is a key without a value."""
        return self.value is None and self.entries is None and self.elements is None

    def plain(self) -> object:
        """The value without marks."""
        if self.entries is not None:
            return {key: child.plain() for key, child in self.entries.items()}
        if self.elements is not None:
            return [child.plain() for child in self.elements]
        return self.value

    def find(self, path: KeyPath) -> Node:
        """The node at `path`, or the closest one above it that exists."""
        if not path:
            return self
        key, rest = path[0], path[1:]
        if self.entries is not None and key in self.entries:
            return self.entries[str(key)].find(rest)
        if self.elements is not None and isinstance(key, int) and key < len(self.elements):
            return self.elements[key].find(rest)
        return self


class Unreadable(Exception):
    """A file cannot be used at all; why is already among the problems."""


def scalars(node: Node) -> Iterator[ParamValue]:
    """Every value below a node."""
    for child in (*(node.entries or {}).values(), *(node.elements or [])):
        yield from scalars(child)
    if isinstance(node.value, bool | int | float | str):
        yield node.value


@dataclass
class Problems:
    """What is wrong so far."""

    origin: Mark
    """Where a problem belongs that has no line of its own."""
    found: list[tuple[Mark, Problem]] = field(default_factory=list[tuple[Mark, Problem]])
    empty: set[str] = field(default_factory=set[str])
    """Keys without a value: noted once, whatever else a missing value would break."""

    def add(self, mark: Mark, key: str, value: object, reason: str, fix: str) -> None:
        """Note one problem; `value` None means that there is none to show."""
        if key in self.empty:
            return
        shown = "" if value is None else show(value)
        if len(shown) > LONGEST:
            shown = shown[: LONGEST - 3] + "..."
        self.found.append((mark, Problem(str(mark), key, shown, reason, fix)))

    def at(self, node: Node, path: KeyPath, reason: str, fix: str) -> None:
        """Note a problem with the value `node`, which stands at `path`."""
        self.add(node.mark, dotted(path), node.plain(), reason, fix)

    def about(self, key: str) -> bool:
        """Whether `key` or something within it is wrong: what hangs on it cannot be judged."""
        return any(
            problem.key == key or problem.key.startswith((f"{key}.", f"{key}["))
            for _, problem in self.found
        )

    def refuse_empty(self, node: Node, path: KeyPath = ()) -> None:
        """Note every key that has no value."""
        if node.is_empty() and path:
            self.at(node, path, "no value", "give it a value, or remove the key")
            self.empty.add(dotted(path))
        for key, child in (node.entries or {}).items():
            self.refuse_empty(child, (*path, key))
        for index, child in enumerate(node.elements or []):
            self.refuse_empty(child, (*path, index))

    def refuse_unprintable(self, node: Node, path: KeyPath = ()) -> None:
        """Note every text with characters that no path, address or terminal takes."""
        if isinstance(node.value, str) and UNPRINTABLE.search(node.value):
            shown = node.value.encode("unicode_escape").decode()
            reason = "has characters that cannot be printed"
            self.add(node.mark, dotted(path), shown, reason, "write it without them")
        for key, child in (node.entries or {}).items():
            self.refuse_unprintable(child, (*path, key))
        for index, child in enumerate(node.elements or []):
            self.refuse_unprintable(child, (*path, index))

    def raise_if_any(self) -> None:
        """Raise everything found, in the order of the lines.

        Raises:
            SpecError: if anything was found.
        """
        if self.found:
            sources = list(dict.fromkeys(mark.source for mark, _ in self.found))
            ranked = sorted(
                self.found, key=lambda item: (sources.index(item[0].source), item[0].line)
            )
            raise SpecError(tuple(dict.fromkeys(problem for _, problem in ranked)))


def dotted(path: KeyPath) -> str:
    """A key path as a person types it: `enqueue[0].group_size`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def show(value: object) -> str:
    """A value as one line of YAML."""
    if isinstance(value, Mapping):
        entries = cast("Mapping[object, object]", value).items()
        return "{" + ", ".join(f"{key}: {show(child)}" for key, child in entries) + "}"
    if isinstance(value, list | tuple):
        return "[" + one_of(cast("Sequence[object]", value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if isinstance(value, str):
        return value if value else '""'
    return "null" if value is None else str(value)


def one_of(names: Iterable[object]) -> str:
    """Names for the end of a sentence."""
    return ", ".join(show(name) for name in names)


def did_you_mean(word: object, names: Iterable[str]) -> str:
    """`did you mean 'steps'? ` where something is close, else nothing."""
    close = difflib.get_close_matches(str(word).lower(), list(names), n=2, cutoff=0.6)
    return f"did you mean {' or '.join(repr(name) for name in close)}? " if close else ""
