"""Why trials fail: Ray's searchers hear that one did, its callbacks see the error."""

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
    """Says that an attempt started, and hands the reason of a final failure to the searcher."""

    def __init__(self, searcher: LedgerSearcher, on_start: Callable[[], None]) -> None:
        self._searcher = searcher
        self._on_start = on_start

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Ray has a process for the trial."""
        self._on_start()

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Ray gives the trial up: the reason goes to the ledger, the traceback beside the trial."""
        error = last_error(trial)
        self._searcher.on_failure(trial.trial_id, reason(error))
        config: TrialConfig = trial.config["trial"]
        config.directory.mkdir(parents=True, exist_ok=True)
        (config.directory / "error.txt").write_text(str(error), encoding="utf-8")


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
