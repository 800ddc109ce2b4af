"""Where things of a sweep lie, and what they are called where others give the rules for names."""

from __future__ import annotations

import os
import re
from pathlib import Path

from gdpo_tune.core.object_store import is_url
from gdpo_tune.core.service_url import split_service_url

LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
"""RFC 1035, which RayJobs need: RFC 1123 without a digit at the start."""


def placed(path: str, root: Path) -> str:
    """A path of the file as an absolute one; an address as it is."""
    return path if is_url(path) else str((root / os.path.expanduser(path)).absolute())


def why_no_folder(path: str) -> tuple[str, str] | None:
    """Reason and fix of what cannot be a folder of this machine; None for what can."""
    if is_url(path):
        return "an address, not a folder", "write a folder of this machine"
    if os.path.expanduser(path).startswith("~"):
        return "there is no such user, in whose home it would be", "write it from / on"
    return None


def why_no_dashboard(address: str) -> str:
    """Why an address is not that of a cluster's dashboard; empty if it is. It shows no password."""
    try:
        parts = split_service_url(address)
    except ValueError as error:
        return str(error)
    if parts.username or parts.password:
        return "a user or a password stands in it, which nobody would be sent"
    if parts.query or parts.fragment:
        return "something stands behind ? or #"
    return ""


def why_no_label(name: str, longest: int) -> tuple[str, str] | None:
    """Reason and fix where Kubernetes would not take a name; None where it does.

    Args:
        name: of a schedule.
        longest: most characters that are left for it.
    """
    fix = f"write name: and at most {longest} small letters, digits and '-', a letter first"
    if not LABEL.fullmatch(name):
        return "not a name of Kubernetes (RFC 1123)", fix
    if len(name) > longest:
        return f"{len(name)} characters, too long for a name of Kubernetes here", fix
    return None
