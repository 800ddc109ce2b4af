"""Nested settings as YAML, TOML or command-line flags."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from gdpo_tune.spec.dump import flow

Tree = Mapping[str, object]


def yaml_text(tree: Tree, head: Sequence[str]) -> str:
    """YAML that readers of version 1.1 and 1.2 take alike, with `head` as comments."""
    return "\n".join([*(f"# {line}" for line in head), *_yaml(tree, "")]) + "\n"


def _yaml(tree: Tree, indent: str) -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield f"{indent}{key}:"
            yield from _yaml(cast("Tree", value), f"{indent}  ")
        else:
            yield f"{indent}{key}: {flow(value)}"


def toml_text(tree: Tree, head: Sequence[str]) -> str:
    """TOML, with `head` as comments; a list of mappings becomes an array of tables."""
    return "\n".join([*(f"# {line}" for line in head), *_toml(tree, "")]) + "\n"


def _toml(tree: Tree, table: str) -> Iterator[str]:
    nested: list[tuple[str, Tree]] = []
    for key, value in tree.items():
        if isinstance(value, Mapping):
            nested.append((key, cast("Tree", value)))
        else:
            yield f"{key} = {json.dumps(value)}"
    for key, child in nested:
        name = f"{table}{key}"
        if any(not isinstance(value, Mapping) for value in child.values()):
            yield f"\n[{name}]"
        yield from _toml(child, f"{name}.")


def flags(tree: Tree, prefix: str = "--") -> Iterator[str]:
    """`--a.b value` for each value; a flag that is true stands alone, a false one is left out."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flags(cast("Tree", value), f"{prefix}{key}.")
        elif isinstance(value, bool):
            if value:
                yield f"{prefix}{key}"
        else:
            many = cast("Sequence[object]", value) if isinstance(value, list) else [value]
            yield f"{prefix}{key} {shlex.join(str(each) for each in many)}"


def leaves(tree: Tree, prefix: str = "") -> dict[str, object]:
    """Dotted key -> value."""
    found: dict[str, object] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= leaves(cast("Tree", value), f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
