"""How many trials fit side by side, and whether one fits at all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from gdpo_tune.core.errors import ResourcesError
from gdpo_tune.spec import Resources, SweepSpec
from gdpo_tune.tuning.ray.nodes import Node

SLACK = 1e-9
"""Keeps 1 / 0.1 at 10 slots."""


def fits_on_gpus(wanted: float, devices: float) -> float:
    """Trials of `wanted` GPUs each that fit on a node's: a fraction lies on one device."""
    if wanted >= 1:
        return devices / wanted
    return devices * math.floor(1 / wanted + SLACK)


def fit(resources: Resources, node: Mapping[str, float]) -> int:
    """Workers that run side by side on a node with these `CPU` and `GPU` amounts."""
    fits = node.get("CPU", 0.0) / resources.cpus
    if resources.gpus > 0:
        fits = min(fits, fits_on_gpus(resources.gpus, node.get("GPU", 0.0)))
    return math.floor(fits + SLACK)


def slots(resources: Resources, nodes: Sequence[Mapping[str, float]]) -> int:
    """Trials that run side by side on nodes with these `CPU` and `GPU` amounts.

    The workers of one trial may lie on different nodes.

    Raises:
        ResourcesError: the nodes cannot hold a single trial.
    """
    total = sum(fit(resources, node) for node in nodes)
    alive = f"({len(nodes)} node{'s' if len(nodes) != 1 else ''} alive)"
    each = f"{resources.cpus:g} CPUs and {resources.gpus:g} GPUs"
    if total == 0:
        raise ResourcesError(f"a trial wants {each}, which no node has {alive}")
    if total < resources.workers:
        raise ResourcesError(
            f"a trial wants {resources.workers} workers of {each} each, and there is room for "
            f"{total} {alive}"
        )
    return total // resources.workers


def slots_of(spec: SweepSpec, nodes: Sequence[Node]) -> int:
    """Trials that run at the same time.

    Raises:
        ResourcesError: no node can hold a single trial.
    """
    count = slots(spec.resources, [node.resources for node in nodes])
    # A server holds the weights of one policy.
    return 1 if spec.rollout.vllm_mode == "server" else count


def with_room(spec: SweepSpec, nodes: Sequence[Node]) -> list[Node]:
    """Those on which a trial, or one of its workers, may run."""
    return [node for node in nodes if fit(spec.resources, node.resources)]
