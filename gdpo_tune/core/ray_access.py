"""How a Ray cluster that is there already is reached: its address, and a token if it wants one.

The token is found where Ray itself looks. `RAY_AUTH_MODE` is `token` or `disabled`; left out, a
token that is there is used. Ray takes it from `RAY_AUTH_TOKEN`, from the file that
`RAY_AUTH_TOKEN_PATH` names, or from `~/.ray/auth_token`, in that order. What is wrong with them is
said here: Ray ends the process without a word of its own where mode `token` finds no token.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from gdpo_tune.core.errors import UsageError

ADDRESS = "RAY_ADDRESS"
MODE, TOKEN, FILE = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
MODES = ("token", "disabled")
FIX = f"    fix: export {FILE}=FILE with the cluster's token, or {TOKEN}=..."

_PLACE = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:/@\[\]]+):(\d{1,5})")


def address(text: str, given_as: str) -> str:
    """An address that `ray.init` can join: `auto`, or `HOST:PORT`.

    Args:
        text: what was given.
        given_as: an option or a variable, for the message.

    Raises:
        UsageError: it is no such address.
    """
    found = _PLACE.fullmatch(text)
    if text == "auto" or (found is not None and 0 < int(found[2]) < 2**16):
        return text
    shown = text.rpartition("@")[2]  # what stands before may be a password
    raise UsageError(
        f"{given_as} = {shown}: a cluster is joined on one of its nodes, by auto or HOST:PORT\n"
        "    fix: write the head's address, which has port 6379 by default; from a machine that is "
        "no node of the cluster: --submit http://HOST:8265"
    )


def token(environment: Mapping[str, str]) -> str:
    """The token to send; empty for none.

    Raises:
        UsageError: mode `token` without one, a file that cannot be read, or another mode.
    """
    mode = _mode(environment)
    if mode == "disabled":
        return ""
    found = _given(environment) or _at_home(environment)
    if mode == "token" and not found:
        raise UsageError(f"{MODE} = token, and there is no token\n{FIX}")
    return found


def settle(environment: MutableMapping[str, str]) -> None:
    """Let Ray, once it is imported, send a token that was given.

    By itself it sends none to an address that is written out, unless the mode says so. A token that
    merely lies in the home directory stays what it is for Ray: used for `auto` alone.

    Raises:
        UsageError: see `token`.
    """
    token(environment)
    if not environment.get(MODE) and _given(environment):
        environment[MODE] = "token"


def _mode(environment: Mapping[str, str]) -> str:
    mode = environment.get(MODE, "").lower()
    if mode and mode not in MODES:
        raise UsageError(f"{MODE} = {environment[MODE]}: it is token or disabled\n{FIX}")
    return mode


def _given(environment: Mapping[str, str]) -> str:
    if environment.get(TOKEN):
        return environment[TOKEN].strip()
    if not environment.get(FILE):
        return ""
    file = Path(os.path.expanduser(environment[FILE]))
    found = _text(file, f"{FILE} = {file}")
    if not found:
        raise UsageError(f"{FILE} = {file}: the file is empty\n{FIX}")
    return found


def _at_home(environment: Mapping[str, str]) -> str:
    home = environment.get("HOME")
    file = Path(home, ".ray", "auth_token") if home else None
    if file is None or not file.is_file():
        return ""
    return _text(file, str(file))


def _text(file: Path, called: str) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text"
        raise UsageError(f"{called}: {reason}\n{FIX}") from None
