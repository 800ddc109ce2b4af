"""From a YAML file and `--set` overrides to a `SweepSpec`, or to every problem at once."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from gdpo_tune.core import registry, task_files
from gdpo_tune.core.errors import TaskFileError
from gdpo_tune.core.parameters import FAMILIES, PARAMETERS, ParameterInfo, parameters_of
from gdpo_tune.core.settings import (
    DataSettings,
    ModelSettings,
    RolloutSettings,
    SandboxSettings,
    TrainingSettings,
)
from gdpo_tune.spec import checks, divisors, limits
from gdpo_tune.spec.adapters_checks import check_model
from gdpo_tune.spec.data_checks import check_data
from gdpo_tune.spec.enqueue import parse_enqueue
from gdpo_tune.spec.judged import parse_constraints, parse_objectives
from gdpo_tune.spec.model import (
    Keep,
    Resources,
    Search,
    SweepSpec,
    Tracking,
)
from gdpo_tune.spec.parse_space import parse_space
from gdpo_tune.spec.population_checks import check_population
from gdpo_tune.spec.problems import Mark, Node, Problems, did_you_mean, one_of, scalars
from gdpo_tune.spec.rollout_checks import check_rollout
from gdpo_tune.spec.sandbox_checks import check_sandbox
from gdpo_tune.spec.sections import section, settings
from gdpo_tune.spec.source import read
from gdpo_tune.spec.space import Space
from gdpo_tune.spec.warm_start import check_warm_start

LONGEST_NAME = 100
"""Characters; names of folders and pages append to it."""
NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9._-]{{0,{LONGEST_NAME - 1}}}")


def load_spec(
    path: Path | str,
    overrides: Sequence[str] = (),
    name: str | None = None,
    *,
    to_run: bool = True,
) -> SweepSpec:
    """Read, merge and validate a sweep file.

    Args:
        path: the YAML file; what it `extends:` lies beneath it.
        overrides: `key=value` with dotted keys and YAML values; later ones win.
        name: the sweep's name, instead of the file's.
        to_run: whether anything is to be trained. Who only reads what a sweep has left needs
            neither its data, nor the sweeps that it learned from, nor its packages.

    Raises:
        SpecError: anything is wrong with the file or an override; it lists every problem, each
            with its line, value, reason and fix. Of the machine only its installed packages are
            looked at, so that a file for a cluster can be read anywhere: see
            `machine.check_resources`.
    """
    path = Path(path)
    problems = Problems(Mark(str(path), 1))
    root = read(path, overrides, name, problems)
    problems.refuse_empty(root)
    problems.refuse_unprintable(root)
    return Document(path, root, root.entries or {}, problems, to_run).spec()


@dataclass(frozen=True)
class Document:
    """A file that could be parsed, and what turned out to be wrong with it."""

    path: Path
    root: Node
    nodes: Mapping[str, Node]
    problems: Problems
    to_run: bool
    """Whether what only a run needs is looked for."""

    def spec(self) -> SweepSpec:
        """Everything that the file says.

        Raises:
            SpecError: every problem.
        """
        self.refuse_unknown_keys()
        task = self.task()
        parameters = self.parameters(task)
        space = self.space(parameters)
        objective = "{correctness: {direction: maximize, reference: 0}}"
        objectives = parse_objectives(self.required("objectives", objective), task, self.problems)
        constraints = parse_constraints(self.nodes.get("constraints"), task, self.problems)
        training = settings(TrainingSettings, "training", self.nodes.get("training"), self.problems)
        sandbox = settings(SandboxSettings, "sandbox", self.nodes.get("sandbox"), self.problems)
        data = settings(DataSettings, "data", self.nodes.get("data"), self.problems)
        model = settings(ModelSettings, "model", self.nodes.get("model"), self.problems)
        rollout = settings(RolloutSettings, "rollout", self.nodes.get("rollout"), self.problems)
        search = section(Search, self.nodes.get("search"), ("search",), self.problems)
        resources = section(Resources, self.nodes.get("resources"), ("resources",), self.problems)
        tracking = section(Tracking, self.nodes.get("tracking"), ("tracking",), self.problems)
        enqueue = parse_enqueue(self.nodes.get("enqueue"), space, task, parameters, self.problems)
        name, keep = self.name(), self.keep()
        policy = self.policy(task)
        storage = os.path.expanduser(self.text("storage", "runs"))
        checks.check_weights(space, self.root, self.problems)
        checks.check_ranges(space, task, self.root, self.problems)
        divisors.check_group_size(space, training, self.root, self.problems)
        limits.check_lengths(training, self.root, self.problems)
        limits.check_positions(training, policy, self.root, self.problems)
        limits.check_prompts(training, data, task, self.root, self.problems)
        checks.check_search(self.root, self.problems)
        checks.check_rungs(search, training, self.root, self.problems)
        check_population(search, space, training, self.root, self.problems)
        checks.check_resources_shape(resources, self.root, self.problems)
        divisors.check_workers(resources, space, training, rollout, self.root, self.problems)
        checks.check_gpu_cost(
            {**objectives, **constraints}, task, resources, self.root, self.problems
        )
        checks.check_budget(search, resources, self.root, self.problems)
        divisors.check_micro_batch(training, resources, self.root, self.problems)
        ledger = checks.check_ledger(self.nodes.get("ledger"), self.problems)
        checks.check_storage(storage, ledger, resources, self.root, self.problems)
        check_rollout(rollout, self.root, self.problems)
        if self.to_run:
            check_warm_start(search, task, objectives, constraints, self.root, self.problems)
            check_sandbox(sandbox, self.root, self.problems)
            check_data(data, task, self.root, self.problems)
            check_model(model, policy, self.root, self.problems)
        self.problems.raise_if_any()
        experiment = (tracking.experiment if tracking else "") or name
        return SweepSpec.model_validate(
            {
                "name": name,
                "task": task,
                "policy": policy,
                "objectives": objectives,
                "constraints": constraints,
                "space": space,
                "enqueue": enqueue,
                "keep": keep,
                "training": training,
                "sandbox": sandbox,
                "data": data,
                "model": model,
                "rollout": rollout,
                "search": search,
                "resources": resources,
                "tracking": tracking and tracking.model_copy(update={"experiment": experiment}),
                "storage": storage,
                "ledger": ledger,
            }
        )

    def refuse_unknown_keys(self) -> None:
        """Note top-level keys that do not exist."""
        known = [*SweepSpec.model_fields, "extends"]
        for key, node in self.nodes.items():
            if key not in known:
                fix = f"{did_you_mean(key, known)}keys here are {one_of(known)}"
                self.problems.at(node, (key,), "unknown key", fix)

    def required(self, key: str, example: str) -> Node | None:
        """The node of a key that every sweep needs."""
        node = self.nodes.get(key)
        if node is None:
            self.problems.add(self.root.mark, key, None, "missing", f"add {key}: {example}")
        return node

    def text(self, key: str, default: str) -> str:
        """A key whose value is a piece of text."""
        node = self.nodes.get(key)
        if node is None:
            return default
        if isinstance(node.value, str) and node.value.strip():
            return node.value
        self.problems.at(node, (key,), "not a piece of text", "write a word, quoted if need be")
        return default

    def task(self) -> str | None:
        """The task's name; None if there is no such task."""
        node = self.required("task", "code")
        if node is None:
            return None
        if isinstance(node.value, str) and task_files.is_file(node.value):
            return self.task_in_file(node, node.value)
        if isinstance(node.value, str) and node.value in registry.REMOVED_TASKS:
            fix = registry.REMOVED_TASKS[node.value]
            self.problems.at(node, ("task",), "no longer a task of its own", fix)
            return None
        known = checks.check_name(node, ("task",), "task", registry.TASKS, self.problems)
        return str(node.value) if known else None

    def task_in_file(self, node: Node, task: str) -> str | None:
        """A task of the user's own; None if it cannot be used."""
        try:
            task_files.task_info(task)
        except TaskFileError as error:
            reason = str(error).removeprefix(f"{task}: ")
            fix = "mend the file; docs/own_task.md has an example"
            self.problems.at(node, ("task",), reason, fix)
            return None
        return task

    def policy(self, task: str | None) -> str:
        """The policy's name; that of the task's own policy if none is given."""
        if task is None:
            return self.text("policy", "")
        policy = self.text("policy", task_files.task_info(task).embedded)
        checks.check_policy(policy, task, self.root, self.problems)
        return policy

    def parameters(self, task: str | None) -> Mapping[str, ParameterInfo]:
        """What `space:` may name; under an unknown task, any reward that it does name."""
        if task is not None:
            weights = self.root.find(("space", "reward_weights")).entries or {}
            names = [f"reward_weights.{reward}" for reward in weights]
            return parameters_of(task_files.task_info(task, names))
        space = self.root.find(("space",)).entries or {}
        named = {
            f"{family}.{reward}": replace(info, choices=tuple(scalars(node)))
            for family, info in FAMILIES.items()
            if family in space
            for reward, node in (space[family].entries or {}).items()
        }
        return {**PARAMETERS, **named}

    def space(self, parameters: Mapping[str, ParameterInfo]) -> Space | None:
        """The search space; None if it is unusable."""
        node = self.required("space", "{group_size: [4, 8]}")
        return None if node is None else parse_space(node, parameters, self.problems)

    def name(self) -> str:
        """The sweep's name: given, or the file's stem."""
        node = self.nodes.get("name", Node(self.root.mark, self.path.stem))
        if isinstance(node.value, str) and NAME.fullmatch(node.value):
            return node.value
        reason = (
            "not a name that a folder can have (letters, digits, '.', '_', '-'; at most "
            f"{LONGEST_NAME} of them)"
        )
        proposal = re.sub(r"[^A-Za-z0-9._-]+", "-", str(node.plain())).strip("-.")
        proposal = proposal[:LONGEST_NAME] or "my-sweep"
        if not isinstance(node.value, str):
            proposal = f'"{proposal}"'
        self.problems.at(node, ("name",), reason, f"write name: {proposal}")
        return self.path.stem

    def keep(self) -> Keep:
        """Whose checkpoints stay."""
        node = self.nodes.get("keep", Node(self.root.mark, "front"))
        for choice in get_args(Keep):
            if node.value == choice:
                return choice
        checks.check_name(node, ("keep",), "value", get_args(Keep), self.problems)
        return "front"
