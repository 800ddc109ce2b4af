"""Access to a running Ray cluster: its address, and a token if the cluster requires one.

RAY_AUTH_MODE is "token" or "disabled"; without it, a token is used if there is one. The token
comes from `RAY_AUTH_TOKEN`, from the file that `RAY_AUTH_TOKEN_PATH` names, or from
`~/.ray/auth_token`, in that order, as in Ray itself. Mistakes are reported here, because Ray ends
the process without a message in mode "token" without a token.
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

_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:/@\[\]]+):(\d{1,5})")


def check_ray_address(text: str, option: str) -> str:
    """Return an address that `ray.init` can join: `auto`, or `HOST:PORT`.

    Raises:
        UsageError: it is no such address; the message names the option or variable with it.
    """
    match = _ADDRESS.fullmatch(text)
    if text == "auto" or (match is not None and 0 < int(match[2]) < 2**16):
        return text
    shown = text.rpartition("@")[2]  # the part before may hold a password
    raise UsageError(
        f"{option} = {shown}: a cluster is joined on one of its nodes, by auto or HOST:PORT\n"
        "    fix: write the head's address, which has port 6379 by default; from a machine that is "
        "no node of the cluster: --submit http://HOST:8265"
    )


def find_token(environment: Mapping[str, str]) -> str:
    """Find the token to send; empty for none.

    Raises:
        UsageError: mode "token" without a token, a file that cannot be read, or another mode.
    """
    mode = environment.get(MODE, "").lower()
    if mode and mode not in MODES:
        raise UsageError(f"{MODE} = {environment[MODE]}: it must be token or disabled\n{FIX}")
    if mode == "disabled":
        return ""
    result = _read_variables(environment) or _read_home(environment)
    if mode == "token" and not result:
        raise UsageError(f"{MODE} = token, and there is no token\n{FIX}")
    return result


def enable_token(environment: MutableMapping[str, str]) -> None:
    """Make Ray send a token that a variable names; call this before Ray is imported.

    By default Ray sends no token to an explicit address. A token in the home directory keeps its
    meaning for Ray: it is used for `auto` alone.

    Raises:
        UsageError: see `find_token`.
    """
    find_token(environment)
    if not environment.get(MODE) and _read_variables(environment):
        environment[MODE] = "token"


def _read_variables(environment: Mapping[str, str]) -> str:
    if environment.get(TOKEN):
        return environment[TOKEN].strip()
    if not environment.get(FILE):
        return ""
    file = Path(os.path.expanduser(environment[FILE]))
    content = _read_token(file, f"{FILE} = {file}")
    if not content:
        raise UsageError(f"{FILE} = {file}: the file is empty\n{FIX}")
    return content


def _read_home(environment: Mapping[str, str]) -> str:
    if not environment.get("HOME"):
        return ""
    file = Path(environment["HOME"], ".ray", "auth_token")
    return _read_token(file, str(file)) if file.is_file() else ""


def _read_token(file: Path, name: str) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text"
        raise UsageError(f"{name}: {reason}\n{FIX}") from None
