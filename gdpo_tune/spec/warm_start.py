"""Checks of `search.warm_start`: something learns, and the sweeps are about the same."""

from __future__ import annotations

import os
from pathlib import Path

from gdpo_tune.core import registry
from gdpo_tune.core.errors import SpecError
from gdpo_tune.core.files import is_file
from gdpo_tune.spec.model import JOURNAL, SPEC, SweepSpec
from gdpo_tune.spec.notation import as_mapping
from gdpo_tune.spec.problems import Problems, SourceMark, join
from gdpo_tune.spec.search_section import PbtSettings
from gdpo_tune.spec.source import read_yaml


def expand_directory(text: str) -> Path:
    """Return the directory of an earlier sweep, as it is written in the file."""
    return Path(os.path.expanduser(text))


def check_warm_start(spec: SweepSpec, problems: Problems) -> None:
    """Refuse earlier sweeps where nothing learns, and those over something else."""
    search, key = spec.search, ("search", "warm_start")
    sampler = registry.SAMPLERS.get(search.sampler)
    if not search.warm_start:
        return
    if isinstance(search.scheduler, PbtSettings):
        reason = "the members of a population begin spread over the space: nothing proposes them"
        problems.refuse(key, reason, "remove the key, or write another scheduler")
        return
    if sampler is not None and not sampler.learns:
        learning = [name for name, info in registry.SAMPLERS.items() if info.learns]
        fix = f"remove the key, or write as sampler one of {join(learning)}"
        problems.refuse(key, f"the sampler {search.sampler} learns from no trial", fix)
        return
    seen: set[Path] = set()
    for index, directory in enumerate(map(expand_directory, search.warm_start)):
        complaint = _compare(directory, spec, problems)
        if complaint is None and directory.resolve() in seen:
            reason = "named twice, which would count its trials twice"
            complaint = reason, "remove one of them"
        seen.add(directory.resolve())
        if complaint is not None:
            problems.refuse((*key, index), *complaint)


def _compare(directory: Path, spec: SweepSpec, problems: Problems) -> tuple[str, str] | None:
    """Return why nothing can be learned from a sweep, and the fix; None if something can."""
    remove, file = "name another directory, or remove this one", directory / SPEC
    nothing = "there is no sweep in this directory", "name that of a sweep, such as runs/code"
    if not is_file(file):
        return nothing
    try:
        document = read_yaml(file, (), None, Problems(SourceMark(str(file), 1)))
    except SpecError as error:
        return f"its {SPEC} cannot be read: {error}", remove
    earlier = as_mapping(document.to_plain()) or {}
    if not is_file(directory / JOURNAL) and "ledger" not in earlier:
        return nothing
    if earlier.get("task") != spec.task and not problems.has_problem("task"):
        return f"its task is {earlier.get('task')}, not {spec.task}", remove
    objectives, constraints = (
        as_mapping(earlier.get(k)) or {} for k in ("objectives", "constraints")
    )
    directions = {k: (as_mapping(goal) or {}).get("direction") for k, goal in objectives.items()}
    missing = [name for name in spec.objectives if name not in directions]
    if missing:
        return f"{join(missing)} was no objective there, but {join(directions)}", remove
    turned = [name for name, o in spec.objectives.items() if directions[name] != o.direction]
    if turned:
        return f"{join(turned)} went the other way there", remove
    unknown = join(n for n in spec.constraints if n not in {*objectives, *constraints})
    if unknown:
        reason = "was neither objective nor constraint there, but is a constraint"
        return f"{unknown} {reason}", remove
    return None
