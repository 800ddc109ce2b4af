"""One trial in several processes: Ray Train starts them, and they meet through accelerate.

The trial's directory has to be on a disk that all nodes see.
"""

from __future__ import annotations

import uuid
from typing import Any

import ray.train
from ray.exceptions import RayActorError
from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2.api.exceptions import PreemptionError
from ray.tune.integration.ray_train import TuneReportCallback

from gdpo_tune.core import registry
from gdpo_tune.core.errors import GdpoTuneError
from gdpo_tune.core.trials import Measurement, Outcome
from gdpo_tune.training import distributed, worker_cache
from gdpo_tune.training.checkpoints import find_newest_checkpoint
from gdpo_tune.training.distributed import PATIENCE
from gdpo_tune.tuning.attempts import AttemptConfig, AttemptError, unwrap_attempt, wrap_for_ray
from gdpo_tune.tuning.ray.attempt import NODE_DIED, RAY_DIRECTORY, Reporter
from gdpo_tune.tuning.ray.head_store import read_shared_variables

STARTS = 3
"""Attempts of Ray to start the processes of a trial."""


def train_in_group(attempt: AttemptConfig) -> Outcome | None:
    """Train one trial in processes of its own; return None if it was stopped early.

    Raises:
        GdpoTuneError: one of them raised it, and all have ended.
        AttemptError: one was lost with its node, was killed, or crashed.
        TrainingFailedError: one raised something unexpected, or they could not be started.
    """
    setup = attempt.setup
    trainer = TorchTrainer(
        train_in_worker,
        train_loop_config=wrap_for_ray(attempt),
        torch_config=TorchConfig(backend="nccl" if setup.gpus else "gloo", timeout_s=PATIENCE),
        scaling_config=ScalingConfig(
            num_workers=setup.workers,
            use_gpu=bool(setup.gpus),
            resources_per_worker={"CPU": setup.cpus, "GPU": setup.gpus},
        ),
        run_config=RunConfig(
            # an earlier run of this name would be restored
            name=f"{attempt.trial.directory.name}-{uuid.uuid4().hex}",
            storage_path=str(setup.spec_file.parent / RAY_DIRECTORY / "workers"),
            # Ray Tune starts further attempts, as it does for trials of one process. By default
            # Ray Train goes on for ever after preemptions and starts that fail.
            failure_config=FailureConfig(
                max_failures=0, max_preemption_failures=0, controller_failure_limit=STARTS - 1
            ),
            callbacks=[TuneReportCallback()],
        ),
    )
    try:
        return trainer.fit().return_value
    except TrainingFailedError as error:
        raise find_cause(error, setup.workers) from error


def train_in_worker(config: dict[str, Any]) -> Outcome | None:
    """Train in one process of the group; the first one's outcome counts."""
    read_shared_variables()
    attempt = unwrap_attempt(config)
    reporter = GroupReporter(attempt)
    try:
        train = registry.load(attempt.setup.train)
        distributed.join_process_group()
        # Here: Ray may start a process long after it was told to, or once more.
        resume = distributed.broadcast_from_first(find_newest_checkpoint(attempt.trial.directory))
        return train(attempt.trial, resume=resume, report=reporter)
    except SystemExit:
        if not reporter.stopped:
            raise
        return None
    finally:
        worker_cache.release_worker_cache()  # this process is killed, not reused


class GroupReporter(Reporter):
    """The `report` of every process: the first one decides for all of them."""

    def decide(self, measurement: Measurement) -> tuple[bool, bool]:
        """Return whether to stop, and whether the measurement is due."""
        return distributed.broadcast_from_first(super().decide(measurement))

    def is_halted(self) -> bool:
        """Return False: a decision of the driver is seen at the next step."""
        return False

    def send(self, result: dict[str, Any]) -> None:
        """Pass a result on; Ray Train waits for that of every process, and takes the first's."""
        ray.train.report(result)


def find_cause(error: TrainingFailedError, workers: int) -> Exception:
    """Return the error that ended a group, as one process alone would have raised it.

    The errors of the others, in the middle of an exchange, say nothing.
    """
    if isinstance(error, PreemptionError):
        return AttemptError("lost", "the owner of a node of the trial's processes takes it back")
    failures: dict[int, Any] = getattr(error, "worker_failures", {})
    # Ray Train wraps the exception of a process, or why it is gone, in an error of its own.
    errors: list[Exception] = [
        getattr(failure, "health_check_failure", getattr(failure, "_base_exc", failure))
        for _, failure in sorted(failures.items())
    ]
    died = [failure for failure in errors if isinstance(failure, RayActorError)]
    for failure in errors:
        if isinstance(failure, GdpoTuneError | AttemptError):
            return failure
    if any(NODE_DIED in str(failure) or failure.preempted for failure in died):
        return AttemptError("lost", "the node of one of the trial's processes died")
    if died:
        message = f"one of the trial's {workers} processes died (killed, out of memory, or crashed)"
        return AttemptError("error", message)
    return errors[0] if errors else error
