"""What the completions of a step divide into: groups, the shares of workers, micro-batches."""

from __future__ import annotations

import math

from gdpo_tune.core.settings import RolloutSettings, TrainingSettings
from gdpo_tune.spec.domains import Domain, Uniform
from gdpo_tune.spec.model import Resources
from gdpo_tune.spec.parse_space import parameter_node
from gdpo_tune.spec.problems import Node, Problems, one_of, show
from gdpo_tune.spec.space import Space

SHOWN = 6
"""At most so many values of a long list are named in a message."""


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
