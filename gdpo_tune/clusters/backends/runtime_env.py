"""Ray's runtime environment of a job: one directory, and the package as it is installed here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gdpo_tune.core.errors import BackendError
from gdpo_tune.core.object_store import is_url

NEVER_SENT = [".git", "__pycache__", "mlruns", "*.db"]
"""Patterns of files that only this machine needs; those of `.gitignore` are not sent either."""
PACKAGE = Path(__file__).resolve().parents[2]
"""Directory of this package."""


def build_runtime_env(directory: Path, storage: str, caller: str) -> dict[str, Any]:
    """Build the environment of a job whose working directory is a copy of `directory`.

    Relative paths mean the same there as here. The package is sent along, so a job runs the code
    that it was submitted with, whatever the cluster's image has; its requirements are not.

    Args:
        directory: is sent.
        storage: of the sweeps; not sent.
        caller: for messages.

    Raises:
        BackendError: the directory cannot or should not be sent.
    """
    directory = directory.resolve()
    if not directory.is_dir():
        raise BackendError(f"{caller}: {directory} is not a directory that could be sent")
    if directory in (Path("/"), Path.home().resolve()):
        raise BackendError(
            f"{caller}: {directory} is not sent to a cluster: it holds far more than a project\n"
            "    fix: name the directory that holds the search space, or call from there"
        )
    code = {} if PACKAGE.is_relative_to(directory) else {"py_modules": [str(PACKAGE)]}
    return {
        "working_dir": str(directory),
        "excludes": list_excludes(storage, directory),
        "env_vars": {"PYTHONUNBUFFERED": "1"},  # so that the log can be followed
        **code,
    }


def list_excludes(storage: str, directory: Path) -> list[str]:
    """Return the patterns that are not sent: sweeps, and what only this machine needs."""
    kept = None if is_url(storage) else Path(storage).resolve()
    if kept is None or kept == directory or not kept.is_relative_to(directory):
        return list(NEVER_SENT)  # in the directory itself no pattern tells sweeps from the rest
    return [*NEVER_SENT, f"/{kept.relative_to(directory)}"]


def relative_space(directory: Path, space: Path, caller: str) -> str:
    """Return the path of the search space within the directory that is sent.

    Raises:
        BackendError: it is not in there.
    """
    try:
        return str(space.resolve().relative_to(directory.resolve()))
    except ValueError:
        raise BackendError(
            f"{caller}: the search space {space} is not in {directory}, which is sent\n"
            "    fix: name the directory that holds it"
        ) from None
