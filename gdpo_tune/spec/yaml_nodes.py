"""Nodes of a YAML document: plain values with their lines, and documents laid over each other.

An alias stands for everything that it names, so that a file of a few lines can mean billions of
values. Here aliases are written out, up to a bound.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.scalarbool import ScalarBoolean

from gdpo_tune.spec.problems import Mark, Node, Problems, Unreadable

MOST_VALUES = 100_000
"""Most values of one file, aliases written out; shipped files have less than 100."""
DEEPEST = 50
"""Most levels of nesting; the functions that read nodes are recursive."""
DOMAIN_KEYS = ("range", "log", "choices", "value", "step", "when")


@dataclass
class NodeBuilder:
    """Builds nodes from what ruamel read of one document."""

    source: Mark
    """Place of the document; without a line, every node stands there."""
    problems: Problems
    values: int = 0
    """Number of values so far."""
    entry: Mark = field(init=False)
    """The outermost key or element that is being read."""

    def build(self, data: Any, mark: Mark, above: tuple[int, ...] = ()) -> Node:
        """Return plain values with marks; a dotted key becomes nested mappings.

        Args:
            data: of the parser.
            mark: where it is written.
            above: identities of the collections around it, from the outermost on.

        Raises:
            Unreadable: there are too many values, they lie too deep, or an alias contains itself.
        """
        self._count(data, mark, above)
        inside = (*above, id(data))
        if isinstance(data, CommentedSeq):
            elements = [
                self.build(value, self._mark(data, index, mark), inside)
                for index, value in enumerate(data)
            ]
            return Node(mark, elements=elements)
        if not isinstance(data, CommentedMap):
            return Node(mark, plain_scalar(data))
        entries: dict[str, Node] = {}
        for name, value in data.items():
            key, where = str(name), self._mark(data, name, mark)
            # Every dot is a level, too.
            child = self.build(value, where, inside + (0,) * key.count("."))
            clash = add_entry(entries, key, child)
            if clash is not None:
                fix = "keep one of the two (a dotted key is the same as nested mappings)"
                self.problems.add(where, clash, None, "the key is given twice", fix)
        return Node(mark, entries=entries)

    def _mark(self, data: Any, key: object, default: Mark) -> Mark:
        """Return the place of an entry; merged-in entries (`<<`) have none of their own."""
        position = data.lc.data.get(key) if data.lc.data and self.source.line else None
        return Mark(default.source, int(position[0]) + 1) if position else default

    def _count(self, data: Any, mark: Mark, above: tuple[int, ...]) -> None:
        """Count one more value, and refuse endless or huge documents."""
        if len(above) <= 1:
            self.entry = mark
        self.values += 1
        if id(data) in above:
            reason, fix = "an alias that contains itself", "write the value out"
        elif len(above) > DEEPEST:
            reason = f"more than {DEEPEST} levels deep"
            fix = "write it flat: no section of a sweep has more than four"
        elif self.values > MOST_VALUES:
            reason = f"more than {MOST_VALUES:,} values up to here, with every alias written out"
            mark, fix = self.entry, "keep to the values that are meant"
        else:
            return
        self.problems.add(mark, "", None, reason, fix)
        raise Unreadable


def plain_scalar(data: Any) -> object:
    """Return a built-in value instead of ruamel's own types, which remember their notation."""
    if isinstance(data, ScalarBoolean):  # an int, unlike bool: `true` with an anchor
        return bool(data)
    for kind in (bool, int, float, str):
        if isinstance(data, kind):
            return kind(data)
    return data if data is None else str(data)


def nest(key: str, node: Node) -> tuple[str, Node]:
    """Return `a.b: x` as the entry `a: {b: x}`."""
    parts = key.split(".")
    if not all(parts):
        return key, node
    for part in reversed(parts[1:]):
        node = Node(node.mark, entries={part: node})
    return parts[0], node


def add_entry(entries: dict[str, Node], key: str, node: Node) -> str | None:
    """Add an entry, where `a.b: 1` and `a.c: 2` both add to `a`; return a key with two values."""
    first, node = nest(key, node)
    old = entries.setdefault(first, node)
    if old is node:
        return None
    if old.entries is None or node.entries is None:
        return first
    clashes = [add_entry(old.entries, name, child) for name, child in node.entries.items()]
    return next((f"{first}.{clash}" for clash in clashes if clash is not None), None)


def merge(base: Node, change: Node, path: tuple[str, ...] = ()) -> Node:
    """Return `change` laid over `base`: mappings merge, anything else is replaced.

    A domain of the space is replaced as a whole, because `{log: [1, 2]}` over `{range: [0, 1]}`
    means the former alone. An empty mapping replaces what it is laid over, because to merge it
    would change nothing. A key without a value removes the inherited one.
    """
    if base.entries is None or change.entries is None or (path and not change.entries):
        return change
    is_domain = not {*base.entries, *change.entries}.isdisjoint(DOMAIN_KEYS)
    if is_domain and len(path) > 1 and path[0] == "space":
        return change
    merged = dict(base.entries)
    for key, child in change.entries.items():
        if child.is_empty() and key in merged:
            del merged[key]
        elif key in merged:
            merged[key] = merge(merged[key], child, (*path, key))
        else:
            merged[key] = child
    return Node(base.mark, entries=merged)
