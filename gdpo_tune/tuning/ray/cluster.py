"""Ray, quietly: a cluster of its own on this machine, or the one that RAY_ADDRESS names."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from gdpo_tune.core import ray_access
from gdpo_tune.core.errors import ClusterLostError
from gdpo_tune.core.processes import runs
from gdpo_tune.core.signals import hangups_held
from gdpo_tune.spec import local_cpus
from gdpo_tune.tuning.ray.head import HeadWatch, watched
from gdpo_tune.tuning.ray.joining import join
from gdpo_tune.tuning.ray.leftovers import children, end, end_orphans, remember
from gdpo_tune.tuning.ray.nodes import Nodes

ENVIRONMENT: Mapping[str, str] = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # a trial without a GPU sees none
    "RAY_AIR_NEW_OUTPUT": "0",  # no progress tables: listeners show the sweep
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths mean the same in a trial as in the command
    "RAY_DEDUP_LOGS": "0",
    "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # a report of several workers waits for it
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600",  # importing torch on a busy machine
    "RAY_USAGE_STATS_ENABLED": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # three files a result otherwise
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # ours lets trials write a checkpoint
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # no metric is special
    "TUNE_GLOBAL_CHECKPOINT_S": "1000000",  # the ledger is the state; snapshots are never restored
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",  # failures are in the ledger with their reason
    "TUNE_WARN_THRESHOLD_S": "10",  # a proposal may take a second
}
QUIET: Mapping[str, Any] = {
    "log_to_driver": False,
    "logging_level": logging.CRITICAL,  # what trials die of is in the ledger
}
"""For `ray.init`."""
SERVERS = ("gcs_server", "raylet")
"""Names of the processes without which a cluster of our own can do nothing."""
FOR_TRIALS = (
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S",
)
"""Those of `ENVIRONMENT` that trials read, too, and that a cluster of others does not have."""
LOOK_AGAIN = 0.5
"""Seconds between two looks at the servers of a cluster of our own."""
ASK_AGAIN = 5.0
"""Seconds between two questions to a cluster that was joined whether our node is alive."""
OBJECT_STORE = 128 * 2**20
"""Bytes. Results are a few KB; Ray's default takes a third of the memory."""
STARTS = 4
"""Attempts to start a cluster of our own. Ray gives its servers half a minute, which they may need
more than once where something else keeps the machine busy."""
TOO_SLOW = "timed out during startup"
"""In the message of Ray's error, which has no type of its own, when that was not enough."""


def connected() -> bool:
    """Whether a sweep would run on an existing cluster."""
    return bool(os.environ.get(ray_access.ADDRESS))


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster that is up."""

    nodes: Nodes
    """Those that are alive."""
    remember: Callable[[], None]
    """Note the processes that there are by now, for the next start in case this one is killed."""
    is_alive: Callable[[], bool]
    """Whether trials can still be placed; cheap enough to be asked all the time."""


@contextmanager
def ray_cluster(processes: Path) -> Generator[Cluster]:
    """Start or join a Ray cluster.

    Args:
        processes: file that remembers the processes of a cluster of our own. Most of Ray's follow a
            killed driver into its end, but two agents wait for each other's, and on a busy machine
            a process that was just starting may stay; the next start ends what is left.

    Raises:
        ClusterLostError: the servers of a cluster of our own did not start.
        ClusterError: the cluster of others cannot be joined from here.
    """
    end_orphans(processes)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with joined_cluster() if connected() else own_cluster(processes) as cluster:
        yield cluster


@contextmanager
def joined_cluster() -> Generator[Cluster]:
    """The cluster that RAY_ADDRESS names.

    Raises:
        ClusterError: it cannot be joined from here.
    """
    import ray

    join(QUIET, {name: os.environ[name] for name in FOR_TRIALS})
    with watched(ray.get_runtime_context().gcs_address) as watch:
        nodes = Nodes(ray.nodes)
        is_up = partial(head_is_there, watch, partial(our_node_is_alive, nodes))
        try:
            yield Cluster(nodes, lambda: None, asked_every(ASK_AGAIN, is_up))
        finally:
            ray.shutdown()


@contextmanager
def own_cluster(processes: Path) -> Generator[Cluster]:
    """A cluster on this machine alone.

    Args:
        processes: file that remembers its processes.

    Raises:
        ClusterLostError: its servers did not start.
    """
    # a token left in the home directory turns authentication on, and then nothing answers
    os.environ.setdefault(ray_access.MODE, "disabled")
    import ray

    others = children()
    start_servers(others)
    nodes, is_up = Nodes(ray.nodes), servers_watched()

    def remember_all() -> None:
        remember(processes, children() - others)

    try:
        remember_all()
        yield Cluster(nodes, remember_all, asked_every(LOOK_AGAIN, is_up))
    finally:
        lost = not is_up()
        ray.shutdown()
        if lost:
            end_orphans(processes)  # trials outlive a killed raylet, and would go on writing
        processes.unlink(missing_ok=True)


def start_servers(others: Collection[tuple[int, float]]) -> None:
    """Start a cluster of our own, once more where its servers took too long.

    Args:
        others: processes below this one that are not Ray's.

    Raises:
        ClusterLostError: they took too long every time.
    """
    import ray

    for _ in range(STARTS):
        try:
            with hangups_held():  # else the servers end with the terminal, and trials unsaved
                ray.init(
                    address="local",
                    num_cpus=local_cpus(),
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE,
                    **QUIET,
                )
        except Exception as error:
            if TOO_SLOW not in str(error):
                raise
            end(children().difference(others))
        else:
            return
    raise ClusterLostError(
        f"the servers of Ray did not start in time, {STARTS} times over; something else keeps this "
        "machine busy"
    )


def servers_watched() -> Callable[[], bool]:
    """Whether every server of Ray that runs below this process now still does when asked."""
    servers = {(pid, created) for pid, created in children() if name_of(pid) in SERVERS}
    return lambda: all(runs(pid, created) for pid, created in servers)


def name_of(pid: int) -> str:
    """The name of a process; empty if it is gone."""
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return ""


def head_is_there(watch: HeadWatch, is_known: Callable[[], bool]) -> bool:
    """Whether the cluster that was joined still takes us for a node of it.

    Args:
        watch: on its head, without which Ray's own question would wait, and the sweep with it.
        is_known: Ray's own question.
    """
    if watch.is_silent():
        return not watch.is_lost()
    return is_known()


def our_node_is_alive(nodes: Nodes) -> bool:
    """Whether the cluster that was joined knows of the node through which this process asks."""
    import ray

    nodes.look()
    return nodes.has(ray.get_runtime_context().get_node_id())


def asked_every(seconds: float, question: Callable[[], bool]) -> Callable[[], bool]:
    """`question`, with its last answer, true at first, until so many seconds have passed."""
    answer, due = True, time.monotonic() + seconds

    def ask() -> bool:
        nonlocal answer, due
        if time.monotonic() >= due:
            answer, due = question(), time.monotonic() + seconds
        return answer

    return ask
