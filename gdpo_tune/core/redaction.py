"""Environment variables whose values are secrets: known by their names, or by the values."""

from __future__ import annotations

import re

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
