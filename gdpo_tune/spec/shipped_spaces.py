"""The search spaces that ship, by name, beside the package in a clone and inside it elsewhere."""

from __future__ import annotations

from pathlib import Path

from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.files import expand_path, is_file
from gdpo_tune.spec.text import join_names, suggest

_PACKAGE = Path(__file__).parents[1]
DIRECTORIES = tuple(parent / "search_spaces" for parent in (_PACKAGE.parent, _PACKAGE))


def list_spaces() -> dict[str, Path]:
    """Return the search spaces that ship: name -> file."""
    found = (sorted(directory.glob("*.yaml")) for directory in DIRECTORIES)
    return {file.stem: file for file in next(filter(None, found), [])}


def find_space(name: str, option: str) -> Path:
    """Return the file of a search space that ships, or the file `name` itself.

    Raises:
        UsageError: there is neither; `option` is where the user wrote `name`.
    """
    file, shipped = expand_path(name), list_spaces()
    if is_file(file):
        return file
    if name in shipped:
        return shipped[name]
    raise UsageError(
        f"{option} {name}: no such file, and no search space that ships\n"
        f"    fix: {suggest(name, shipped)}write a YAML file, or one of {join_names(shipped)}"
    )
