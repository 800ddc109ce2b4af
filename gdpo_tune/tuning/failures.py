"""What only Ray's callbacks see: processes, why trials fail, and the end of each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray import cloudpickle
from ray.exceptions import RayActorError, RayTaskError
from ray.tune import Callback

from gdpo_tune.trials import TrialConfig
from gdpo_tune.tuning.searcher import LedgerSearcher
from gdpo_tune.tuning.trainable import WorkerDiedError


class Attempts(Callback):
    """Says that a process started, hands the reason of a final failure to the searcher, and makes
    Ray forget what trials that have ended were about."""

    def __init__(self, searcher: LedgerSearcher, on_process: Callable[[], None]) -> None:
        self._searcher = searcher
        self._on_process = on_process
        self._processes: set[str] = set()
        """The actors of all trials so far. Their names: a handle would keep one alive."""

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Ray has a process for the trial, which may have served others before."""
        process = repr(trial.temporary_state.ray_actor)
        if process not in self._processes:
            self._processes.add(process)
            self._on_process()

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Whatever there is to know of the trial is in the ledger by now."""
        forget(trial)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Ray gives the trial up: the reason goes to the ledger, the traceback beside the trial."""
        error = last_error(trial)
        self._searcher.on_failure(trial.trial_id, reason(error))
        config: TrialConfig = trial.config["trial"]
        config.directory.mkdir(parents=True, exist_ok=True)
        (config.directory / "error.txt").write_text(str(error), encoding="utf-8")
        forget(trial)


def forget(trial: Any) -> None:
    """Empty what Ray would hold of a trial to the end of the sweep, and then write to a snapshot
    that nobody reads."""
    trial.config.clear()
    trial.evaluated_params.clear()
    trial.metric_analysis.clear()
    trial.metric_n_steps.clear()
    trial.run_metadata.last_result = {"ended": True}  # of an empty one Ray prints a line
    trial.experiment_tag = ""
    # What its process was asked for as it started: who asks for the last result would wait for it.
    trial._default_result_or_future = None


def last_error(trial: Any) -> BaseException | None:
    """What ended a Ray trial's last attempt; None if Ray kept no error."""
    # Ray's own accessor reads the uploaded copy, which does not exist before a snapshot
    file = trial.pickled_error_file
    return cloudpickle.loads(Path(file).read_bytes()) if file else None


def reason(error: BaseException | None) -> str:
    """One line for the ledger."""
    if isinstance(error, RayTaskError):
        if isinstance(error.cause, WorkerDiedError):
            return str(error.cause)
        return f"{type(error.cause).__name__}: {error.cause}"
    if isinstance(error, RayActorError):
        return "the trial's process died (killed, out of memory, or crashed)"
    return f"{type(error).__name__}: {error}" if error else "unknown"
