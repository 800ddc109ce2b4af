"""The GPUs of a cluster that exists already, before a sweep runs on it."""

from __future__ import annotations

from gdpo_tune.core.errors import ClusterError
from gdpo_tune.spec import Resources, read_device_memory
from gdpo_tune.tuning.ray.cluster import join_cluster
from gdpo_tune.tuning.ray.nodes import count_workers
from gdpo_tune.tuning.ray.preflight import ask_nodes


def read_cluster_memory(resources: Resources) -> int | None:
    """Return the bytes of the smallest GPU of all nodes with room for a trial; None if unknown.

    Joins the cluster that RAY_ADDRESS names, and leaves it.

    Raises:
        ClusterError: the cluster cannot be joined, or a node does not answer.
    """
    with join_cluster({}) as cluster:
        able = [n for n in cluster.nodes.list_alive() if count_workers(resources, n.resources)]
        answers = ask_nodes(able, read_device_memory).values()
    amounts: list[int] = []
    for answer in answers:
        if isinstance(answer, ClusterError):
            raise answer
        if answer is None:
            return None
        amounts.append(answer)
    return min(amounts, default=None)
