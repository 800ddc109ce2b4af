"""Laying one document over another: what `extends:` and `--set` mean."""

from __future__ import annotations

from gdpo_tune.spec.problems import Mark, Node

DOMAIN_KEYS = ("range", "log", "choices", "value", "step", "when")


def at_mark(node: Node, mark: Mark) -> Node:
    """The same values, all written at `mark`."""
    if node.entries is not None:
        return Node(
            mark, entries={key: at_mark(child, mark) for key, child in node.entries.items()}
        )
    if node.elements is not None:
        return Node(mark, elements=[at_mark(child, mark) for child in node.elements])
    return Node(mark, node.value)


def nest(key: str, node: Node) -> Node:
    """`a.b: x` as `{a: {b: x}}`."""
    parts = key.split(".")
    if not all(parts):
        parts = [key]
    for part in reversed(parts):
        node = Node(node.mark, entries={part: node})
    return node


def first_clash(first: Node, second: Node, path: tuple[str, ...] = ()) -> str | None:
    """The dotted key that both give a value to, if any."""
    if first.entries is None or second.entries is None:
        return ".".join(path)
    for key in first.entries.keys() & second.entries.keys():
        clash = first_clash(first.entries[key], second.entries[key], (*path, key))
        if clash is not None:
            return clash
    return None


def join(first: Node, second: Node) -> Node:
    """Two parts of one mapping, where `a.b: 1` and `a.c: 2` both add to `a`."""
    if first.entries is None or second.entries is None:
        return second
    joined = dict(first.entries)
    for key, child in second.entries.items():
        joined[key] = join(joined[key], child) if key in joined else child
    return Node(first.mark, entries=joined)


def merge(base: Node, change: Node, path: tuple[str, ...] = ()) -> Node:
    """`change` over `base`: mappings merge, anything else is replaced.

    A domain of the space is replaced as a whole, because `{log: [1, 2]}` over `{range: [0, 1]}`
    means the former alone. So is what `{}` is written over: to merge nothing would say nothing.
    A key without a value removes what was inherited.
    """
    if base.entries is None or change.entries is None or is_domain(path, base, change):
        return change
    if path and not change.entries:
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


def is_domain(path: tuple[str, ...], base: Node, change: Node) -> bool:
    """Whether one of two mappings at `path` is the domain of a parameter."""
    keys = (*(base.entries or {}), *(change.entries or {}))
    return len(path) > 1 and path[0] == "space" and any(key in DOMAIN_KEYS for key in keys)
