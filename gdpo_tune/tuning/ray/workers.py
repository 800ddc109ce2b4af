"""One trial in several processes: Ray Train starts them, and they meet through accelerate.

What calls this holds no CPU of its own, or it would keep a slot from the processes that it waits
for: see `runner.resources_of`. The trial's folder has to be on a disk that all nodes see.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection
from pathlib import Path
from typing import Any

import ray.train
from ray.exceptions import RayActorError
from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
from ray.train.torch import TorchConfig, TorchTrainer
from ray.tune.integration.ray_train import TuneReportCallback

from gdpo_tune.core import registry
from gdpo_tune.core.errors import GdpoTuneError
from gdpo_tune.core.trials import Measurement, Outcome, TrialConfig
from gdpo_tune.training import ranks, warm
from gdpo_tune.tuning.ray.lost import NODE_DIED, NodeLostError, WorkerDiedError
from gdpo_tune.tuning.ray.reporter import Reporter
from gdpo_tune.tuning.ray.setup import Group, Setup

PATIENCE = 3600
"""Seconds that a process waits for the others: one may be writing a large checkpoint."""


def train_in_group(
    trial: TrialConfig,
    setup: Setup,
    group: Group,
    resume: Path | None,
    ends_at: Collection[int] = (),
) -> Outcome | None:
    """Train one trial in processes of its own; None if the trial ended before its end.

    Raises:
        GdpoTuneError: what ended one of them on purpose; it ends all.
        NodeLostError: one was lost with its node.
        WorkerDiedError: one was killed or crashed.
        TrainingFailedError: one raised something unexpected, or they could not be started.
    """
    trainer = TorchTrainer(
        work,
        train_loop_config={
            "trial": trial,
            "setup": setup,
            "resume": resume,
            "ends_at": ends_at,
        },
        torch_config=TorchConfig(backend="nccl" if group.gpus else "gloo", timeout_s=PATIENCE),
        scaling_config=ScalingConfig(
            num_workers=group.workers,
            use_gpu=bool(group.gpus),
            resources_per_worker={"CPU": group.cpus, "GPU": group.gpus},
        ),
        run_config=RunConfig(
            name=f"{trial.directory.name}-{uuid.uuid4().hex}",  # an earlier one would be restored
            storage_path=str(group.folder),
            # Further attempts are Ray Tune's business, so that both kinds of trial are alike.
            failure_config=FailureConfig(max_failures=0),
            callbacks=[TuneReportCallback()],
        ),
    )
    try:
        return trainer.fit().return_value
    except TrainingFailedError as error:
        raise cause(error, group.workers) from error


def work(config: dict[str, Any]) -> Outcome | None:
    """What each process does; the first one's outcome counts."""
    trial: TrialConfig = config["trial"]
    setup: Setup = config["setup"]
    reporter = GroupReporter(trial, setup.stop, config["ends_at"], setup.pace, setup.folder)
    try:
        return registry.load(setup.train)(trial, resume=config["resume"], report=reporter)
    except SystemExit:
        if not reporter.stopped:
            raise
        return None
    finally:
        warm.release()  # this process is not used again, and is killed rather than ended


class GroupReporter(Reporter):
    """The `report` of every process: the first one decides for all of them."""

    def decide(self, measurement: Measurement) -> tuple[bool, bool]:
        """Whether to stop, and whether the measurement is due."""
        return ranks.from_first(super().decide(measurement))

    def halted(self) -> bool:
        """What the driver decides is seen at the next step: it is not waited for here."""
        return False

    def send(self, result: dict[str, Any]) -> None:
        """Pass a result on; Ray Train waits until every process has, and takes the first's."""
        ray.train.report(result)


def cause(error: TrainingFailedError, workers: int) -> Exception:
    """The error that ended a group, as one process alone would have raised it.

    One that fails leaves the others in the middle of an exchange, whose errors say nothing.
    """
    failures: dict[int, Exception] = getattr(error, "worker_failures", {})
    found = [unwrapped(failure) for _, failure in sorted(failures.items())]
    for failure in found:
        if isinstance(failure, GdpoTuneError):
            return failure
    for failure in found:
        if isinstance(failure, RayActorError) and NODE_DIED in str(failure):
            return NodeLostError()
    for failure in found:
        if isinstance(failure, RayActorError):
            return WorkerDiedError(
                f"one of the trial's {workers} processes died (killed, out of memory, or crashed)"
            )
    return found[0] if found else error


def unwrapped(failure: Exception) -> Exception:
    """What Ray Train puts into words of its own: a process's exception, or why it is gone."""
    return getattr(failure, "health_check_failure", getattr(failure, "_base_exc", failure))
