"""Ray Tune places attempts at trials: its Tuner, and the three interfaces that it calls.

Ray Tune does for us:
    starts a process on a node that has the CPUs and GPUs of a trial, and keeps it for the next one
    brings what a process reports to the driver, and says when a process or node is lost
    starts an attempt again that the owner of its node preempted

It does not (`Lifecycle` does), and each of Ray's trials is one attempt at a trial of ours:
    retry           it counts the loss of a node, and of a store, against the trial
    stop, pause     it ends a process while that writes its checkpoint, and a paused trial keeps
                    its slot
    choose          its searchers and schedulers see one objective, and no merges
    restore         its snapshots are behind the ledger after a kill; nobody reads them, so they
                    hold nothing of ours
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ray import cloudpickle
from ray.air.execution._internal import RayActorManager
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError, RayTaskError
from ray.tune import (
    Callback,
    FailureConfig,
    PlacementGroupFactory,
    RunConfig,
    Stopper,
    TuneConfig,
    Tuner,
    with_resources,
)
from ray.tune.execution import tune_controller as controller
from ray.tune.search import Searcher

from gdpo_tune.core.errors import StoreUnreachableError
from gdpo_tune.spec import SweepSpec
from gdpo_tune.tuning.attempts import (
    FINISHED,
    KEY,
    AttemptConfig,
    AttemptError,
    AttemptFailure,
    RunSettings,
    TrialNotice,
    TrialPlaced,
    TrialResult,
    TrialUpdate,
    unwrap_message,
    wrap_for_ray,
)
from gdpo_tune.tuning.lifecycle import Lifecycle
from gdpo_tune.tuning.ray.attempt import NODE_DIED, RAY_DIRECTORY, run_trial

GRACE = 30.0
"""Seconds that trials get to reach their next report; then Ray ends them."""


class ClusterLostInterrupt(BaseException):
    """Ray cannot place anything any more.

    Not an Exception: after one, Ray Tune stops every trial and waits for the answers.
    """


class ActorManager(RayActorManager):
    """Ray's, for which a process that was killed because memory was short has died.

    Tune of Ray 2.60 knows no such error and ends with all trials.
    """

    def _actor_task_failed(self, tracked_actor_task: Any, exception: Exception) -> None:
        if isinstance(exception, OutOfMemoryError):
            exception = RayActorError(error_msg=str(exception))
        super()._actor_task_failed(tracked_actor_task, exception)


controller.RayActorManager = ActorManager  # pyright: ignore[reportPrivateImportUsage]


class _Unsaved:
    """Part of what Ray pickles for a snapshot; ours hold threads, databases and terminals."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


class TuneSearcher(_Unsaved, Searcher):
    """Hands out attempts."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        super().__init__()
        self._lifecycle = lifecycle

    def suggest(self, trial_id: str) -> Any:
        """Return the next attempt's config (a dict), None for "not now", or FINISHED."""
        answer = self._lifecycle.next_attempt(trial_id)
        if isinstance(answer, AttemptConfig):
            return wrap_for_ray(answer)
        return self.FINISHED if answer == FINISHED else None

    def on_trial_complete(self, *_: Any, **__: Any) -> None:
        """Do nothing; see `TuneCallback`."""

    def save(self, checkpoint_path: str) -> None:
        """Save nothing."""


class TuneCallback(_Unsaved, Callback):
    """Passes on what becomes of attempts, before Ray lets their trials continue."""

    def __init__(self, lifecycle: Lifecycle, on_process: Callable[[], None]) -> None:
        """`on_process` is called when a process has begun its first trial."""
        self._lifecycle, self._on_process = lifecycle, on_process
        self._seen: set[str] = set()

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: Any, **info: Any
    ) -> None:
        """Pass on a message of a trial."""
        name, message = trial.trial_id, unwrap_message(result)
        if isinstance(message, TrialUpdate):
            self._lifecycle.on_measurement(name, message.measurement)
        elif isinstance(message, TrialNotice):
            self._lifecycle.on_notice(name, message.text)
        elif isinstance(message, TrialPlaced):
            if message.process not in self._seen:
                self._seen.add(message.process)
                self._on_process()
            self._lifecycle.on_placed(name, message.node)
        elif isinstance(message, TrialResult):
            self._lifecycle.on_end(name, message)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Forget a trial, whose last result has come."""
        free_trial(trial)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Pass on that an attempt has failed."""
        self._lifecycle.on_failure(trial.trial_id, describe_failure(read_error(trial)))
        self.on_trial_complete(iteration, trials, trial)

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Pass on that an attempt lost its node to the node's owner: Ray starts it again itself."""
        self._lifecycle.on_preempted(trial.trial_id)


class TuneStopper(_Unsaved, Stopper):
    """Ends the sweep: after Ctrl-C, or when its cluster is lost and Ray would wait for it."""

    def __init__(
        self, lifecycle: Lifecycle, is_cluster_alive: Callable[[], bool], grace: float = GRACE
    ) -> None:
        """`grace` is in seconds."""
        self.requested = False
        self._lifecycle, self._is_cluster_alive = lifecycle, is_cluster_alive
        self._grace, self._deadline = grace, float("inf")

    def request(self) -> None:
        """Ask for the end of the sweep; safe in a signal handler."""
        self._lifecycle.stop()
        self.requested = True

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Return False: no result ends a trial."""
        return False

    def stop_all(self) -> bool:
        """Return whether Ray is to end all trials that run; it asks several times a second.

        Raises:
            ClusterLostInterrupt: Ray is no longer there.
        """
        if not self._is_cluster_alive():
            raise ClusterLostInterrupt
        self._lifecycle.apply_requests()
        if self.requested and self._deadline == float("inf"):
            self._deadline = time.monotonic() + self._grace
            with suppress(StoreUnreachableError, OSError):  # then Ray ends them
                self._lifecycle.stop_flag.request()
        return time.monotonic() > self._deadline


def build_tuner(
    spec: SweepSpec,
    directory: Path,
    slots: int,
    setup: RunSettings,
    lifecycle: Lifecycle,
    stopper: Stopper,
    on_process: Callable[[], None],
) -> Tuner:
    """Return Ray's Tuner for one run of the sweep in a directory."""

    def name_trial(trial: Any) -> str:
        return f"{trial.config[KEY]}-{trial.trial_id}"

    # By default Ray starts one process after the other, which takes seconds for each slot.
    os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = str(slots)
    may_have_engine = setup.gpus > 0 or spec.rollout.engine == "vllm"
    return Tuner(
        with_resources(run_trial, build_resources(spec)),
        tune_config=TuneConfig(
            search_alg=TuneSearcher(lifecycle),
            num_samples=-1,
            reuse_actors=spec.rollout.reuse_engine or not may_have_engine,
            trial_name_creator=name_trial,
            trial_dirname_creator=name_trial,
        ),
        run_config=RunConfig(
            name=RAY_DIRECTORY,
            storage_path=str(directory),
            verbose=0,
            stop=stopper,
            failure_config=FailureConfig(max_failures=0),
            callbacks=[TuneCallback(lifecycle, on_process)],
        ),
    )


def build_resources(spec: SweepSpec) -> Any:
    """Return what Ray sets aside for the process that it starts for a trial."""
    resources = spec.resources
    if resources.workers == 1:
        return {"cpu": resources.cpus, "gpu": resources.gpus}
    # This process only waits for others, and must not hold a CPU that they need. So it takes a tiny
    # share of a resource that every cluster has and nothing else uses.
    return PlacementGroupFactory([{"node:__internal_head__": 0.0001}])


def free_trial(trial: Any) -> None:
    """Free what Ray would hold of an attempt that has ended, and write to its snapshots."""
    trial.config.clear()
    trial.evaluated_params.clear()
    trial.metric_analysis.clear()
    trial.metric_n_steps.clear()
    trial.run_metadata.last_result = {"ended": True}  # Ray prints a line if it is empty
    trial.experiment_tag = ""
    # A result requested when the process started: reading it would wait for the process.
    trial._default_result_or_future = None


def read_error(trial: Any) -> BaseException | None:
    """Return the error of one of Ray's trials; None if Ray kept none."""
    # Ray's own accessor reads the uploaded copy, which does not exist before a snapshot
    file = trial.pickled_error_file
    return cloudpickle.loads(Path(file).read_bytes()) if file else None


def describe_failure(error: BaseException | None) -> AttemptFailure:
    """Return why an attempt ended, by what Ray says."""
    raised = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(raised, AttemptError):
        return AttemptFailure(raised.cause, str(raised), str(error), outage=raised.outage)
    if isinstance(error, RayTaskError) or not isinstance(error, RayActorError):
        reason = f"{type(raised).__name__}: {raised}" if raised else "unknown"
        return AttemptFailure("error", reason, str(error))
    node_died = NODE_DIED in str(error)
    is_lost = node_died or error.preempted or isinstance(error, ActorUnavailableError)
    reason = "the trial's process died (killed, out of memory, or crashed)"
    return AttemptFailure("lost" if is_lost else "died", reason, str(error), node_died)
