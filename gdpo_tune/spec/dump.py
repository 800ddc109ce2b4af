"""YAML that any parser reads alike: a key a line, with values in flow style."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
RESERVED = ("true", "false", "null", "yes", "no", "on", "off", "y", "n")
"""Words that some parser of YAML takes for something else."""


def dump_entries(entries: Mapping[str, object]) -> str:
    """Return a document with these top-level keys."""
    lines = [line for key, value in entries.items() for line in _block(key, value)]
    return "\n".join(lines) + "\n"


def hide_service_path(url: str) -> str:
    """Return scheme, host and port of a service: the rest may be a secret."""
    return re.sub(r"^(\w+://)(?:[^/?#]*@)?([^/?#]*).*$", r"\1\2", url, flags=re.DOTALL)


def _block(key: str, value: object) -> Iterator[str]:
    """Yield the lines of one top-level key: an entry a line."""
    if isinstance(value, Mapping) and value:
        yield f"{key}:"
        group = ""
        for name, child in cast("Mapping[str, object]", value).items():
            prefix, _, leaf = name.rpartition(".")
            if prefix and prefix != group:
                yield f"  {prefix}:"
            group = prefix
            yield f"  {'  ' if prefix else ''}{leaf}: {format_flow(child)}"
    elif isinstance(value, tuple) and value:
        yield f"{key}:"
        for child in cast("Sequence[object]", value):
            yield f"  - {format_flow(child)}"
    else:
        yield f"{key}: {format_flow(value)}"


def format_flow(value: object) -> str:
    """Return a value on one line."""
    if isinstance(value, Mapping):
        entries = cast("Mapping[str, object]", value).items()
        return "{" + ", ".join(f"{key}: {format_flow(child)}" for key, child in entries) + "}"
    if isinstance(value, list | tuple):
        return (
            "[" + ", ".join(format_flow(child) for child in cast("Sequence[object]", value)) + "]"
        )
    if isinstance(value, str):
        plain = PLAIN.fullmatch(value) and value.lower() not in RESERVED
        return value if plain else json.dumps(value, ensure_ascii=False)
    text = json.dumps(value)
    # Parsers of YAML 1.1 take 3e-05 for a word.
    return text.replace("e", ".0e") if isinstance(value, float) and "." not in text else text
