"""Where things of a sweep lie, and what they are called where others give the rules for names."""

from __future__ import annotations

import re
from pathlib import Path

from gdpo_tune.clusters.store import is_url

LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
"""RFC 1035, which RayJobs need: RFC 1123 without a digit at the start."""


def placed(path: str, root: Path) -> str:
    """A path of the file as an absolute one; an address as it is."""
    return path if is_url(path) else str((root / Path(path).expanduser()).absolute())


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
