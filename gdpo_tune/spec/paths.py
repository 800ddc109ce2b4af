"""Paths of the file that a sweep keeps: as they were written, and where they are.

The file ends with `project:`, the absolute path of the directory in which the sweep's command ran.
So it means the same from every directory: a path is looked for in the project where it is now, then
where it was, then from the current directory. The identity of a sweep counts paths as written.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from gdpo_tune.core.files import expand_path, is_directory, path_exists
from gdpo_tune.core.object_store import is_url
from gdpo_tune.core.registry import POLICIES
from gdpo_tune.core.task_files import is_task_file
from gdpo_tune.spec.problems import YamlNode

PROJECT = "project"
PLACES = ("policy", "data.source", "data.validation.source", "data.test.source")
"""Keys whose value may be a path, and may be a name."""
_PARTS = re.compile(r"(?s)(sqlite(?:\+\w+)?:///|)(.*?)((?<=\.py):\w+|)")
"""Beginning of an address, a path, and the class of a task."""


def expand_address(uri: str) -> str:
    """Return the address of a SQLite file with `~` and variables expanded; any other as it is."""
    before, path, _ = _split(uri)
    return f"{before}{expand_path(path)}" if before else uri


def resolve_paths(root: YamlNode, file: Path) -> dict[str, str]:
    """Let the paths of a stored file hold from the current directory; remove its `project:`.

    Returns:
        Absolute path -> text as written, of what has changed; the project stands for `.`. It is
        empty in the project's own directory.
    """
    node = (root.entries or {}).pop(PROJECT, None)
    was, here = Path(str(node.value) if node else ""), Path.cwd()
    now = _find_project(was, root.get(("storage",)), file)
    changed = {} if now == here else {str(now): "."}
    for path, node in list(root.walk()):
        key, text = ".".join(part for part in path if isinstance(part, str)), str(node.value)
        if not node.value or text in POLICIES or node.mark.source != str(file):
            continue
        before, written, after = _split(text)
        is_certain = {
            "task": is_task_file(text),
            "storage": not is_url(text),
            "tracking.uri": bool(before),
            "search.warm_start": True,
        }.get(key, False)
        if not is_certain and key not in PLACES:
            continue
        place = expand_path(written)
        below = place.relative_to(was) if place.is_relative_to(was) else place
        places = [now / below, was / place, here / place]
        found = next(filter(path_exists, places), now / below if is_certain else here / place)
        if found != here / place:
            above, new = root.find(path[:-1]), f"{before}{found}{after}"
            (above.entries or above.elements)[path[-1]] = replace(node, value=new)  # type: ignore
            changed[new] = text
    return changed


def _find_project(was: Path, storage: YamlNode | None, file: Path) -> Path:
    """Return where a project is now, by the place of a sweep in it."""
    sweeps, kept = file.absolute().parent.parent, str(storage.value if storage else "/")
    now = os.path.normpath(sweeps / os.path.relpath(was, was / kept))
    is_there = os.path.normpath(Path(now, kept)) == str(sweeps) and is_directory(Path(now))
    return Path(now) if is_there else was.absolute()


def _split(text: str) -> tuple[str, str, str]:
    found = _PARTS.fullmatch(text)
    assert found is not None, "each part may be empty"
    return found[1], found[2], found[3]
