"""`task:` and `policy:`: what is trained, and what it cannot do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gdpo_tune.core import registry, task_files
from gdpo_tune.core.errors import TaskFileError
from gdpo_tune.core.registry import TaskInfo
from gdpo_tune.core.settings import TrainingSettings
from gdpo_tune.spec.problems import Problems, one_of, unknown_name


def task_names() -> list[str]:
    """Return the names of the tasks that ship."""
    return list(registry.TASKS)


def task_of(name: str) -> TaskInfo:
    """Return what a task rewards and measures.

    Raises:
        TaskFileError: it is in a file, and cannot be used.
    """
    return task_files.task_info(name)


def check_task(name: object, problems: Problems) -> TaskInfo | None:
    """Return the task of a name in the file; refuse one that does not exist."""
    if name is None:
        problems.refuse("task", "missing", "add task: code")
    elif isinstance(name, str) and task_files.is_file(name):
        try:
            return task_of(name)
        except TaskFileError as error:
            reason = str(error).removeprefix(f"{name}: ")
            problems.refuse("task", reason, "mend the file; docs/own_task.md has an example")
    elif name in task_names():
        return task_of(str(name))
    else:
        problems.refuse("task", *unknown_name("task", name, task_names()))
    return None


def check_policy(policy: str, name: str, task: TaskInfo, problems: Problems) -> None:
    """Refuse a policy that ships for another task."""
    if policy not in registry.POLICIES or policy == task.embedded or task_files.is_file(name):
        return
    others = [other for other in task_names() if task_of(other).embedded == policy]
    reason = f"made for {one_of(others)} and cannot answer the prompts of {name}"
    problems.refuse("policy", reason, f"write policy: {task.embedded}, or remove the key")


def check_positions(training: TrainingSettings, policy: str, problems: Problems) -> None:
    """Refuse completions that are longer than the policy can write, as far as its files tell."""
    shipped, longest = registry.POLICIES.get(policy), training.max_completion_length
    directory = Path(registry.load(shipped)() if shipped else policy).expanduser()
    try:
        config: Any = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError):
        return  # whether there is such a policy is checked elsewhere
    room = config.get("max_position_embeddings") if isinstance(config, dict) else None
    if isinstance(room, int) and longest >= room:
        reason = f"{policy} has {room} positions, for a prompt and its completion together"
        fix = f"write a number well below {room}, or give another policy"
        key, given = "training.max_completion_length", ("policy",)
        problems.refuse(key, reason, fix, value=longest, given=given)


def check_prompts(
    training: TrainingSettings, source: str, name: str, task: TaskInfo, problems: Problems
) -> None:
    """Refuse more prompts than a task can write, where there is no data set as `source`."""
    for split, most in ({} if source else task.prompts).items():
        count = getattr(training, f"{split}_prompts")
        if count > most:
            reason = f"the {name} task can write {most} distinct {split} prompts"
            fix = f"write at most {most}, or give a data set as data.source"
            problems.refuse(f"training.{split}_prompts", reason, fix, value=count)
