"""What the YAML parser read, as nodes: plain values with their lines, and no more than a sweep has.

An alias stands for everything that it names, so that a file of a few lines can mean billions of
values. Here they are written out, up to a bound.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.scalarbool import ScalarBoolean

from gdpo_tune.spec.merge import first_clash, join, nest
from gdpo_tune.spec.problems import Mark, Node, Problems, Unreadable

MOST_VALUES = 100_000
"""Values of one file, aliases written out; shipped ones have less than 100."""
DEEPEST = 50
"""Levels of nesting; what reads nodes calls itself for each."""


@dataclass
class Expansion:
    """Makes nodes of what the parser read from one file."""

    problems: Problems
    values: int = 0
    """How many there are so far."""
    entry: Mark = field(init=False)
    """The outermost key or element that is being read."""

    def node(self, data: Any, mark: Mark, above: tuple[int, ...] = ()) -> Node:
        """Plain values with marks; a dotted key becomes nested mappings.

        Args:
            data: what the parser made of the file, or of a part of it.
            mark: where that is written.
            above: identities of what it lies in, from the outermost on.

        Raises:
            Unreadable: there are too many values, they lie too deep, or an alias contains itself;
                the problem is noted.
        """
        self.refuse_unbounded(data, mark, above)
        inside = (*above, id(data))
        if isinstance(data, CommentedMap):
            return self.mapping(data, mark, inside)
        if isinstance(data, CommentedSeq):
            elements: list[Node] = []
            for index, value in enumerate(data):
                where = Mark(mark.source, line_of(data, index, mark.line))
                elements.append(self.node(value, where, inside))
            return Node(mark, elements=elements)
        return Node(mark, plain_scalar(data))

    def mapping(self, data: Any, mark: Mark, inside: tuple[int, ...]) -> Node:
        """A mapping with the line of each of its keys."""
        entries: dict[str, Node] = {}
        node = Node(mark, entries=entries)
        for key, value in data.items():
            where = Mark(mark.source, line_of(data, key, mark.line))
            name = str(key)
            # every dot is a level, too
            addition = nest(name, self.node(value, where, inside + (0,) * name.count(".")))
            clash = first_clash(node, addition)
            if clash is not None:
                fix = "keep one of the two (a dotted key is the same as nested mappings)"
                self.problems.add(where, clash, None, "the key is given twice", fix)
            for part, child in (addition.entries or {}).items():
                entries[part] = join(entries[part], child) if part in entries else child
        return node

    def refuse_unbounded(self, data: Any, mark: Mark, above: tuple[int, ...]) -> None:
        """Count one more value, and refuse what has no end or none in sight."""
        if len(above) <= 1:
            self.entry = mark
        self.values += 1
        if id(data) in above:
            self.refuse(mark, "an alias that contains itself", "write the value out")
        if len(above) > DEEPEST:
            reason = f"more than {DEEPEST} levels deep"
            self.refuse(mark, reason, "write it flat: no section of a sweep has more than four")
        if self.values > MOST_VALUES:
            reason = f"more than {MOST_VALUES:,} values up to here, with every alias written out"
            self.refuse(self.entry, reason, "keep to the values that are meant")

    def refuse(self, mark: Mark, reason: str, fix: str) -> None:
        """Note why the file cannot be used, and give it up."""
        self.problems.add(mark, "", None, reason, fix)
        raise Unreadable


def line_of(data: Any, key: object, default: int) -> int:
    """Line of an entry, from 1; merged-in entries (`<<`) have none of their own."""
    position = data.lc.data.get(key) if data.lc.data else None
    return int(position[0]) + 1 if position else default


def plain_scalar(data: Any) -> object:
    """Built-in types instead of the parser's own, which remember their notation."""
    if isinstance(data, ScalarBoolean):  # an int, unlike bool: `true` with an anchor
        return bool(data)
    for kind in (bool, int, float, str):
        if isinstance(data, kind):
            return kind(data)
    return data if data is None else str(data)
