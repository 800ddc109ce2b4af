"""Ray, quietly: a cluster of its own on this machine, or the one that RAY_ADDRESS names."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from gdpo_tune.tuning.resources import local_cpus

ENVIRONMENT: Mapping[str, str] = {
    "RAY_AIR_NEW_OUTPUT": "0",  # no progress tables: listeners show the sweep
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths mean the same in a trial as in the command
    "RAY_DEDUP_LOGS": "0",
    "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # three files a result otherwise
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # ours lets trials write a checkpoint
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # no metric is special
    "TUNE_GLOBAL_CHECKPOINT_S": "1000000",  # the ledger is the state; snapshots are never restored
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",  # failures are in the ledger with their reason
    "TUNE_WARN_THRESHOLD_S": "10",  # a proposal may take a second
}
OBJECT_STORE = 128 * 2**20
"""Bytes. Results are a few KB; Ray's default takes a third of the memory."""


def connected() -> bool:
    """Whether a sweep would run on an existing cluster."""
    return bool(os.environ.get("RAY_ADDRESS"))


@contextmanager
def ray_cluster() -> Generator[list[dict[str, float]]]:
    """Start or join a Ray cluster; yields the resources of every node that is alive."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not connected():
        # a token left in the home directory turns authentication on, and then nothing answers
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    import ray

    local: dict[str, Any] = {
        "num_cpus": local_cpus(),
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE,
    }
    ray.init(
        address=os.environ["RAY_ADDRESS"] if connected() else "local",
        log_to_driver=False,
        logging_level=logging.CRITICAL,  # what trials die of is in the ledger
        **({} if connected() else local),
    )
    try:
        yield [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]
    finally:
        ray.shutdown()
