"""Asynchronous successive halving by dominance: most trials end at a rung."""

from __future__ import annotations

from gdpo_tune.core.text import format_first
from gdpo_tune.core.trials import Rung, TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.spec import AshaSettings
from gdpo_tune.tuning.schedulers.base import Scheduler, read_values
from gdpo_tune.tuning.schedulers.rungs import Rungs, Verdict

MAX_NAMED = 3
"""Number of dominating trials that an explanation names."""


class Asha(Scheduler):
    """Scheduler that compares search trials at rungs; baselines and replicates run to their end."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._spec, settings = ledger.spec, ledger.spec.search.scheduler
        assert isinstance(settings, AshaSettings)
        self._steps = settings.list_rungs(self._spec.training.steps)
        self._rungs = Rungs(
            self._spec.list_objectives(),
            [step * self._spec.training.completions_per_step for step in self._steps],
            settings.reduction_factor,
            settings.variant,
            len(self._spec.constraints),
        )

    def list_evaluation_steps(self, record: TrialRecord) -> tuple[int, ...]:
        """Return the steps of the rungs for search trials, and none for others."""
        return self._steps if record.role == "search" else ()

    def judge(self, record: TrialRecord, rung: Rung) -> Verdict:
        """Return the verdict on a trial; rungs elsewhere than at the levels decide nothing."""
        if record.role != "search":
            return "continue"
        values = read_values(self._ledger.spec, rung)
        return self._rungs.record(record.number, rung.completions, *values)

    def replay(self, record: TrialRecord, rung: Rung) -> None:
        """Keep the measurements of an ended trial: others are compared with it."""
        if record.role == "search":
            values = read_values(self._ledger.spec, rung)
            self._rungs.replay(record.number, rung.completions, *values)

    def find_promotable(self, *, alone: bool = False) -> int | None:
        """Return the waiting trial to promote next."""
        return self._rungs.find_promotable()

    def promote(self, number: int) -> None:
        """Let a waiting trial continue."""
        self._rungs.promote(number)

    def explain(self, number: int, rung: Rung) -> str:
        """Name the rung at which a trial stopped, and the trials that dominated it there."""
        better = self._rungs.list_dominating(number, rung.completions)
        named = format_first([f"#{other}" for other in better], MAX_NAMED)
        return f"{super().explain(number, rung)}: dominated by {named}"
