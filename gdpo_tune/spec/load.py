"""From a YAML file and `--set` overrides to a `SweepSpec`, or to every problem at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from gdpo_tune.core.parameters import PARAMETERS, list_parameters
from gdpo_tune.core.registry import TaskInfo
from gdpo_tune.spec import (
    parse_space,
    search_section,
    storage_section,
    task_section,
    training_section,
)
from gdpo_tune.spec.data_section import check_data
from gdpo_tune.spec.model import SweepSpec
from gdpo_tune.spec.objectives import check_metrics
from gdpo_tune.spec.problems import Problems, SourceMark, YamlNode
from gdpo_tune.spec.sandbox_section import check_sandbox
from gdpo_tune.spec.sections import read_section
from gdpo_tune.spec.source import read_yaml
from gdpo_tune.spec.warm_start import check_warm_start

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
) -> SweepSpec:
    """Read, merge and validate a sweep file.

    Args:
        path: the YAML file, which is laid over the files that it `extends:`.
        overrides: `key=value` with dotted keys and YAML values; later ones win.
        name: the sweep's name, instead of the file's.
        to_run: whether anything is to be trained, which takes the sweep's data, the sweeps that it
            learns from, and its packages. Other resources of the machine: `check_resources`.

    Raises:
        SpecError: anything is wrong with the file or an override; it lists every problem, each
            with its line, value, reason and fix.
    """
    path = Path(path)
    problems = Problems(SourceMark(str(path), 1))
    root = problems.root = read_yaml(path, overrides, name, problems)
    problems.refuse_empty(root)
    problems.refuse_unprintable(root)
    data = cast("dict[str, Any]", root.to_plain())
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
    problems.raise_if_any()
    experiment = spec.tracking.experiment or spec.name
    tracking = spec.tracking.model_copy(update={"experiment": experiment})
    return spec.model_copy(update={"tracking": tracking})


def _check(spec: SweepSpec, task: TaskInfo | None, problems: Problems, *, to_run: bool) -> None:
    """Note problems between keys; a key with a problem of its own has its default in `spec`."""
    training, search, space, resources = spec.training, spec.search, spec.space, spec.resources
    if task is not None:
        task_section.check_policy(spec.policy, spec.task, task, problems)
        task_section.check_prompts(training, spec.data.source, spec.task, task, problems)
        task_section.check_positions(training, spec.policy, problems)
        parse_space.check_ranges(space, task, problems)
        check_metrics(task, spec.objectives, spec.constraints, resources.gpus, problems)
    parse_space.check_weights(space, problems)
    training_section.check_length_limit(training, problems)
    training_section.check_group_sizes(space, training, problems)
    training_section.check_resources(resources, spec.rollout.engine, space, training, problems)
    search_section.check_search(search, space, training.steps, resources.gpus, problems)
    storage_section.check_storage(spec.storage, spec.ledger, resources.workers, problems)
    task_section.check_rollout(spec.rollout, problems)
    if to_run:
        check_warm_start(spec, problems)
        check_sandbox(spec.sandbox, problems)
        check_data(spec.data, spec.task, problems)
        task_section.check_model(spec.model, spec.policy, problems)
