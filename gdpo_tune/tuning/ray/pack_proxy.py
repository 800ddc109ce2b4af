"""Trials that share processes, as Ray Tune sees them: each has a small process that trains nothing.

It finds a place for its trial in one of the processes that train (`pack_host`), and passes on what
the trial reports. So a trial that ends frees its place, and the others there notice nothing.
"""

from __future__ import annotations

import time
from typing import Any

import ray
from ray import tune
from ray.exceptions import RayActorError, RayTaskError

from gdpo_tune.tuning.ray.messages import (
    HOST_DIED,
    NODE_DIED,
    AttemptConfig,
    AttemptError,
    Interrupted,
    TrialMessage,
    TrialPlaced,
    TrialResult,
    pack,
    unpack_attempt,
)
from gdpo_tune.tuning.ray.places import list_hosts, order_by_load
from gdpo_tune.tuning.ray.stopping import open_stop_flag
from gdpo_tune.tuning.ray.variables import read_shared_variables

START_SECONDS = 20.0
"""Seconds that processes get to start, so that trials spread evenly over all of them."""
POLL_SECONDS = 0.5
"""Seconds between two searches for a place."""


def run_packed_trial(config: dict[str, Any]) -> dict[str, Any]:
    """Run an attempt at a trial in a process that it shares with others.

    Raises:
        AttemptError: start again; the process died, or see `trainable.run_attempt`.
        Exception: anything unexpected that the trial raised.
    """
    read_shared_variables()
    attempt = unpack_attempt(config)
    if attempt.refusal is not None:
        tell_to_leave(attempt.number)
        return pack(attempt.refusal)
    found = find_place(attempt)
    if found is None:
        return pack(Interrupted())
    host, placed = found
    tune.report(pack(placed))
    try:
        while True:
            message: TrialMessage = ray.get(host.exchange.remote(attempt.number))
            if isinstance(message, TrialResult):
                return pack(message)
            tune.report(pack(message))
    except RayTaskError as error:
        cause: Exception = error.cause
        cause.add_note(str(error))  # the traceback in that process
        raise cause from None
    except RayActorError as error:
        if NODE_DIED in str(error):
            raise AttemptError("lost", "the node of its process died") from error
        raise AttemptError("host", HOST_DIED) from error


def find_place(attempt: AttemptConfig) -> tuple[Any, TrialPlaced] | None:
    """Wait for a place and begin the attempt there; return None if it is to stop before.

    The process with the fewest trials comes first. A trial that has to be alone waits at one of
    them until that is empty.
    """
    flag = open_stop_flag(attempt.setup.spec_file.parent, attempt.setup.address)
    patience = START_SECONDS
    while not flag.is_set(attempt.number):
        hosts = order_by_load(attempt.number, patience)
        for host in hosts[:1] if attempt.alone else hosts:
            try:
                placed: TrialPlaced | None = ray.get(host.enter.remote(attempt))
            except RayActorError:
                continue  # it has just died or restarts
            if placed is not None:
                # An earlier attempt, whose proxy is gone, may still hold a place of another one.
                tell_to_leave(attempt.number, staying=host)
                return host, placed
        time.sleep(POLL_SECONDS)
        patience = POLL_SECONDS
    return None


def tell_to_leave(number: int, staying: Any = None) -> None:
    """Tell earlier attempts at a trial to end, except in the process where the trial now is."""
    for host in list_hosts():
        if host != staying:
            host.leave.remote(number)
