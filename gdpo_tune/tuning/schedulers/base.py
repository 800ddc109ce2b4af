"""Base class of the schedulers, and itself `fifo`, under which every trial runs to its end.

Ray never stops or pauses a trial: it would count a paused trial as running, and would end a process
while it writes its checkpoint. So to Ray every scheduler is first in, first out. The searcher calls
`judge` once a rung is in the ledger, and a stop flag tells the trial to end.
"""

from __future__ import annotations

from typing import Any

from ray.tune.execution.tune_controller import TuneController
from ray.tune.experiment import Trial
from ray.tune.schedulers import FIFOScheduler

from gdpo_tune.core.trials import Rung, TrialRecord
from gdpo_tune.ledger import Ledger, compute_violation
from gdpo_tune.spec import SweepSpec
from gdpo_tune.tuning.schedulers.rungs import Verdict


class Scheduler(FIFOScheduler):
    """Scheduler that lets every trial run to its end; subclasses override its decisions."""

    promotes_beyond_budget = False
    """True if waiting trials continue after the budget is spent, as running ones do."""
    ends_at_evaluations = False
    """True if a trial always ends its process after an evaluation step, and waits."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger
        self._waiting: dict[Trial, None] = {}
        """Ray's trials that may wait for a slot, in order of arrival."""

    def __getstate__(self) -> dict[str, Any]:
        """Return an empty state for Ray's snapshots, which are never restored.

        A connection to a database cannot be written to a file.
        """
        return {}

    def on_trial_add(self, tune_controller: TuneController, trial: Trial) -> None:
        """Note a trial that Ray is to start, or to start again."""
        self._waiting[trial] = None

    def choose_trial_to_run(self, tune_controller: TuneController) -> Trial | None:
        """Return the first trial that waits for a slot.

        NOTE: Ray's own version reads all trials of the sweep, twice for each event: at 5,000 trials
        that is a quarter of the driver's time. This one never reads a trial again once it runs.
        """
        while self._waiting:
            trial = next(iter(self._waiting))
            if trial.status == Trial.PENDING:
                return trial
            del self._waiting[trial]
        return None

    def list_evaluation_steps(self, record: TrialRecord) -> tuple[int, ...]:
        """Return the steps at which a trial must be evaluated."""
        return ()

    def judge(self, record: TrialRecord, rung: Rung) -> Verdict:
        """Return the verdict on a trial after a rung that is in the ledger.

        A scheduler is rebuilt by judging every rung again in the order of their recording, except
        those for `replay`. A second call for the same rung gives the same answer.
        """
        return "continue"

    def replay(self, record: TrialRecord, rung: Rung) -> None:
        """Take in a rung of a trial that has ended, which needs no verdict any more."""

    def find_promotable(self, *, alone: bool = False) -> int | None:
        """Return the number of the waiting trial that may continue now; None if there is none.

        `alone` says that no other trial can be started at present.
        """
        return None

    def promote(self, number: int) -> None:
        """Note that a trial no longer waits."""

    def explain(self, number: int, rung: Rung) -> str:
        """Explain in one line why a trial does not continue from a rung."""
        return f"stopped at rung {rung.completions:,}"


def read_values(spec: SweepSpec, rung: Rung) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the values of the objectives, and the excess over each constraint (see `Rungs`)."""
    means = {name: metric.mean for name, metric in rung.validation.items()}
    excess = (compute_violation(bound, means[name]) for name, bound in spec.constraints.items())
    return tuple(means[name] for name in spec.objectives), tuple(excess)
