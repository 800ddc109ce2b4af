"""What holds between several keys of the file, or between a key and the registry."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path

from gdpo_tune import registry, task_files
from gdpo_tune.files import is_file
from gdpo_tune.metrics import MetricInfo
from gdpo_tune.object_store import is_url
from gdpo_tune.settings import RolloutSettings, TrainingSettings
from gdpo_tune.spec.domains import Domain, Uniform
from gdpo_tune.spec.model import LEAST_RESOURCE, ObjectiveSpec, Resources, Search
from gdpo_tune.spec.parse_space import parameter_node
from gdpo_tune.spec.problems import KeyPath, Node, Problems, did_you_mean, one_of, show
from gdpo_tune.spec.schedulers import AshaSettings
from gdpo_tune.spec.space import Space

LONGEST_NAME = 255
"""Bytes of the name of a file or folder, on every usual disk."""
LEDGER = re.compile(r"postgresql(\+psycopg2?)?://[^/\s]+/[^/\s]+")
SHOWN = 6
"""At most so many values of a long list are named in a message."""


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
    others = [name for name, info in registry.TASKS.items() if info.embedded == policy]
    reason = f"made for {one_of(others)} and cannot answer the prompts of {task}"
    problems.at(node, ("policy",), reason, f"write policy: {own}, or remove the key")


def check_reference(
    name: str, objective: ObjectiveSpec, info: MetricInfo, node: Node, problems: Problems
) -> None:
    """Some value of the metric is better than the reference."""
    path = ("objectives", name, "reference")
    best = info.high if objective.direction == "maximize" else info.low
    beaten = (
        objective.reference < best
        if objective.direction == "maximize"
        else objective.reference > best
    )
    if not beaten:
        side = "below" if objective.direction == "maximize" else "above"
        reason = f"no value of {name} is better than this, so the hypervolume would always be 0"
        fix = f"write the worst value of interest, {side} {best:g}"
        problems.at(node.find(("reference",)), path, reason, fix)


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
    ranges = task_files.task_info(task).rewards
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


def check_group_size(
    space: Space | None, settings: TrainingSettings | None, root: Node, problems: Problems
) -> None:
    """Every reachable group size divides the completions of a step into at least one prompt."""
    if space is None or settings is None or problems.about("space.group_size"):
        return
    if problems.about("training.completions_per_step"):
        return
    total = settings.completions_per_step
    sizes = [size for size in space.reachable("group_size") or () if isinstance(size, int)]
    path = ("space", "group_size")
    node = parameter_node(root, "group_size") or root.find(("training", "completions_per_step"))
    large = [size for size in sizes if size > total]
    if large:
        reason = f"{several(large)} exceeds training.completions_per_step = {total}: below 1 prompt"
        problems.at(node, path, reason, divisors_fix(space.domains["group_size"], total))
    uneven = [size for size in sizes if size <= total and total % size]
    if uneven:
        reason = f"{several(uneven)} does not divide training.completions_per_step = {total}"
        problems.at(node, path, reason, divisors_fix(space.domains["group_size"], total))


def check_workers(
    resources: Resources | None,
    space: Space | None,
    settings: TrainingSettings | None,
    rollout: RolloutSettings | None,
    root: Node,
    problems: Problems,
) -> None:
    """Every worker of a trial samples whole groups, as many as any other, and can do so."""
    if resources is None or resources.workers == 1:
        return
    workers, path = resources.workers, ("resources", "workers")
    if rollout is not None and rollout.engine == "vllm" and not problems.about("rollout.engine"):
        reason = f"vllm samples for one worker, and a trial has {workers}"
        fix = "write engine: transformers, or resources.workers: 1"
        problems.at(root.find(("rollout", "engine")), ("rollout", "engine"), reason, fix)
    keys = ("space.group_size", "training.completions_per_step", "resources.workers")
    if space is None or settings is None or any(map(problems.about, keys)):
        return
    total = settings.completions_per_step
    sizes = [size for size in space.reachable("group_size") or () if isinstance(size, int)]
    uneven = [size for size in sizes if total // size % workers]
    if uneven:
        prompts = several([total // size for size in uneven])
        reason = (
            f"does not divide the {prompts} prompts of a step that group_size {several(uneven)} "
            f"leaves of training.completions_per_step = {total}"
        )
        multiple = math.lcm(*(size * workers for size in sizes))
        fix = f"write completions_per_step: {-(-total // multiple) * multiple}, or fewer workers"
        problems.at(root.find(path), path, reason, fix)


def check_micro_batch(
    settings: TrainingSettings | None, resources: Resources | None, root: Node, problems: Problems
) -> None:
    """What a worker computes of a step divides into micro-batches."""
    path = ("training", "micro_batch_size")
    keys = (".".join(path), "training.completions_per_step", "resources.workers")
    if settings is None or resources is None or any(map(problems.about, keys)):
        return
    own, size = settings.completions_per_step // resources.workers, settings.micro_batch_size
    if not size or own % size == 0:
        return
    reason = f"does not divide the {own} completions of a step"
    if resources.workers > 1:
        reason += f" that each of {resources.workers} workers computes"
    smaller = [count for count in range(1, own) if own % count == 0]
    fix = f"write one of {show(smaller)}, or 0 to compute all at once"
    problems.at(root.find(path), path, reason, fix)


def several(sizes: list[int]) -> str:
    """A few values, then an ellipsis."""
    return one_of(sizes[:SHOWN]) + (", ..." if len(sizes) > SHOWN else "")


def divisors_fix(domain: Domain, total: int) -> str:
    """Group sizes that work: those within the range that was asked, else all."""
    divisors = [size for size in range(2, total + 1) if total % size == 0]
    if isinstance(domain, Uniform):
        divisors = [size for size in divisors if domain.low <= size <= domain.high] or divisors
    return f"use group sizes among {show(divisors)}, or change training.completions_per_step"


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
    if is_url(storage):
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
    problems.at(node, ("ledger",), "not the address of a PostgreSQL database", fix)
    return ""


def check_bound(
    op: str, bound: float, info: MetricInfo, node: Node, path: KeyPath, problems: Problems
) -> None:
    """Some value of the metric respects the bound."""
    if (op == ">=" and bound > info.high) or (op == "<=" and bound < info.low):
        fix = f"the metric lies between {info.low:g} and {info.high:g}"
        problems.at(node, path, "no trial can ever meet this", fix)
