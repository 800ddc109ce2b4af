"""A `train()` for a group of processes that trains nothing; the length limit names its fault."""

from __future__ import annotations

import os
import signal
import time

from gdpo_tune.core.errors import NonFiniteError
from gdpo_tune.core.trials import Cost, Measurement, Outcome
from gdpo_tune.training import distributed

STEPS = 3
RAISE, BREAK, DIE, WAIT = 1, 2, 3, 4
"""Faults of the second process at its second step; it waits for its parent's end at `WAIT`."""


def train(config, *, resume, report) -> Outcome:
    """Report a few steps, in which the processes agree on their ranks."""
    distributed.join_process_group()
    for step in range(1, STEPS + 1):
        if step == 2 and distributed.get_rank() == 1:
            fail(config.training.length_limit)
        seen = distributed.gather((distributed.get_rank(), os.getpid()))
        metrics = {f"pid/{rank}": float(pid) for rank, pid in seen}
        report(Measurement(step, metrics, Cost(step)), resume)
    return Outcome({}, {}, Cost(STEPS), resume, {"rank": str(distributed.get_rank())})


def fail(fault: int) -> None:
    if fault == RAISE:
        raise NonFiniteError("loss is nan at step 2")
    if fault == BREAK:
        raise RuntimeError("broken at step 2")
    if fault == DIE:
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == WAIT:
        time.sleep(600)
