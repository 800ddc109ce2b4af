"""Asynchronous successive halving by dominance: most trials end at a rung."""

from __future__ import annotations

from gdpo_tune.core.trials import Rung, TrialRecord
from gdpo_tune.ledger import Ledger, compute_violation
from gdpo_tune.spec import AshaSettings, SweepSpec
from gdpo_tune.tuning.schedulers.base import Scheduler
from gdpo_tune.tuning.schedulers.rungs import Rungs, Verdict

NAMED = 3
"""So many of the trials that dominate another are named."""


def build(ledger: Ledger) -> Scheduler:
    """The scheduler of a sweep that stops trials at rungs."""
    assert isinstance(ledger.spec.search.scheduler, AshaSettings)
    return Asha(ledger.spec, ledger.spec.search.scheduler)


class Asha(Scheduler):
    """Compares trials of the search at rungs; baselines and replicates run to their end."""

    def __init__(self, spec: SweepSpec, settings: AshaSettings) -> None:
        super().__init__()
        training = spec.training
        self._steps = settings.levels(training.steps)
        self._spec = spec
        self._rungs = Rungs(
            spec.objective_list(),
            [step * training.completions_per_step for step in self._steps],
            settings.reduction_factor,
            settings.variant,
            len(spec.constraints),
        )

    def evaluate_at(self, record: TrialRecord) -> tuple[int, ...]:
        """The rungs, for trials of the search."""
        return self._steps if record.role == "search" else ()

    def judge(self, record: TrialRecord, rung: Rung) -> Verdict:
        """What a trial is to do; rungs elsewhere than at the levels decide nothing."""
        if record.role != "search":
            return "continue"
        return self._rungs.record(record.number, rung.completions, *self._found(rung))

    def recall(self, record: TrialRecord, rung: Rung) -> None:
        """Keep what an ended trial measured: others are compared with it."""
        if record.role == "search":
            self._rungs.recall(record.number, rung.completions, *self._found(rung))

    def promotable(self, *, alone: bool = False) -> int | None:
        """The waiting trial that is next."""
        return self._rungs.promotable()

    def promote(self, number: int) -> None:
        """Let a waiting trial go on."""
        self._rungs.promote(number)

    def reason(self, number: int, rung: Rung) -> str:
        """At which rung a trial stopped, and who was better there."""
        better = self._rungs.better(number, rung.completions)
        named = ", ".join(f"#{other}" for other in better[:NAMED])
        more = f" and {len(better) - NAMED} more" if len(better) > NAMED else ""
        return f"{super().reason(number, rung)}: dominated by {named}{more}"

    def _found(self, rung: Rung) -> tuple[list[float], list[float]]:
        """Values of the objectives, and by how much each constraint is broken."""
        found = rung.validation
        return (
            [found[name].mean for name in self._spec.objectives],
            [
                compute_violation(bound, found[name].mean)
                for name, bound in self._spec.constraints.items()
            ],
        )
