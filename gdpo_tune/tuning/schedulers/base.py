"""What every scheduler does for the searcher, and what Ray sees of it.

Ray is never asked to stop or pause a trial: it would count what is paused as running, and would end
a process while it writes its checkpoint. So to Ray every scheduler is first in, first out. The
searcher asks `judge` once a rung is in the ledger, and a trial that is to end hears of it before it
goes on (see `trainable.Reporter`).
"""

from __future__ import annotations

from ray.tune.execution.tune_controller import TuneController
from ray.tune.experiment import Trial
from ray.tune.schedulers import FIFOScheduler

from gdpo_tune.core.trials import Rung, TrialRecord
from gdpo_tune.tuning.schedulers.rungs import Verdict


class Scheduler(FIFOScheduler):
    """Lets every trial run to its end; others override what they decide."""

    promotes_beyond_budget = False
    """Whether waiting trials go on when the budget is spent, as running ones do."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: dict[Trial, None] = {}
        """Ray's trials that are not known to have a slot, in the order of their coming."""

    def on_trial_add(self, tune_controller: TuneController, trial: Trial) -> None:
        """Take note of a trial that Ray is to start, or to start again."""
        self._waiting[trial] = None

    def choose_trial_to_run(self, tune_controller: TuneController) -> Trial | None:
        """The first that waits for a slot.

        NOTE: Ray's own looks at all trials there ever were, twice for each event: at 5,000 trials
        that is a quarter of the driver's time. Here none is looked at again once it runs.
        """
        while self._waiting:
            trial = next(iter(self._waiting))
            if trial.status == Trial.PENDING:
                return trial
            del self._waiting[trial]
        return None

    def evaluate_at(self, record: TrialRecord) -> tuple[int, ...]:
        """Steps at which a trial has to be evaluated."""
        return ()

    def ends_at(self, record: TrialRecord) -> tuple[int, ...]:
        """Those of them after which it ends whatever was measured, and waits."""
        return ()

    def judge(self, record: TrialRecord, rung: Rung) -> Verdict:
        """What a trial is to do after a rung that is in the ledger.

        Rebuilding a scheduler is judging every rung again in the order of their recording, those
        aside that it may `recall`; asked twice, it answers the same.
        """
        return "continue"

    def recall(self, record: TrialRecord, rung: Rung) -> None:
        """Take note of a rung of a trial that has ended: of what it was to do nobody asks again."""

    def promotable(self, *, alone: bool = False) -> int | None:
        """Number of the waiting trial that may go on now; None if there is none.

        Args:
            alone: no other trial is to be started as things stand.
        """
        return None

    def promote(self, number: int) -> None:
        """Take note that a trial does not wait any longer."""

    def reason(self, number: int, rung: Rung) -> str:
        """Why a trial does not go on from a rung, in one line."""
        return f"stopped at rung {rung.completions:,}"
