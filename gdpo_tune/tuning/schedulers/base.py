"""Base class of the schedulers, and itself `fifo`, under which every trial runs to its end."""

from __future__ import annotations

from gdpo_tune.core.trials import Rung, TrialRecord
from gdpo_tune.ledger import Ledger, compute_violation
from gdpo_tune.spec import SweepSpec
from gdpo_tune.tuning.schedulers.rungs import Verdict


class Scheduler:
    """Scheduler that lets every trial run to its end; subclasses override its decisions."""

    promotes_beyond_budget = False
    """True if waiting trials continue after the budget is spent, as running ones do."""
    ends_at_evaluations = False
    """True if a trial always ends its process after an evaluation step, and waits."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

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
