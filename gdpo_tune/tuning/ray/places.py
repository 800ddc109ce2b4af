"""Processes in which trials share places: how the driver starts them, and trials find them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ray
from ray.exceptions import RayError

from gdpo_tune.tuning.ray.messages import Setup
from gdpo_tune.tuning.ray.pack_host import PackHost

CLOSE_SECONDS = 10.0
"""Seconds that the processes get to free what they hold, once no trial runs."""
_SPARE_CALLS = 8
"""Calls to a process that are answered besides one of each trial, which waits for a message."""


class PackHosts:
    """The processes of a run in which trials share places; none where each trial has its own.

    The driver owns them.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._handles: list[Any] = []

    def grow(self, slots: int) -> None:
        """Start processes until all of them together have so many places.

        Those of a lost node wait for another one.
        """
        setup = self._setup
        if setup.pack == 1:
            return
        kind = ray.remote(PackHost)
        while len(self._handles) * setup.pack < slots:
            name = name_host(len(self._handles))
            host = kind.options(
                name=name,
                num_cpus=setup.cpus,
                num_gpus=setup.gpus,
                max_restarts=-1,
                max_task_retries=0,
                max_concurrency=2 * setup.pack + _SPARE_CALLS,
            )
            self._handles.append(host.remote(name, setup))

    def close(self) -> None:
        """Let the processes free what they hold; they end with the connection to the cluster."""
        if not self._handles:
            return
        calls = [handle.close.remote() for handle in self._handles]
        ray.wait(calls, num_returns=len(calls), timeout=CLOSE_SECONDS)
        for handle in self._handles:
            ray.kill(handle)


def name_host(index: int) -> str:
    """Return the name of a process that trials share."""
    return f"gdpo-tune-pack-{index}"


def list_hosts() -> Iterator[Any]:
    """Yield the handles of the processes that trials share."""
    index = 0
    while True:
        try:
            yield ray.get_actor(name_host(index))
        except ValueError:  # the driver has started no more
            return
        index += 1


def order_by_load(number: int, patience: float) -> list[Any]:
    """Return the processes that answer within so many seconds, those with the fewest trials first.

    Among equals, the `number` of the trial decides: trials that begin together spread.
    """
    hosts = list(list_hosts())
    calls = [host.count_trials.remote() for host in hosts]
    answered, late = ray.wait(calls, num_returns=len(calls), timeout=patience)
    for call in late:
        ray.cancel(call)
    loads: list[tuple[int, int, Any]] = []
    for call in answered:
        index = calls.index(call)
        try:
            loads.append((ray.get(call), (index + number) % len(hosts), hosts[index]))
        except RayError:
            continue  # it has died, and restarts
    return [host for _, _, host in sorted(loads, key=lambda load: load[:2])]
