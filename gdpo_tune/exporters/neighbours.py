"""Modules beside the file of an own task, for an export that has a copy of that file."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

from gdpo_tune.exporters.bundle import PACKAGE
from gdpo_tune.exporters.glue.own_task import NEIGHBOURS


def copy_neighbours(file: Path) -> dict[str, bytes]:
    """Return name in the export -> content of modules that the file of a task imports.

    Those are modules beside the file or in the current directory, and what they import from there.
    """
    places = (file.parent, Path.cwd())
    copied: dict[str, Path] = {}
    waiting = [file]
    while waiting:
        for name in sorted(_list_imported(waiting.pop())):
            for copy, module in _find_beside(name, places):
                if module != file and copied.setdefault(copy, module) is module:
                    waiting.append(module)
    return {f"{NEIGHBOURS}/{name}": source.read_bytes() for name, source in copied.items()}


def _list_imported(file: Path) -> set[str]:
    """Return the first names of all modules that a file imports; none if it is no Python."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return set()
    names: list[str] = []
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                names += [alias.name for alias in node.names]
            case ast.ImportFrom(module=str(module), level=0):
                names.append(module)
            case _:
                pass
    return {name.partition(".")[0] for name in names}


def _find_beside(name: str, places: tuple[Path, ...]) -> Iterator[tuple[str, Path]]:
    """Yield name in the copy -> file of a module or package that Python finds in one of places."""
    if name in sys.stdlib_module_names or name == PACKAGE:
        return
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # a module that takes the place of another has no spec
        return
    if spec is None:
        return
    for package in map(Path, spec.submodule_search_locations or ()):
        if package.absolute().parent in places:
            for file in sorted(package.rglob("*.py")):
                yield str(file.relative_to(package.parent)), file
            return
    if spec.origin and Path(spec.origin).absolute().parent in places:
        yield Path(spec.origin).name, Path(spec.origin)
