"""One trial inside a Ray actor: the only adapter between `train()` and Ray Tune.

Actors are reused, so torch, TRL and the policy stay warm; a fresh one is asked for once a process
has grown past its memory limit.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from ray import tune
from ray.exceptions import RayActorError

from gdpo_tune import registry
from gdpo_tune.errors import SandboxUnavailable, TrialFailure, UsageError
from gdpo_tune.steps import is_kept
from gdpo_tune.training.checkpoints import newest_valid_checkpoint
from gdpo_tune.trials import Measurement, TrialConfig

SECONDS = 1.0
"""Time after which the next measurement reaches the driver, kept or not: a person is watching."""


class ActorWornOut(RayActorError):
    """This process has grown too large: the trial wants a fresh one. Not a failure of the trial.

    Ray counts a process that was taken away as no attempt, and gives a trial that lost its process
    another one; so it hears of this one in those words.
    """

    def __init__(self) -> None:
        super().__init__(error_msg="the process has grown too large", preempted=True)


@dataclass(frozen=True)
class Setup:
    """What every trial of a run has in common."""

    train: str
    """`module:function`, `gdpo_tune.training:train` except in tests."""
    stop: Path
    """File that asks running trials to stop; on a disk that every node sees."""
    memory_limit: int
    """Bytes of resident memory above which a process takes no new trial."""


_trials_served = 0


def run_trial(config: dict[str, Any]) -> dict[str, Any]:
    """Train one trial and return how it ended.

    Args:
        config: `trial`, a `TrialConfig`, and `setup`, a `Setup`.

    Returns:
        `outcome`: an `Outcome`; or `failure`: why the trial cannot go on, not worth a retry; or
        `fatal`: an error that every other trial would meet too; or `interrupted`: true.

    Raises:
        ActorWornOut: start again in a fresh process.
        Exception: anything unexpected; Ray starts the trial again, from its newest checkpoint.
    """
    global _trials_served
    trial: TrialConfig = config["trial"]
    setup: Setup = config["setup"]
    if _trials_served and psutil.Process().memory_info().rss > setup.memory_limit:
        raise ActorWornOut
    _trials_served += 1
    reporter = Reporter(trial, setup.stop)
    try:
        outcome = registry.load(setup.train)(
            trial, resume=newest_valid_checkpoint(trial.directory), report=reporter
        )
    except TrialFailure as failure:
        return {"failure": str(failure)}
    except (UsageError, SandboxUnavailable) as error:
        return {"fatal": error}
    except SystemExit:
        if not reporter.stopped:
            raise
        return {"interrupted": True}
    return {"outcome": outcome}


class Reporter:
    """The `report` of one trial: thins what goes to the driver, and stops on request."""

    def __init__(self, trial: TrialConfig, stop: Path) -> None:
        self.stopped = False
        """Whether it has ended the trial because the driver asked."""
        self._stop = stop
        self._last = trial.training.steps
        self._sent = float("-inf")

    def __call__(self, measurement: Measurement, checkpoint: Path | None) -> None:
        """Pass a measurement on if it is due.

        Raises:
            SystemExit: the sweep was interrupted; what holds resources lets go in `finally`.
        """
        if self._stop.exists():
            self.stopped = True
            raise SystemExit
        now = time.monotonic()
        evaluated = measurement.validated
        kept = evaluated or is_kept(measurement.step, self._last)
        if kept or now - self._sent >= SECONDS:
            self._sent = now
            tune.report({"measurement": measurement})
