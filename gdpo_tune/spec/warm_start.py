"""Checks of `search.warm_start`: something learns, and the sweeps are about the same."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from gdpo_tune.core import registry
from gdpo_tune.core.errors import SpecError
from gdpo_tune.core.files import is_file
from gdpo_tune.spec.model import JOURNAL, SPEC, SweepSpec
from gdpo_tune.spec.problems import Mark, Problems, one_of
from gdpo_tune.spec.search_section import PbtSettings, Search
from gdpo_tune.spec.source import read_document

KEY = ("search", "warm_start")


def folder_of(text: str) -> Path:
    """Return the directory of an earlier sweep, as it is written in the file."""
    return Path(os.path.expanduser(text))


def check_warm_start(spec: SweepSpec, problems: Problems) -> None:
    """Refuse earlier sweeps where nothing learns, and those over something else."""
    useless = _explain_useless(spec.search)
    if useless and spec.search.warm_start:
        problems.refuse(KEY, *useless, given=("search.scheduler", "search.sampler"))
        return
    seen: set[Path] = set()
    for index, text in enumerate(spec.search.warm_start):
        directory = folder_of(text)
        complaint = _compare(directory, spec, problems)
        if complaint is None and directory.resolve() in seen:
            reason = "named twice, which would count its trials twice"
            complaint = reason, "remove one of them"
        seen.add(directory.resolve())
        if complaint is not None:
            problems.refuse((*KEY, index), *complaint)


def _explain_useless(search: Search) -> tuple[str, str] | None:
    """Return why no earlier trial could change a proposal, and the fix; None if one could."""
    if isinstance(search.scheduler, PbtSettings):
        reason = "the members of a population begin spread over the space: nothing proposes them"
        return reason, "remove the key, or write another scheduler"
    sampler = registry.SAMPLERS.get(search.sampler)
    if sampler is not None and not sampler.learns:
        learning = [name for name, info in registry.SAMPLERS.items() if info.learns]
        fix = f"remove the key, or write as sampler one of {one_of(learning)}"
        return f"the sampler {search.sampler} learns from no trial", fix
    return None


def _compare(directory: Path, spec: SweepSpec, problems: Problems) -> tuple[str, str] | None:
    """Return why nothing can be learned from a sweep, and the fix; None if something can."""
    remove = "name another directory, or remove this one"
    nothing = "there is no sweep in this directory", "name that of a sweep, such as runs/code"
    file = directory / SPEC
    if not is_file(file):
        return nothing
    try:
        document = read_document(file, (), None, Problems(Mark(str(file), 1)))
    except SpecError as error:
        return f"its {SPEC} cannot be read: {error}", remove
    earlier = cast("dict[str, Any]", document.plain())
    if not is_file(directory / JOURNAL) and "ledger" not in earlier:
        return nothing
    if earlier.get("task") != spec.task and not problems.about("task"):
        return f"its task is {earlier.get('task')}, not {spec.task}", remove
    judged = {key: _entries(earlier.get(key)) for key in ("objectives", "constraints")}
    directions = {
        name: _entries(goal).get("direction") for name, goal in judged["objectives"].items()
    }
    missing = [name for name in spec.objectives if name not in directions]
    if missing:
        return f"{one_of(missing)} was no objective there, but {one_of(directions)}", remove
    turned = [name for name, o in spec.objectives.items() if directions[name] != o.direction]
    if turned:
        return f"{one_of(turned)} went the other way there", remove
    unknown = [n for n in spec.constraints if n not in directions | judged["constraints"]]
    if unknown:
        names = one_of(unknown)
        return f"{names} was neither objective nor constraint there, but is a constraint", remove
    return None


def _entries(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}
