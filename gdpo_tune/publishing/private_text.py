"""Removal of what is about the author's machine from texts that are published."""

from __future__ import annotations

import re
import socket
from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from gdpo_tune.core.secret_names import HIDDEN, hide_secrets
from gdpo_tune.ledger.request_files import find_user

_ADDRESS = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s'\"<>()\[\]{},;]*", re.IGNORECASE)
_PATH = re.compile(r"(?<![\w/.:@*-])(?:~[\w.-]*)?(?:/[^\s/'\"<>()\[\]{},:;]+)+/?")
_NUMERIC_HOST = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b")
_NODE = re.compile(r"\b(node|host) [\w.-]*[\d.-][\w.-]*\w")
"""Name of a machine after the words that messages have before it."""
SHORTEST = 4
"""Fewest characters of a user's or machine's name that is looked for in texts: a shorter one may be
a part of other words."""
KEPT_KEYS = (
    *("distributions", "datetime_start", "datetime_complete", "study_name", "worker_id"),
    *("role", "proposer", "params", "action", "point", "packages", "git"),
)
"""Keys of a ledger's records whose values are never about a machine, and have a meaning: a user may
be called `search`."""
COMMON_NAMES = ("localhost", "root")
"""Names of machines and users that say nothing."""


class PrivateTextRemover:
    """Replacement of addresses, paths, machines, users and secrets in texts.

    A path gives its last part, all others a mark.
    """

    def __init__(self, names: Collection[str] = ()) -> None:
        """Look for `names` too, such as those of the machines that a sweep used."""
        own = {socket.gethostname(), socket.getfqdn(), find_user(), *names}
        words = sorted({n for n in own if len(n) >= SHORTEST and n not in COMMON_NAMES}, key=len)
        pattern = "|".join(rf"(?<![\w-]){re.escape(name)}(?![\w-])" for name in reversed(words))
        self._names = re.compile(pattern) if pattern else None

    def clean(self, text: str) -> str:
        """Return a text without what is private in it."""
        text = hide_secrets(_ADDRESS.sub(HIDDEN, text))
        text = _PATH.sub(lambda match: PurePosixPath(match[0]).name, text)
        text = _NUMERIC_HOST.sub(HIDDEN, text)
        text = _NODE.sub(rf"\1 {HIDDEN}", text)
        return self._names.sub(HIDDEN, text) if self._names else text

    def clean_all(self, content: Any) -> Any:
        """Return JSON whose texts are clean; keys and numbers stay."""
        if isinstance(content, str):
            return self.clean(content)
        if isinstance(content, Mapping):
            return {
                key: value if key in KEPT_KEYS else self.clean_all(value)
                for key, value in content.items()
            }
        if isinstance(content, Sequence):
            return [self.clean_all(value) for value in content]
        return content
