"""What `search.warm_start` can get wrong: nothing that learns, or sweeps over something else."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from gdpo_tune.core import registry
from gdpo_tune.core.errors import SpecError
from gdpo_tune.core.files import is_file
from gdpo_tune.spec.identity import differences, meaning
from gdpo_tune.spec.model import JOURNAL, SPEC, Constraint, ObjectiveSpec, Search, SweepSpec
from gdpo_tune.spec.problems import KeyPath, Mark, Node, Problems, one_of
from gdpo_tune.spec.schedulers import PbtSettings
from gdpo_tune.spec.source import read


def check_warm_start(
    search: Search | None,
    task: str | None,
    objectives: Mapping[str, ObjectiveSpec],
    constraints: Mapping[str, Constraint],
    root: Node,
    problems: Problems,
) -> None:
    """Something learns, and every folder holds a sweep over the same task, with objectives in the
    same directions."""
    if search is None or not search.warm_start:
        return
    key: KeyPath = ("search", "warm_start")
    useless = _nothing_learns(search)
    if useless:
        problems.at(root.find(key), key, *useless)
        return
    seen: set[Path] = set()
    for index, folder in enumerate(search.warm_start):
        path = (*key, index)
        reason, fix = _unlike(folder_of(folder), task, objectives, constraints)
        if not reason and folder_of(folder).resolve() in seen:
            reason, fix = "named twice, which would count its trials twice", "remove one of them"
        seen.add(folder_of(folder).resolve())
        if reason:
            problems.at(root.find(path), path, reason, fix)


def folder_of(text: str) -> Path:
    """The folder of an earlier sweep, as it was written."""
    return Path(os.path.expanduser(text))


def _nothing_learns(search: Search) -> tuple[str, str] | None:
    """Why no earlier trial could change a proposal, and what to do; None if one could."""
    if isinstance(search.scheduler, PbtSettings):
        reason = "the members of a population begin spread over the space: nothing proposes them"
        return reason, "remove the key, or write another scheduler"
    sampler = registry.SAMPLERS.get(search.sampler)
    if sampler is not None and not sampler.learns:
        learning = [name for name, info in registry.SAMPLERS.items() if info.learns]
        fix = f"remove the key, or write as sampler one of {one_of(learning)}"
        return f"the sampler {search.sampler} learns from no trial", fix
    return None


def _unlike(
    folder: Path,
    task: str | None,
    objectives: Mapping[str, ObjectiveSpec],
    constraints: Mapping[str, Constraint],
) -> tuple[str, str]:
    """Why a sweep has nothing to tell this one, and what to do; both empty if it has."""
    remove = "name another folder, or remove this one"
    nothing = "there is no sweep in this folder", "name the folder of a sweep, such as runs/code"
    if not is_file(folder / SPEC):
        return nothing
    try:
        earlier = read(folder / SPEC, (), None, Problems(Mark(str(folder / SPEC), 1)))
    except SpecError as error:
        return f"its {SPEC} cannot be read: {error}", remove
    if not is_file(folder / JOURNAL) and "ledger" not in (earlier.entries or {}):
        return nothing
    if task is not None and earlier.find(("task",)).value != task:
        return f"its task is {earlier.find(('task',)).plain()}, not {task}", remove
    known = {
        name: node.find(("direction",)).value
        for name, node in (earlier.find(("objectives",)).entries or {}).items()
    }
    asked = {name: objective.direction for name, objective in objectives.items()}
    missing = [name for name in asked if name not in known]
    if missing:
        return f"{one_of(missing)} was no objective there, but {one_of(known)}", remove
    turned = [name for name, direction in asked.items() if known[name] != direction]
    if turned:
        return f"{one_of(turned)} went the other way there", remove
    bounded = {*known, *(earlier.find(("constraints",)).entries or {})}
    unknown = [name for name in constraints if name not in bounded]
    if unknown:
        reason = (
            f"{one_of(unknown)} was neither objective nor constraint there, but is a constraint"
        )
        return reason, remove
    return "", ""


def warm_start_doubts(spec: SweepSpec) -> Iterator[str]:
    """Earlier sweeps that trained in another way: their values are not what this one would find."""
    from gdpo_tune.spec.load import load_spec

    for index, folder in enumerate(spec.search.warm_start):
        earlier = load_spec(folder_of(folder) / SPEC, to_run=False)
        found = differences(meaning(earlier), meaning(spec))
        decisive = [line for line in found if not line.startswith(("space.", "objectives."))]
        if decisive:
            yield (
                f"search.warm_start[{index}] = {folder}: there {'; '.join(decisive)}, so its "
                "trials measured something a little different. Leave it out if that changes which "
                "configurations are good."
            )
