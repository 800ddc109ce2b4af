"""Secrets, known by the names of their variables or by their form, and texts without them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import cast

_SECRET_NAME = re.compile(
    r"TOKEN(_|$)|SECRET|PASS(WORD|WD|PHRASE)|(^|_)PASS(_|$)|CREDENTIAL|(^|_|API|ACCESS)KEY(_ID)?$"
    r"|(^|_)AUTH$|COOKIE|(^|_)(DSN|PAT|SAS|WEBHOOK)(_|$)",
    re.IGNORECASE,
)
_PLACE_NAME = re.compile(r"_(PATH|FILE|DIR)$", re.IGNORECASE)
"""Names of places where secrets are: `HF_TOKEN_PATH`."""
_SECRET_VALUE = re.compile(
    r"(?<![\w-])(hf_\w{20,}|(sk|rk)-[\w-]{16,}|gh[a-z]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|xox[a-z]-[\w-]{10,}|AKIA[0-9A-Z]{16})|-----BEGIN [A-Z ]*PRIVATE KEY"
    r"|://[^/@\s:]*:(?!\*{3}@)[^@\s]+@"
)
"""Tokens by their prefixes, private keys, and addresses whose password is not hidden yet, anywhere
in a value."""
_ASSIGNMENT = re.compile(
    r"""\b([A-Z_][A-Z0-9_]*)(\s*[:=]\s*)("[^"]*"|'[^']*'|\[[^]]*]|\{[^}]*}|[^\s,{}\[\]]+)"""
)
HIDDEN = "***"


def is_secret(name: str, value: str = "") -> bool:
    """Return whether a variable of this name, or with this value, holds a secret."""
    by_name = _SECRET_NAME.search(name) and not _PLACE_NAME.search(name)
    return bool(by_name or _SECRET_VALUE.search(value))


def redact_secrets(text: str) -> str:
    """Return a text without the values that it gives to secret variables, `NAME=` or `NAME:`."""

    def hide(match: re.Match[str]) -> str:
        name, sign, value = match.groups()
        return f"{name}{sign}{HIDDEN}" if is_secret(name, value.strip("'\"")) else match[0]

    return _ASSIGNMENT.sub(hide, text)


def redact_passwords(text: str) -> str:
    """Return addresses without the passwords in them."""
    # In the address of a database a password may hold a slash, or be one of the options.
    text = re.sub(r"(https?://[^/@:]*):[^@\s/]*@", r"\1:***@", text)
    text = re.sub(r"(?<!http)(?<!https)(://[^/@:]*):[^@\s]*@", r"\1:***@", text)
    return re.sub(r"([?&](?:ssl)?password=)[^&\s]*", r"\1***", text)


def redact_values(value: object, name: str = "") -> object:
    """Return a value without secrets, which their own form or the name of their key gives away.

    A reward whose name looks like that of a secret loses its value in a message. That harms less
    than a token in one.
    """
    if isinstance(value, Mapping):
        entries = cast("Mapping[str, object]", value).items()
        return {key: redact_values(child, key) for key, child in entries}
    if isinstance(value, list | tuple):
        return [redact_values(child, name) for child in cast("Sequence[object]", value)]
    if is_secret(name):
        return HIDDEN
    return redact_text(value) if isinstance(value, str) else value


def redact_text(text: str) -> str:
    """Return a text without the secrets in it; of an address it loses only the password."""
    public = redact_passwords(text)
    name, sign, value = text.partition("=")
    if public == text and sign and "://" not in name and is_secret(name.strip(), value):
        return f"{name}={HIDDEN}"
    return HIDDEN if public == text and is_secret("", text) else redact_secrets(public)
