"""What holds between several keys of the file, or between a key and the registry."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path

from gdpo_tune.core import registry, task_files
from gdpo_tune.core.files import is_file
from gdpo_tune.core.object_store import is_url
from gdpo_tune.core.settings import TrainingSettings
from gdpo_tune.spec.dump import without_password
from gdpo_tune.spec.model import LEAST_RESOURCE, Resources, Search
from gdpo_tune.spec.parse_space import parameter_node
from gdpo_tune.spec.problems import KeyPath, Node, Problems, did_you_mean, one_of, show
from gdpo_tune.spec.schedulers import AshaSettings
from gdpo_tune.spec.space import Space

LONGEST_NAME = 255
"""Bytes of the name of a file or folder, on every usual disk."""
LEDGER = re.compile(
    r"postgresql(\+psycopg2?)?://(?=[^/])([^/\s]*@)?(\[[0-9a-fA-F:.]+\]|[^/\s:@\[\]]*)(:\d{1,5})?/[^/\s]+"
)
SECRET = re.compile(r"://[^/@]*:[^/]*@|\?")
"""In the address of a store."""


def check_name(
    node: Node, path: KeyPath, what: str, names: Iterable[str], problems: Problems
) -> bool:
    """Whether `node` is one of `names`; a problem is noted if not."""
    known = list(names)
    if isinstance(node.value, str) and node.value in known:
        return True
    fix = f"{did_you_mean(node.plain(), known)}those that exist: {one_of(known)}"
    problems.at(node, path, f"unknown {what}", fix)
    return False


def check_search(root: Node, problems: Problems) -> None:
    """The sampler and the scheduler exist."""
    tables = {
        ("search", "sampler"): ("sampler", registry.SAMPLERS),
        ("search", "scheduler", "type"): ("scheduler", registry.SCHEDULERS),
    }
    for path, (what, names) in tables.items():
        node = root.find(path[:-1])
        if path[-1] in (node.entries or {}) and not problems.about(".".join(path)):
            check_name(node.find(path[-1:]), path, what, names, problems)


def check_rungs(
    search: Search | None, training: TrainingSettings | None, root: Node, problems: Problems
) -> None:
    """Under `type: asha`, trials are compared somewhere, unless they are too short for that."""
    if search is None or training is None or not isinstance(search.scheduler, AshaSettings):
        return
    chosen, steps, path = search.scheduler, training.steps, ("search", "scheduler")
    if chosen.levels(steps) or chosen.highest(steps) >= chosen.grace * steps:
        return
    named = "grace" if "grace" in (root.find(path).entries or {}) else "reduction_factor"
    reason = (
        f"the last rung lies at 1 / {show(chosen.reduction_factor)} of the budget, and "
        f"{show(chosen.grace)} of it is grace, so no trial would be compared with another"
    )
    fix = f"write grace: {0.9 / chosen.reduction_factor:.2g}, or scheduler: {{type: fifo}}"
    problems.at(root.find((*path, named)), (*path, named), reason, fix)


def check_policy(policy: str, task: str, root: Node, problems: Problems) -> None:
    """A policy that ships was made for this task."""
    own = task_files.task_info(task).embedded
    if policy not in registry.POLICIES or policy == own or task_files.is_file(task):
        return
    node = root.find(("policy",))
    others = [name for name in registry.TASKS if registry.describe_task(name).embedded == policy]
    reason = f"made for {one_of(others)} and cannot answer the prompts of {task}"
    problems.at(node, ("policy",), reason, f"write policy: {own}, or remove the key")


def check_weights(space: Space | None, root: Node, problems: Problems) -> None:
    """No trial has only weights of 0."""
    if space is None or problems.about("space.reward_weights"):
        return
    weights = {n: d for n, d in space.domains.items() if n.startswith("reward_weights.")}
    if not all(can_be_zero(name, space) for name in weights):
        return
    node = root.find(("space", "reward_weights"))
    always = all(domain.values() == (0,) for domain in weights.values())
    reason = "every weight is 0" if always else "a trial could have a weight of 0 for every reward"
    anchor = next(iter(weights)).rpartition(".")[2]
    fix = f"fix one above 0, such as {anchor}: 1: only ratios matter"
    problems.at(node, ("space", "reward_weights"), f"{reason}, so nothing would be learnt", fix)


def check_ranges(space: Space | None, task: str | None, root: Node, problems: Problems) -> None:
    """Gamma and conditions find the range of every reward that they look at."""
    if space is None or task is None:
        return
    ranges = task_files.task_info(task, space.domains).rewards
    unknown = [name for name, (low, high) in ranges.items() if not math.isfinite(high - low)]
    weighted = [name for name in unknown if space.reachable(f"reward_weights.{name}") != (0,)]
    if weighted and space.domains["gamma"].values() != (0,):
        node = parameter_node(root, "gamma") or root
        reason = f"the range of {one_of(weighted)} is not known, so neither is how saturated it is"
        fix = f"remove gamma, or {state_range(weighted[0])}"
        problems.at(node, ("space", "gamma"), reason, fix)
    for name in ranges:
        parameter = f"conditioning.{name}"
        chosen = space.domains[parameter].values() if parameter in space.domains else None
        for other in [name for name in unknown if name in (chosen or ())]:
            node = parameter_node(root, parameter) or root
            reason = f"the range of {other} is not known, so neither is its threshold"
            fix = f"condition on another reward, or {state_range(other)}"
            problems.at(node, ("space", parameter), reason, fix)


def state_range(reward: str) -> str:
    """How a range becomes known."""
    return f"state the lowest and highest value of {reward} in its task"


def can_be_zero(name: str, space: Space) -> bool:
    """Whether a trial may have the value 0 for `name`."""
    values = space.reachable(name)
    return space.domains[name].contains(0) if values is None else 0 in values


def check_resources_shape(resources: Resources | None, root: Node, problems: Problems) -> None:
    """Shares that could be granted on some machine."""
    if resources is None:
        return
    if resources.workers > 1 and resources.gpus not in (0.0, 1.0):
        path = ("resources", "gpus")
        reason = f"each of the {resources.workers} workers of a trial trains on one GPU of its own"
        problems.at(root.find(path), path, reason, "write gpus: 1, which is for each of them, or 0")
    elif 0 < resources.gpus < LEAST_RESOURCE:
        path = ("resources", "gpus")
        reason = "Ray counts in ten-thousandths, in which this is nothing"
        fix = f"write 0 for none, or at least {LEAST_RESOURCE}"
        problems.at(root.find(path), path, reason, fix)
    elif resources.gpus > 1 and resources.gpus % 1:
        path = ("resources", "gpus")
        fix = f"write {math.floor(resources.gpus)} or {math.ceil(resources.gpus)}"
        problems.at(root.find(path), path, "above 1 only whole GPUs can be had", fix)


def check_budget(
    search: Search | None, resources: Resources | None, root: Node, problems: Problems
) -> None:
    """A budget in GPU-hours can be spent."""
    if search is None or resources is None or resources.gpus or not search.budget.gpu_hours:
        return
    path = ("search", "budget", "gpu_hours")
    if not problems.about("resources.gpus"):
        fix = "write hours or completions instead, or give trials GPUs with resources.gpus"
        problems.at(root.find(path), path, "no trial has a GPU, so it is never spent", fix)


def check_gpu_cost(
    judged: Iterable[str],
    task: str | None,
    resources: Resources | None,
    root: Node,
    problems: Problems,
) -> None:
    """GPU-hours are judged only where trials have GPUs."""
    name = "gpu_hours"
    own = task is not None and name in task_files.task_info(task).metrics
    if own or resources is None or resources.gpus or problems.about("resources.gpus"):
        return
    for key in ("objectives", "constraints"):
        if name in judged and name in (root.find((key,)).entries or {}):
            fix = "name seconds instead, or give trials GPUs with resources.gpus"
            problems.at(root.find((key, name)), (key, name), "no trial has a GPU: always 0", fix)


def check_storage(
    storage: str, ledger: str, resources: Resources | None, root: Node, problems: Problems
) -> None:
    """Where sweeps are kept is a folder, and not a file; or an object store, beside a database."""
    path = ("storage",)
    node = root.find(path)
    if is_url(storage) and SECRET.search(storage):
        shown = without_password(storage).partition("?")[0]
        reason = "with a password or a query, which files and messages of the sweep would show"
        fix = "leave it out; packages of stores read variables, such as AWS_SECRET_ACCESS_KEY"
        problems.add(node.mark, "storage", shown, reason, fix)
    elif is_url(storage):
        if resources is not None and resources.workers > 1:
            reason = "an object store, and the processes of a trial need one folder"
            fix = "write a folder that every node sees, or resources.workers: 1"
            problems.at(node, path, reason, fix)
        if not ledger and not problems.about("ledger"):
            fix = "write ledger: postgresql+psycopg2://USER@HOST/DATABASE, or a folder as storage"
            problems.at(node, path, "an object store, where no ledger can live", fix)
        if not set(storage.split("/")).isdisjoint((".", "..")) or storage.endswith("://"):
            fix = "write it like s3://bucket/sweeps"
            problems.at(node, path, "not the address of a folder on an object store", fix)
    elif is_file(Path(storage)):
        problems.at(node, path, "is a file, not a folder", "name another folder")
    elif any(len(part.encode(errors="replace")) > LONGEST_NAME for part in Path(storage).parts):
        reason = f"a name in it has more than {LONGEST_NAME} bytes"
        problems.at(node, path, reason, "name another folder")


def check_ledger(node: Node | None, problems: Problems) -> str:
    """The address of a database that can hold a ledger; empty for a file."""
    if node is None or node.value == "":
        return ""
    if isinstance(node.value, str) and LEDGER.fullmatch(node.value):
        return node.value
    fix = "write postgresql+psycopg2://USER@HOST/DATABASE, or leave the key out"
    shown = without_password(node.value) if isinstance(node.value, str) else node.plain()
    problems.add(node.mark, "ledger", shown, "not the address of a PostgreSQL database", fix)
    return ""
