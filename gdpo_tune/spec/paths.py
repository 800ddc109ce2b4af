"""Paths of a sweep's resolved file: as they were written, and where they are.

    paths:
      - [".", /home/anna/project]
      - ["sqlite:///mlflow.db", "sqlite:////home/anna/project/mlflow.db"]

The first pair is the project: the directory in which the sweep's command ran. So the file means the
same from every directory. A path below the project is looked for where the project is now, then
where it was, then from the current directory. The identity of a sweep counts paths as written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from gdpo_tune.core.files import expand_path, is_local_source, is_present
from gdpo_tune.core.object_store import is_url
from gdpo_tune.core.registry import POLICIES
from gdpo_tune.core.task_files import is_task_file
from gdpo_tune.spec.problems import Problems, YamlNode

PATHS = "paths"
KEYS = ("task", "policy", "storage", "tracking.uri", "search.warm_start")
DATA_KEYS = ("data.source", "data.validation.source", "data.test.source")
PROJECT = "."
_PARTS = re.compile(r"(?s)(sqlite(?:\+\w+)?:///|)(.*?)((?<=\.py):\w+|)")
"""Beginning of an address, a path, and the class of a task."""


def is_path(key: str, text: str) -> bool:
    """Return whether the text of a key names a file or directory, and not a name or address."""
    if key == "task":
        return is_task_file(text)
    if key == "policy":
        return text not in POLICIES and is_present(expand_path(text))
    if key == "tracking.uri":
        return text.startswith("sqlite")
    return bool(text) and (is_local_source(text) if key in DATA_KEYS else not is_url(text))


def make_absolute(text: str) -> str:
    """Return a path with `~` and variables expanded, from the current directory on."""
    before, path, after = _split(text)
    return f"{before}{expand_path(path).absolute()}{after}"


def expand_address(uri: str) -> str:
    """Return the address of a SQLite file with `~` and variables expanded; any other as it is."""
    before, path, _ = _split(uri)
    return f"{before}{expand_path(path)}" if before else uri


def take_paths(root: YamlNode, file: Path, problems: Problems) -> dict[str, str]:
    """Let the paths of a resolved file hold from the current directory; remove its `paths:`.

    Returns:
        Absolute text -> text as written, of what has changed; the project stands for `.`. It is
        empty in the project's own directory.
    """
    node = (root.entries or {}).pop(PATHS, None)
    pairs = [] if node is None else [tuple(e.elements or ()) for e in node.elements or ()]
    if any(len(pair) != 2 for pair in pairs):
        problems.add((node or root).mark, PATHS, None, "not pairs of paths", "remove the key")
        return {}
    stored = {str(written.value): str(absolute.value) for written, absolute in pairs}
    was = Path(stored.get(PROJECT, "."))
    now = _find_project(was, root, stored, file)
    here = Path.cwd()
    moved = {} if now == here else {str(now): PROJECT}
    for path, node in list(root.walk()):
        key, text = ".".join(p for p in path if isinstance(p, str)), str(node.value)
        if key not in (*KEYS, *DATA_KEYS) or not node.value or text in POLICIES:
            continue
        if node.mark.source != str(file):
            continue  # of --set
        is_sure = text in stored or (key in KEYS and is_path(key, text))
        before, place, after = _split(stored.get(text, text))
        below = Path(place).relative_to(was) if Path(place).is_relative_to(was) else Path(place)
        places = [now / expand_path(str(below)), Path(place), here / expand_path(_split(text)[1])]
        found = next(filter(is_present, places), places[0] if is_sure else None)
        if found not in (None, places[2]):
            above = root.find(path[:-1])
            new = f"{before}{found}{after}"
            (above.entries or above.elements)[path[-1]] = replace(node, value=new)  # type: ignore
            moved[new] = text
    return moved


def list_pairs(values: Iterable[tuple[str, str]], written: dict[str, str]) -> tuple[object, ...]:
    """Return the pairs of `paths:` for key and text of all paths; `written` as `take_paths`."""
    project = next((place for place, text in written.items() if text == PROJECT), str(Path.cwd()))
    pairs = {PROJECT: project}
    for key, text in values:
        if is_path(key, text):
            pairs[written.get(text, text)] = make_absolute(text)
    return tuple(pairs.items())


def _find_project(was: Path, root: YamlNode, stored: dict[str, str], file: Path) -> Path:
    """Return where a project is now, by the place of a sweep in it."""
    written, sweeps = root.get(("storage",)), file.absolute().parent.parent
    storage = Path(stored.get(str(written.value), str(written.value)) if written else "/")
    if storage.is_relative_to(was):
        below = storage.relative_to(was).parts
        if not below or sweeps.parts[-len(below) :] == below:
            return Path(*sweeps.parts[: len(sweeps.parts) - len(below)])
    return was.absolute()


def _split(text: str) -> tuple[str, str, str]:
    found = _PARTS.fullmatch(text)
    assert found is not None, "each part may be empty"
    return found[1], found[2], found[3]
