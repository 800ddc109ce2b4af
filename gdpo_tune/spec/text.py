"""Values, names and addresses in messages: in one line, with close matches, without secrets."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import cast

from gdpo_tune.core.redaction import HIDDEN, is_secret, redact_secrets


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


def format_bytes(count: float) -> str:
    """Return a number of bytes with two or three digits, in decimal units."""
    for unit, power in (("TB", 12), ("GB", 9), ("MB", 6)):
        if count >= 10**power:
            amount = count / 10**power
            return f"{amount:.1f} {unit}" if amount < 100 else f"{amount:,.0f} {unit}"
    return f"{count / 1000:.1f} kB"
