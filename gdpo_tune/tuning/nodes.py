"""The nodes of the cluster: which are alive, and how many trials they hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gdpo_tune.core.errors import ResourcesError
from gdpo_tune.spec import Resources, SweepSpec
from gdpo_tune.spec.machine import count_fitting_workers


@dataclass(frozen=True)
class ClusterNode:
    """A node of the cluster."""

    id: str
    host: str
    resources: Mapping[str, float]

    def __str__(self) -> str:
        """Return a name for a person; several nodes may share a host."""
        return f"{self.host} ({self.id[:8]})"


class Nodes:
    """The nodes that were alive at the last refresh; `table` is `ray.nodes`."""

    def __init__(self, table: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
        self._table = table
        self.on_change: Callable[[Sequence[ClusterNode], Sequence[ClusterNode]], None] | None = None
        """Called with the nodes that were lost and those that have joined."""
        self._lost: set[str] = set()
        self._all: dict[str, ClusterNode] = {}  # those that were ever alive
        self._alive = self._read()

    def list_alive(self) -> list[ClusterNode]:
        """Return the nodes that are alive."""
        return list(self._alive.values())

    def is_alive(self, node: str) -> bool:
        """Return whether a node is alive, by its id."""
        return node in self._alive

    def describe(self, node: str) -> str:
        """Return a name for a person, by a node's id."""
        return str(self._all.get(node, "unknown"))

    def mark_lost(self, node: str) -> None:
        """Count a node as lost: errors of its processes may show that before Ray's table does."""
        self._lost.add(node)
        self.refresh()

    def refresh(self) -> None:
        """Read the table again, and report what has changed."""
        before, self._alive = self._alive, self._read()
        lost = [node for node in before.values() if node.id not in self._alive]
        joined = [node for node in self._alive.values() if node.id not in before]
        if self.on_change is not None and (lost or joined):
            self.on_change(lost, joined)

    def _read(self) -> dict[str, ClusterNode]:
        alive = {
            row["NodeID"]: ClusterNode(row["NodeID"], row["NodeManagerHostname"], row["Resources"])
            for row in self._table()
            if row["Alive"] and row["NodeID"] not in self._lost
        }
        self._all |= alive
        return alive


def count_workers(resources: Resources, node: Mapping[str, float]) -> int:
    """Return how many workers run side by side on a node with these `CPU` and `GPU` amounts."""
    return count_fitting_workers(resources, node.get("CPU", 0.0), node.get("GPU", 0.0))


def count_slots(spec: SweepSpec, nodes: Sequence[ClusterNode]) -> int:
    """Return how many trials run side by side; workers of one trial may lie on different nodes.

    Raises:
        ResourcesError: the nodes cannot hold a single trial.
    """
    resources = spec.resources
    total = sum(count_workers(resources, node.resources) for node in nodes)
    alive = f"({len(nodes)} node{'s' if len(nodes) != 1 else ''} alive)"
    each = resources.share_text
    if total == 0:
        amounts = [(n.resources.get("GPU", 0.0), n.resources.get("CPU", 0.0)) for n in nodes]
        gpus, cpus = max(amounts, default=(0.0, 0.0))  # most GPUs, then most CPUs
        share = f"--set resources.cpus={cpus:g} --set resources.gpus={min(gpus, 1.0):g}"
        fix = (
            f"at most {share}, or join a node that has more"
            if cpus
            else "join a node that has them"
        )
        raise ResourcesError(f"a trial needs {each}, which no node has {alive}\n    fix: {fix}")
    if total < resources.workers:
        raise ResourcesError(
            f"a trial needs {resources.workers} workers of {each} each, and there is room for "
            f"{total} {alive}\n"
            f"    fix: --set resources.workers={resources.reduce_workers(total)}, or join nodes "
            "that have room for the others"
        )
    if spec.rollout.vllm_mode == "server":
        return 1  # a server holds the weights of one policy
    return total // resources.workers
