"""Addresses: of repositories on the Hub, of web services, and of a Ray cluster with its token.

RAY_AUTH_MODE is "token" or "disabled"; without it, a token is used if there is one. The token
comes from `RAY_AUTH_TOKEN`, from the file that `RAY_AUTH_TOKEN_PATH` names, or from
`~/.ray/auth_token`, in that order, as in Ray itself. Mistakes are reported here, because Ray ends
the process without a message in mode "token" without a token.
"""

from __future__ import annotations

import ipaddress
import os
import re
import urllib.parse
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.files import HUB_ID

MANIFEST = "gdpo_tune.json"
"""File of a repository that says which candidate of which sweep it holds."""
RepositoryKind = Literal["model", "dataset"]


class Repository(NamedTuple):
    """A repository on the Hub."""

    kind: RepositoryKind
    id: str
    """`USER/NAME`."""

    @property
    def path(self) -> str:
        """Path of its page on the Hub: `USER/NAME`, `datasets/USER/NAME`."""
        return f"{'datasets/' if self.kind == 'dataset' else ''}{self.id}"


def is_hub_address(address: str) -> bool:
    """Return whether an address is one of the Hub, which holds no sweeps."""
    return address.lower().startswith("hf://")


def find_id_problem(repository: str) -> str:
    """Return why no repository on the Hub can have an id; empty if one can."""
    is_id = HUB_ID.fullmatch(repository)
    if not is_id or "--" in repository or ".." in repository or repository.endswith(".git"):
        return (
            "not of the form USER/NAME (of letters, digits, '.', '_', '-'; each at most 96 "
            "characters, no '--' and no '..')"
        )
    return ""


def refuse_hub_address(address: str) -> None:
    """Raise `UsageError` for a sweep on the Hub, where none can be kept or read."""
    if is_hub_address(address):
        raise UsageError(
            f"{address}: the Hub holds no sweeps: publish writes their numbers to sweep.json\n"
            "    fix: name a directory, or an object store such as s3://bucket/sweeps"
        )


_PLAIN = re.compile(r"[!-~]+")
_NAME = re.compile(r"[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*\.?")
_LONGEST_NAME = 253


def split_service_url(url: str) -> urllib.parse.SplitResult:
    """Split `http[s]://[user:password@]host[:port][/path]` into its parts.

    Raises:
        ValueError: it is no such address; the message shows no part of it, because it may hold
            credentials.
    """
    if not _PLAIN.fullmatch(url):
        raise ValueError("blanks, control characters and letters beyond ASCII cannot be in it")
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError:
        # NOTE: its message would show what it takes for the port: the half of a password.
        raise ValueError("its host or its port is malformed") from None
    host = parts.hostname
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError("it must be http[s]://HOST[:PORT]")
    if port == 0:
        raise ValueError("its port must be from 1 to 65535")
    is_valid = len(host) <= _LONGEST_NAME and _NAME.fullmatch(host)
    if ":" in host:
        with suppress(ValueError):
            is_valid = ipaddress.IPv6Address(host)
    if not is_valid:
        raise ValueError("its host is neither a name nor a number")
    return parts


def find_address_problem(address: str, *, query: bool = False) -> str:
    """Return why an address cannot be called, without its password; empty if it can.

    `query` allows a query and a fragment.
    """
    try:
        parts = split_service_url(address)
    except ValueError as error:
        return str(error)
    if parts.username or parts.password:
        return "it has a user or a password, which would not be sent"
    return "it has something behind ? or #" if (parts.query or parts.fragment) and not query else ""


RAY_ADDRESS, RAY_AUTH_MODE = "RAY_ADDRESS", "RAY_AUTH_MODE"
RAY_TOKEN, RAY_TOKEN_PATH = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
RAY_TOKEN_FIX = f"export {RAY_TOKEN_PATH}=FILE with the cluster's token, or {RAY_TOKEN}=..."


def check_ray_address(text: str, option: str) -> str:
    """Return an address that `ray.init` can join, `auto` or `HOST:PORT`; refuse another one."""
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\s:/@\[\]]+):(\d{1,5})", text)
    if text == "auto" or (match is not None and 0 < int(match[2]) < 2**16):
        return text
    shown = text.rpartition("@")[2]  # the part before may hold a password
    raise UsageError(
        f"{option} = {shown}: a cluster is joined on one of its nodes, by auto or HOST:PORT\n"
        "    fix: write the head's address, which has port 6379 by default; from a machine that is "
        "no node of the cluster: --submit http://HOST:8265"
    )


def find_ray_token(environment: Mapping[str, str]) -> str:
    """Find the token to send; empty for none.

    Raises:
        UsageError: mode "token" without a token, a file that cannot be read, or another mode.
    """
    mode = environment.get(RAY_AUTH_MODE, "").lower()
    if mode not in ("", "token", "disabled"):
        raise _build_token_error(
            f"{RAY_AUTH_MODE} = {environment[RAY_AUTH_MODE]}: it must be token or disabled"
        )
    if mode == "disabled":
        return ""
    token = _read_token_variables(environment)
    file = Path(environment.get("HOME", ""), ".ray", "auth_token")
    if not token and environment.get("HOME") and file.is_file():
        token = _read_token(file, str(file))
    if mode == "token" and not token:
        raise _build_token_error(f"{RAY_AUTH_MODE} = token, and there is no token")
    return token


def enable_ray_token(environment: MutableMapping[str, str]) -> None:
    """Make Ray send a token that a variable names; call this before Ray is imported.

    By default Ray sends no token to an explicit address. A token in the home directory keeps its
    meaning for Ray: it is used for `auto` alone. Errors are those of `find_ray_token`.
    """
    find_ray_token(environment)
    if not environment.get(RAY_AUTH_MODE) and _read_token_variables(environment):
        environment[RAY_AUTH_MODE] = "token"


def _read_token_variables(environment: Mapping[str, str]) -> str:
    if environment.get(RAY_TOKEN):
        return environment[RAY_TOKEN].strip()
    if not environment.get(RAY_TOKEN_PATH):
        return ""
    file = Path(os.path.expanduser(environment[RAY_TOKEN_PATH]))
    content = _read_token(file, f"{RAY_TOKEN_PATH} = {file}")
    if not content:
        raise _build_token_error(f"{RAY_TOKEN_PATH} = {file}: the file is empty")
    return content


def _read_token(file: Path, name: str) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text"
        raise _build_token_error(f"{name}: {reason}") from None


def _build_token_error(reason: str) -> UsageError:
    return UsageError(f"{reason}\n    fix: {RAY_TOKEN_FIX}")
