"""Paths and addresses of a scheduled sweep."""

from __future__ import annotations

import os
from pathlib import Path

from gdpo_tune.core.object_store import is_url
from gdpo_tune.core.service_url import split_service_url
from gdpo_tune.spec.base import refused


def resolve_path(path: str, root: Path) -> str:
    """Return a path of the file as an absolute one, and an address as it is."""
    return path if is_url(path) else str((root / os.path.expanduser(path)).absolute())


def check_location(path: str) -> str:
    """Return an address or a path; refuse the home of an unknown user."""
    if not is_url(path) and os.path.expanduser(path).startswith("~"):
        fix = "write an absolute path, which begins with /"
        raise refused("there is no user of that name", fix)
    return path


def check_directory(path: str) -> str:
    """Return a path that can be a directory of this machine; refuse others."""
    if is_url(path):
        raise refused("an address, not a directory", "write a directory of this machine")
    return check_location(path)


def address_problem(address: str, *, query: bool = False) -> str:
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
