"""Lengths and counts that the policy, or a task that writes its own prompts, cannot meet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gdpo_tune.core import registry, task_files
from gdpo_tune.core.settings import DataSettings, TrainingSettings
from gdpo_tune.spec.problems import Node, Problems


def check_lengths(settings: TrainingSettings | None, root: Node, problems: Problems) -> None:
    """The length limit can be exceeded."""
    if settings is None or settings.length_limit < settings.max_completion_length:
        return
    if any(problems.about(f"training.{k}") for k in ("length_limit", "max_completion_length")):
        return
    path = ("training", "length_limit")
    longest = settings.max_completion_length
    reason = f"not below max_completion_length = {longest}: every completion is within it"
    node = root.find(path)
    fix = f"write a limit below {longest}, or raise training.max_completion_length"
    problems.add(node.mark, "training.length_limit", settings.length_limit, reason, fix)


def check_positions(
    settings: TrainingSettings | None, policy: str, root: Node, problems: Problems
) -> None:
    """The policy can write completions as long as asked, as far as its folder tells."""
    path = ("training", "max_completion_length")
    if settings is None or problems.about("policy") or problems.about(".".join(path)):
        return
    room, longest = positions(policy), settings.max_completion_length
    if room is None or longest < room:
        return
    reason = f"{policy} has {room} positions, for a prompt and its completion together"
    fix = f"write a number well below {room}, or give another policy"
    problems.add(root.find(path).mark, ".".join(path), longest, reason, fix)


def positions(policy: str) -> int | None:
    """Tokens that a policy was made for; None where no file on this disk says."""
    shipped = registry.POLICIES.get(policy)
    folder = Path(shipped or policy).expanduser()
    try:
        config: Any = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None  # whether there is such a policy is not asked here
    found = config.get("max_position_embeddings") if isinstance(config, dict) else None
    return found if isinstance(found, int) else None


def check_prompts(
    settings: TrainingSettings | None,
    data: DataSettings | None,
    task: str | None,
    root: Node,
    problems: Problems,
) -> None:
    """A task that writes its own prompts has as many as asked."""
    if settings is None or data is None or data.source or task is None:
        return
    for split, most in task_files.task_info(task).prompts.items():
        name = f"{split}_prompts"
        path, asked = ("training", name), getattr(settings, name)
        if asked > most:
            reason = f"the {task} task can write {most} distinct {split} prompts"
            fix = f"write at most {most}, or give a data set as data.source"
            problems.add(root.find(path).mark, f"training.{name}", asked, reason, fix)
