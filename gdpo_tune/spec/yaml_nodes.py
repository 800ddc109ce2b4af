"""Nodes of a YAML document with the line of every value: built, nested by dotted keys, and merged.

Aliases are expanded up to a bound, because a file of a few lines can expand to billions of values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.scalarbool import ScalarBoolean

from gdpo_tune.spec.problems import UNPRINTABLE, Problems, SourceMark, YamlNode

MOST_VALUES = 100_000
"""Most values of one file, aliases written out; shipped files have less than 100."""
DEEPEST = 50
"""Most levels of nesting; the functions that read nodes are recursive."""
DOMAIN_KEYS = ("range", "log", "choices", "value", "step", "when")


@dataclass
class NodeBuilder:
    """Builds nodes from what ruamel read of one document."""

    source: SourceMark
    """Mark of the document; without a line, all nodes have this mark."""
    problems: Problems
    texts: Mapping[tuple[int, int], str]
    """Line and column of a scalar -> its text."""
    values: int = 0
    """Number of values so far."""
    entry: SourceMark = field(init=False)
    """Mark of the current outermost key or element."""

    def build(self, data: Any, mark: SourceMark, above: tuple[int, ...] = ()) -> YamlNode:
        """Return plain values with marks; a dotted key becomes nested mappings.

        `above` has the identities of the collections around `data`, from the outermost on.

        Raises:
            UnreadableNodeError: too many values, too many levels, an alias that contains itself, or
                a key that cannot be printed.
        """
        self._count(data, mark, above)
        inside = (*above, id(data))
        if isinstance(data, CommentedSeq):
            elements = [
                self.build(value, self._find_mark(data, index, mark), inside)
                for index, value in enumerate(data)
            ]
            return YamlNode(mark, elements=elements)
        if not isinstance(data, CommentedMap):
            return YamlNode(mark, convert_scalar(data))
        entries: dict[str, YamlNode] = {}
        for name, value in data.items():
            key, own_mark = str(name), self._find_mark(data, name, mark)
            if UNPRINTABLE.search(key):
                shown = key.encode("unicode_escape").decode()
                reason, fix = "a key has characters that cannot be printed", "write it without them"
                raise self.problems.add(own_mark, shown, None, reason, fix)
            # Every dot is a level, too.
            child = self.build(value, own_mark, inside + (0,) * key.count("."))
            text = self.texts.get(tuple((data.lc.data or {}).get(name, ())[2:]))
            child = replace(child, text=text)
            clash = add_entry(entries, key, child)
            if clash is not None:
                fix = "keep one of the two (a dotted key is the same as nested mappings)"
                self.problems.add(own_mark, clash, None, "the key is given twice", fix)
        return YamlNode(mark, entries=entries)

    def _find_mark(self, data: Any, key: object, default: SourceMark) -> SourceMark:
        """Return the mark of an entry; merged-in entries (`<<`) have none of their own."""
        position = data.lc.data.get(key) if data.lc.data and self.source.line else None
        return SourceMark(default.source, int(position[0]) + 1) if position else default

    def _count(self, data: Any, mark: SourceMark, above: tuple[int, ...]) -> None:
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
            mark, fix = self.entry, "write fewer values, or fewer aliases"
        else:
            return
        raise self.problems.add(mark, "", None, reason, fix)


def convert_scalar(data: Any) -> object:
    """Return a built-in value instead of ruamel's own types, which remember their notation."""
    if data is None or isinstance(data, bool):
        return data
    # `true` with an anchor is a ScalarBoolean, which is an int
    kinds = {ScalarBoolean: bool, int: int, float: float}
    return next((plain for kind, plain in kinds.items() if isinstance(data, kind)), str)(data)


def nest(key: str, node: YamlNode) -> tuple[str, YamlNode]:
    """Return `a.b: x` as the entry `a: {b: x}`."""
    parts = key.split(".")
    if not all(parts):
        return key, node
    for part in reversed(parts[1:]):
        node = YamlNode(node.mark, entries={part: node})
    return parts[0], node


def add_entry(entries: dict[str, YamlNode], key: str, node: YamlNode) -> str | None:
    """Add an entry, where `a.b: 1` and `a.c: 2` both add to `a`; return a key with two values."""
    first, node = nest(key, node)
    old = entries.setdefault(first, node)
    if old is node:
        return None
    if old.entries is None or node.entries is None:
        return first
    clashes = [add_entry(old.entries, name, child) for name, child in node.entries.items()]
    return next((f"{first}.{clash}" for clash in clashes if clash is not None), None)


def merge(base: YamlNode, change: YamlNode, path: tuple[str, ...] = ()) -> YamlNode:
    """Return `change` laid over `base`: mappings merge, anything else is replaced.

    A domain of the space is replaced as a whole: `{log: [1, 2]}` over `{range: [0, 1]}` has no
    range. An empty mapping replaces too, and a key without a value removes the inherited one.
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
    return YamlNode(base.mark, entries=merged)
