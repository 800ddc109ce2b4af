"""Scheduler `growth`: few trainings that grow together.

Every training begins with a first rung and waits there. Then always the shortest one continues, to
twice its steps, until the bound or the budget is reached. The others wait, without a process. So
whenever a sweep ends, its trainings are about equally long, as the ends of a line of merges have to
be. The first rung is short enough that those of the first configurations, which span what can be
traded, cost `first_share` of the budget. What the budget leaves pays for further configurations.

Then each one ends where it waits: it is evaluated on test prompts, and merges begin.
"""

from __future__ import annotations

from gdpo_tune.core.trials import Rung, TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.ledger.budget import count_started
from gdpo_tune.spec.first_trials import count_first_trials, list_growth_levels
from gdpo_tune.tuning.plan import choose_tested, count_completions_left
from gdpo_tune.tuning.schedulers import Scheduler, Verdict

GROWING = ("search", "published")
"""Roles of trainings that may be continued."""
END = "no next part fits into what is left of the budget"


class Growth(Scheduler):
    """Scheduler that continues the shortest waiting training; replicates run to their end."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._levels = list_growth_levels(ledger.spec)

    def list_evaluation_steps(self, record: TrialRecord) -> tuple[int, ...]:
        """Return the steps at which a training that grows may wait."""
        return self._levels[:-1] if record.role in GROWING else ()

    def decide(self, record: TrialRecord, rung: Rung) -> Verdict:
        """Let a training wait at each level, but for those from which it was continued."""
        if rung.step not in self.list_evaluation_steps(record):
            return "continue"
        waits = record.state == "paused" and rung.completions == record.paused_at
        return "pause" if waits or rung.completions > record.paused_at else "continue"

    def find_promotable(self) -> int | None:
        """Return the training to continue; None if no next part fits into the budget."""
        spec, records = self._ledger.spec, self._ledger.get_records()
        if count_started(records) < count_first_trials(spec) - 1:
            return None  # all of the first ones begin before one goes on
        targets = {r.number: self._find_target(r) for r in records if r.role in GROWING}
        each = spec.training.completions_per_step
        promised = sum(
            targets.get(record.number, spec.training.steps) * each - record.cost.completions
            for record in records
            if record.state == "running" and record.is_training
        )
        left = (count_completions_left(spec, records) - promised) / each  # in steps
        waiting = [
            (record.rungs[-1].step, record.number)
            for record in records
            if record.role in GROWING and record.state == "paused"
            if targets[record.number] - record.rungs[-1].step <= left
        ]
        return min(waiting)[1] if waiting else None

    def find_ending(self) -> tuple[int, str] | None:
        """Return what ends where it waits: trainings at once, candidates by what they add."""
        spec, records = self._ledger.spec, self._ledger.get_records()
        if any(record.state == "running" and record.ends_at is None for record in records):
            return None
        for record in records:
            if record.role in GROWING and record.state == "paused":
                return record.number, END
        number = choose_tested(spec, records)
        return None if number is None else (number, "")

    def _find_target(self, record: TrialRecord) -> int:
        last = record.rungs[-1].step if record.rungs else 0
        return record.ends_at or next((step for step in self._levels if step > last), last)
