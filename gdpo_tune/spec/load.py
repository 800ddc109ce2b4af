"""Reading of a YAML file and `--set` overrides as a `SweepSpec`, with every problem at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from gdpo_tune.core import registry
from gdpo_tune.core.errors import SpecError, SpecProblem
from gdpo_tune.core.files import expand_path, find_path_problem, is_file
from gdpo_tune.core.object_store import JOURNAL, SPEC
from gdpo_tune.core.parameters import PARAMETERS, list_parameters
from gdpo_tune.core.registry import TaskInfo
from gdpo_tune.spec import (
    data_section,
    environment,
    pack,
    parse_space,
    sandbox_section,
    search_section,
    storage_section,
    task_section,
    training_section,
)
from gdpo_tune.spec.model import SweepSpec
from gdpo_tune.spec.notation import get_mapping
from gdpo_tune.spec.objectives import check_metrics
from gdpo_tune.spec.paths import expand_address, resolve_paths
from gdpo_tune.spec.problems import Problems, SourceMark, YamlNode, hide_passwords, join_names
from gdpo_tune.spec.search_section import PbtSettings
from gdpo_tune.spec.sections import read_section
from gdpo_tune.spec.source import read_yaml

REQUIRED = {
    "objectives": "{correctness: {direction: maximize, reference: 0}}",
    "space": "{group_size: [4, 8]}",
}
"""Key that every sweep needs, besides its task -> an example."""


def load_spec(
    path: Path | str,
    overrides: Sequence[str] = (),
    name: str | None = None,
    *,
    to_run: bool = True,
    needs: list[SpecProblem] | None = None,
) -> SweepSpec:
    """Read, merge and validate a sweep file and the files that it `extends:`.

    `overrides` are `key=value` with dotted keys and YAML values; later ones win. `name` replaces
    the name in the file. `to_run` also checks what training needs: data, packages and the sweeps
    of `search.warm_start`. Where another machine will train, `needs` takes the data and packages
    that this one lacks, which are no errors then. For other resources of the machine see
    `find_machine_problems`.

    Raises:
        SpecError: the file or an override has problems; each with its line, value, reason and fix.
    """
    path = Path(path)
    problems = Problems(SourceMark(str(path), 1))
    root = problems.root = read_yaml(path, overrides, name, problems)
    written = resolve_paths(root, path) if path.name == SPEC else {}
    storage_section.take_tracking_variables(root)
    problems.refuse_unusable(root)
    environment.keep_texts(root)
    data = cast("dict[str, Any]", root.convert_to_plain())
    for key, example in REQUIRED.items():
        if key not in data:
            problems.refuse(key, "missing", f"add {key}: {example}")
    weighted = root.find(("space", "reward_weights")).entries or {}
    task = task_section.check_task(data.get("task"), weighted, problems)
    parameters = PARAMETERS if task is None else list_parameters(task)
    reader = parse_space.SpaceReader(parameters, problems)
    space = reader.read_space(data.get("space", {}))
    parsed = {
        "name": storage_section.check_name(data.get("name", path.stem), problems),
        "task": data["task"] if task is not None else "unknown",
        "policy": data.get("policy", task.embedded if task is not None else "unknown"),
        "space": space,
        "enqueue": reader.read_enqueue(data.get("enqueue", ()), space, task),
    }
    entries = {key: YamlNode(root.find((key,)).mark, value) for key, value in parsed.items()}
    spec = read_section(
        SweepSpec, YamlNode(root.mark, entries=(root.entries or {}) | entries), (), problems
    )
    assert spec is not None, "every key that is not parsed above has a default"
    _check(spec, task, problems, to_run=to_run)
    if needs is not None:
        problems.raise_if_any()
    if to_run:
        sandbox_section.check_modules(spec.sandbox, problems)
        data_section.check_presence(spec.data, problems)
        task_section.check_packages(spec.model, problems)
        training_section.check_optimizer(spec.training, problems)
    if needs is None:
        problems.raise_if_any()
    else:
        needs += problems.list_sorted()
    experiment = spec.tracking.experiment or spec.name
    places = {"experiment": experiment, "uri": expand_address(spec.tracking.uri)}
    tracking = spec.tracking.model_copy(update=places)
    for key in storage_section.TRACKING_VARIABLES:
        if node := root.get(("tracking", key)):
            tracking.origins[key] = str(node.mark)
    spec = spec.model_copy(update={"tracking": tracking})
    spec.set_written(written)
    return spec


def keep_recorded_tracking(spec: SweepSpec) -> SweepSpec:
    """Return `spec` with the tracking that its sweep began with, as far as its file has none.

    MLflow's variables may have changed since then: a note on stderr says so.
    """
    try:
        recorded = load_spec(spec.directory / SPEC, name=spec.name, to_run=False).tracking
    except SpecError:  # the sweep begins now, or another version wrote the file
        return spec
    kept: dict[str, str] = {}
    for key, variable in storage_section.TRACKING_VARIABLES.items():
        origin, before = spec.tracking.origins.get(key, "default"), getattr(recorded, key)
        if origin in ("default", variable) and before != (now := getattr(spec.tracking, key)):
            kept[key], spec.tracking.origins[key] = before, recorded.origins.get(key, SPEC)
            text = f"{spec.name} keeps tracking.{key} = {before}, as it began, not {now} ({origin})"
            print(f"note: {hide_passwords(text)}; --set changes that", file=sys.stderr)
    return spec.model_copy(update={"tracking": spec.tracking.model_copy(update=kept)})


def _check(spec: SweepSpec, task: TaskInfo | None, problems: Problems, *, to_run: bool) -> None:
    """Note problems between keys; a key with a problem of its own has its default in `spec`."""
    training, search, space, resources = spec.training, spec.search, spec.space, spec.resources
    if task is not None:
        task_section.check_policy(spec.policy, spec.task, task, problems)
        task_section.check_scoring(spec.scoring, spec.task, task, problems)
        task_section.check_prompts(training, spec.data.source, spec.task, task, problems)
        task_section.check_positions(training, spec.policy, problems)
        parse_space.check_ranges(space, task, problems)
        check_metrics(task, spec.objectives, spec.constraints, resources.gpus, problems)
    parse_space.check_weights(space, problems)
    training_section.check_length_limit(training, problems)
    training_section.check_group_sizes(space, training, problems)
    training_section.check_resources(resources, spec.rollout, space, training, problems)
    pack.check_pack(spec, problems)
    search_section.check_search(search, space, training.steps, resources.gpus, problems)
    storage_section.check_tracking(spec.tracking, problems)
    storage_section.check_storage(spec.storage, spec.ledger, resources.workers, problems)
    task_section.check_rollout(spec.rollout, spec.model, problems)
    training_section.check_sleep(spec.rollout, resources, problems)
    if to_run:
        check_warm_start(spec, problems)
        sandbox_section.check_sandbox(spec.sandbox, problems)
        data_section.check_data(spec.data, spec.task, problems)
        task_section.check_model(spec.model, spec.policy, problems)


def check_warm_start(spec: SweepSpec, problems: Problems) -> None:
    """Refuse earlier sweeps if no sampler learns, and those with another task or other metrics."""
    search, key = spec.search, ("search", "warm_start")
    sampler = registry.SAMPLERS.get(search.sampler)
    if not search.warm_start:
        return
    if isinstance(search.scheduler, PbtSettings):
        reason = "the members of a population begin spread over the space: no sampler proposes them"
        problems.refuse(key, reason, "remove the key, or write another scheduler")
        return
    if sampler is not None and not sampler.learns:
        learning = [name for name, info in registry.SAMPLERS.items() if info.learns]
        fix = f"remove the key, or write as sampler one of {join_names(learning)}"
        problems.refuse(key, f"the sampler {search.sampler} learns from no trial", fix)
        return
    seen: set[Path] = set()
    for index, directory in enumerate(map(expand_path, search.warm_start)):
        complaint = _compare(directory, spec, problems)
        if complaint is None and directory.resolve() in seen:
            reason = "named twice, which would count its trials twice"
            complaint = reason, "remove one of them"
        if complaint is not None:
            problems.refuse((*key, index), *complaint)
            continue
        seen.add(directory.resolve())


def _compare(directory: Path, spec: SweepSpec, problems: Problems) -> tuple[str, str] | None:
    remove, file = "name another directory, or remove this one", directory / SPEC
    unusable = find_path_problem(str(directory)) or "there is no sweep in this directory"
    no_sweep = unusable, "name that of a sweep, such as runs/code"
    if not is_file(file):
        return no_sweep
    try:
        document = read_yaml(file, (), None, Problems(SourceMark(str(file), 1)))
    except SpecError as error:
        return f"its {SPEC} cannot be read: {error}", remove
    earlier = get_mapping(document.convert_to_plain()) or {}
    if not is_file(directory / JOURNAL) and "ledger" not in earlier:
        return no_sweep
    if earlier.get("task") != spec.restore_written(spec.task) and not problems.has_problem("task"):
        return f"its task is {earlier.get('task')}, not {spec.task}", remove
    objectives = get_mapping(earlier.get("objectives")) or {}
    constraints = get_mapping(earlier.get("constraints")) or {}
    directions = {k: (get_mapping(goal) or {}).get("direction") for k, goal in objectives.items()}
    missing = [name for name in spec.objectives if name not in directions]
    if missing:
        reason = f"its objectives are {join_names(directions)}, without {join_names(missing)}"
        return reason, remove
    opposite = [name for name, o in spec.objectives.items() if directions[name] != o.direction]
    if opposite:
        return f"{join_names(opposite)} had the opposite direction there", remove
    unknown = join_names(n for n in spec.constraints if n not in {*objectives, *constraints})
    if unknown:
        return f"the constraint {unknown} was neither objective nor constraint there", remove
    return None
