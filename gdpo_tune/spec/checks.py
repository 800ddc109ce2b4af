"""Moves to `problems` once clusters/load_schedules.py calls `explain_unknown_name`."""

from __future__ import annotations

from collections.abc import Iterable

from gdpo_tune.spec.problems import KeyPath, Node, Problems, explain_unknown_name


def check_name(
    node: Node, path: KeyPath, kind: str, names: Iterable[str], problems: Problems
) -> bool:
    """Return whether `node` is one of `names`; a problem is noted if not."""
    known = list(names)
    if node.value not in known:
        problems.at(node, path, *explain_unknown_name(kind, node.plain(), known))
    return node.value in known
