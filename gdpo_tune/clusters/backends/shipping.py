"""What a job gets to see of this machine: one folder, and the package as it is installed here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gdpo_tune.core.errors import BackendError
from gdpo_tune.core.object_store import is_url

NEVER_SENT = [".git", "__pycache__", "mlruns", "*.db"]
"""Patterns of what is only of use here; what `.gitignore` names stays here, too."""
PACKAGE = Path(__file__).resolve().parents[2]
"""Folder of this package."""
UNBUFFERED = {"PYTHONUNBUFFERED": "1"}
"""So that a log can be followed."""


def runtime_env(folder: Path, storage: str, who: str) -> dict[str, Any]:
    """Ray's runtime environment for a job: its working folder is a copy of `folder`.

    Relative paths mean the same there as here. The package comes along, so that a job runs the code
    that it was submitted with, whatever the cluster's image has; its requirements do not.

    Args:
        folder: what is sent.
        storage: where sweeps are kept; left out of what is sent.
        who: what asks, for messages.

    Raises:
        BackendError: the folder is not one to be sent.
    """
    folder = folder.resolve()
    if not folder.is_dir():
        raise BackendError(f"{who}: {folder} is no folder that could be sent")
    if folder in (Path("/"), Path.home().resolve()):
        raise BackendError(
            f"{who}: {folder} is not sent to a cluster: it holds far more than a project\n"
            "    fix: name the folder that holds the search space, or call from there"
        )
    code = {} if PACKAGE.is_relative_to(folder) else {"py_modules": [str(PACKAGE)]}
    return {
        "working_dir": str(folder),
        "excludes": excludes(storage, folder),
        "env_vars": dict(UNBUFFERED),
        **code,
    }


def excludes(storage: str, folder: Path) -> list[str]:
    """What is not sent along: sweeps that lie in the folder, and what is only of use here."""
    kept = None if is_url(storage) else Path(storage).resolve()
    if kept is None or kept == folder or not kept.is_relative_to(folder):
        return list(NEVER_SENT)  # of sweeps beside all else, nothing tells them from it
    return [*NEVER_SENT, f"/{kept.relative_to(folder)}"]


def name_in(folder: Path, space: Path, who: str) -> str:
    """The search space as it is found in what is sent.

    Raises:
        BackendError: it is not in the folder.
    """
    try:
        return str(space.resolve().relative_to(folder.resolve()))
    except ValueError:
        raise BackendError(
            f"{who}: the search space {space} is not in {folder}, which is sent\n"
            "    fix: name the folder that holds it"
        ) from None
