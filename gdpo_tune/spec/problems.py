"""Problems of a YAML file, each with its line, and all of them in one error."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from gdpo_tune.core.errors import SpecError, SpecProblem
from gdpo_tune.core.redaction import HIDDEN, is_secret, redact_secrets

KeyPath = tuple[str | int, ...]

UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")
"""Control characters except tabs and line breaks, and halves of surrogate pairs."""
LONGEST = 300
"""Most characters of a value in a message; a long list hides what is wrong with it."""


class SourceMark(NamedTuple):
    """File and line of a value, or the command-line option that has it."""

    source: str
    """A file as the user names it, or a command-line option as typed."""
    line: int = 0
    """From 1; 0 where the source has no lines."""

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


@dataclass(frozen=True)
class YamlNode:
    """A YAML value with its file and line."""

    mark: SourceMark
    value: object = None
    """A scalar; None for a mapping, a list, and a key without a value."""
    entries: dict[str, YamlNode] | None = None
    """Entries of a mapping."""
    elements: list[YamlNode] | None = None
    """Elements of a list."""
    text: str | None = None
    """The text of a scalar, if it is known: 1.10 is the number 1.1."""

    def is_empty(self) -> bool:
        """Return whether this is a key without a value."""
        return self.value is None and self.entries is None and self.elements is None

    def convert_to_plain(self) -> object:
        """Return the value without marks; lists as tuples, as settings have them."""
        if self.entries is not None:
            return {key: child.convert_to_plain() for key, child in self.entries.items()}
        if self.elements is not None:
            return tuple(child.convert_to_plain() for child in self.elements)
        return self.value

    def get(self, path: KeyPath) -> YamlNode | None:
        """Return the node at `path`, of which a part may have dots; None if there is none."""
        if not path:
            return self
        key, rest = path[0], path[1:]
        if isinstance(key, int):
            elements = self.elements or []
            return elements[key].get(rest) if key < len(elements) else None
        entries = self.entries or {}
        if key in entries:
            return entries[key].get(rest)
        head, dot, tail = key.partition(".")
        return entries[head].get((tail, *rest)) if dot and head in entries else None

    def find(self, path: KeyPath) -> YamlNode:
        """Return the node at `path`, or the closest existing node above it."""
        node = self.get(path)
        return node if node is not None else self.find(path[:-1])

    def walk(self, path: KeyPath = ()) -> Iterator[tuple[KeyPath, YamlNode]]:
        """Yield this node and every node below it, each with its path."""
        yield path, self
        for key, child in (self.entries or {}).items():
            yield from child.walk((*path, key))
        for index, child in enumerate(self.elements or []):
            yield from child.walk((*path, index))


class UnreadableNodeError(Exception):
    """A file or a value that cannot be used; the reason is already among the problems."""


@dataclass
class Problems:
    """All problems of one document."""

    origin: SourceMark
    """Mark of a problem that has no line of its own."""
    root: YamlNode | None = None
    """The document of `note` and `refuse`."""
    records: list[tuple[SourceMark, SpecProblem]] = field(
        default_factory=list[tuple[SourceMark, SpecProblem]]
    )
    empty: set[str] = field(default_factory=set[str])
    """Keys without a value: each is noted once, and problems that follow from it are not."""

    def add(
        self, mark: SourceMark, key: str, value: object, reason: str, fix: str
    ) -> UnreadableNodeError:
        """Note a problem, for the caller to raise or ignore; a `value` of None is not shown."""
        if key in self.empty:
            return UnreadableNodeError()
        name = key.rpartition(".")[2].partition("[")[0]
        shown = "" if value is None else show(hide_values(value, name))
        if len(shown) > LONGEST:
            shown = shown[: LONGEST - 3] + "..."
        self.records.append((mark, SpecProblem(str(mark), key, shown, reason, fix)))
        return UnreadableNodeError()

    def add_value(
        self, node: YamlNode, path: KeyPath, reason: str, fix: str
    ) -> UnreadableNodeError:
        """Note a problem with the value `node` at `path`."""
        return self.add(node.mark, format_path(path), node.convert_to_plain(), reason, fix)

    def note(
        self, path: KeyPath | str, reason: str, fix: str, value: object = None
    ) -> UnreadableNodeError:
        """Note a problem with a key of the document; `value` is shown instead of its own."""
        path = tuple(path.split(".")) if isinstance(path, str) else path
        root = self.root if self.root is not None else YamlNode(self.origin)
        node = root.get(path)
        if value is None and node is not None:
            value = node.convert_to_plain()
        return self.add(root.find(path).mark, format_path(path), value, reason, fix)

    def refuse(
        self, path: KeyPath | str, reason: str, fix: str, *inputs: str, value: object = None
    ) -> None:
        """Note a problem, unless the key or one of the keys `inputs` has one already.

        A key with a problem has its default while the rest is checked, so what follows from its
        value cannot be judged.
        """
        key = path if isinstance(path, str) else format_path(path)
        if not any(map(self.has_problem, (key, *inputs))):
            self.note(path, reason, fix, value)

    def refuse_idle(
        self, section: str, keys: str, settings: object, reason: str, fix: str, *inputs: str
    ) -> None:
        """Refuse `keys` of a section, separated by spaces, that differ from their default."""
        for key in keys.split():
            if getattr(settings, key) != getattr(type(settings)(), key):
                self.refuse(f"{section}.{key}", reason, fix, *inputs)

    def has_key(self, key: str) -> bool:
        """Return whether the document has a dotted key."""
        return self.root is not None and self.root.get((key,)) is not None

    def has_problem(self, key: str) -> bool:
        """Return whether `key`, something in it or something around it has a problem."""
        keys = [problem.key for _, problem in self.records if problem.key]
        pairs = [(key, other) for other in keys] + [(other, key) for other in keys]
        return any(a == b or a.startswith((f"{b}.", f"{b}[")) for a, b in pairs)

    def refuse_unusable(self, root: YamlNode) -> None:
        """Note every key without a value, and every text with characters that cannot be printed."""
        for path, node in root.walk():
            if path and node.is_empty():
                self.add_value(node, path, "no value", "give it a value, or remove the key")
                self.empty.add(format_path(path))
            elif isinstance(node.value, str) and UNPRINTABLE.search(node.value):
                shown = node.value.encode("unicode_escape").decode()
                reason = "has characters that cannot be printed"
                self.add(node.mark, format_path(path), shown, reason, "write it without them")

    def raise_if_any(self) -> None:
        """Raise `SpecError` with every problem, if there is any."""
        if self.records:
            raise SpecError(self.list_sorted())

    def list_sorted(self) -> tuple[SpecProblem, ...]:
        """Return every problem once, in the order of the lines."""
        sources = list(dict.fromkeys(mark.source for mark, _ in self.records))
        ranked = sorted(self.records, key=lambda p: (sources.index(p[0].source), p[0].line))
        return tuple(dict.fromkeys(problem for _, problem in ranked))


def format_path(path: KeyPath) -> str:
    """Return a key path as a person types it: `enqueue[0].group_size`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def show(value: object) -> str:
    """Return a value as one line of YAML, for a message."""
    return format_flow(value, _show_scalar)


def _show_scalar(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if isinstance(value, str):
        return value if value else '""'
    return "null" if value is None else str(value)


def format_flow(value: object, format_scalar: Callable[[object], str]) -> str:
    """Return a value in flow style, on one line."""
    if isinstance(value, Mapping):
        entries = cast("Mapping[str, object]", value).items()
        inner = (f"{key}: {format_flow(child, format_scalar)}" for key, child in entries)
        return "{" + ", ".join(inner) + "}"
    if isinstance(value, list | tuple):
        elements = cast("Sequence[object]", value)
        return "[" + ", ".join(format_flow(child, format_scalar) for child in elements) + "]"
    return format_scalar(value)


def join_names(names: Iterable[object]) -> str:
    """Return names for the end of a sentence."""
    return ", ".join(show(name) for name in names)


def suggest(word: object, names: Iterable[str]) -> str:
    """Return `did you mean 'steps'? ` where a name is close, else an empty text."""
    close = difflib.get_close_matches(str(word).lower(), list(names), n=2, cutoff=0.6)
    return f"did you mean {' or '.join(repr(name) for name in close)}? " if close else ""


def explain_unknown_name(kind: str, name: object, names: Collection[str]) -> tuple[str, str]:
    """Return reason and fix of a name that is not one of `names`."""
    return f"unknown {kind}", f"{suggest(name, names)}those that exist: {join_names(names)}"


def hide_passwords(text: str) -> str:
    """Return addresses without the passwords in them."""
    # In the address of a database a password may hold a slash, or be one of the options.
    text = re.sub(r"(https?://[^/@:]*):[^@\s/]*@", r"\1:***@", text)
    text = re.sub(r"(?<!http)(?<!https)(://[^/@:]*):[^@\s]*@", r"\1:***@", text)
    return re.sub(r"([?&](?:ssl)?password=)[^&\s]*", r"\1***", text)


def hide_values(value: object, name: str = "") -> object:
    """Return a value without secrets, which their own form or the name of their key gives away.

    A reward whose name looks like that of a secret loses its value in a message. That harms less
    than a token in one.
    """
    if isinstance(value, Mapping):
        entries = cast("Mapping[str, object]", value).items()
        return {key: hide_values(child, key) for key, child in entries}
    if isinstance(value, list | tuple):
        return [hide_values(child, name) for child in cast("Sequence[object]", value)]
    if is_secret(name):
        return HIDDEN
    return hide_in_text(value) if isinstance(value, str) else value


def hide_in_text(text: str) -> str:
    """Return a text without the secrets in it; of an address it loses only the password."""
    public = hide_passwords(text)
    name, sign, value = text.partition("=")
    if public == text and sign and "://" not in name and is_secret(name.strip(), value):
        return f"{name}={HIDDEN}"
    return HIDDEN if public == text and is_secret("", text) else redact_secrets(public)


def hide_service_path(url: str) -> str:
    """Return scheme, host and port of a service: the rest may be a secret."""
    return re.sub(r"^(\w+://)(?:[^/?#]*@)?([^/?#]*).*$", r"\1\2", url, flags=re.DOTALL)
