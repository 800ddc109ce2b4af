"""Scheduler `growth`: few trainings, and the one that promises most goes on.

Every training begins with a first rung and waits there. Then always the one continues, to twice its
steps, whose next part is expected to add most hypervolume a step to the front with its merges (see
`analysis.continuation`). The others wait, without a process. The first rung is short enough that
those of the first configurations, which span what can be traded, cost `first_share` of the budget.

Once no training can be continued within the budget, or all of them together would move the front
by less than its noise, each one ends where it waits: it is evaluated on test prompts, and merges
begin.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from gdpo_tune.analysis.continuation import GROWING, Outlook, estimate_outlook
from gdpo_tune.core.trials import Rung, TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.ledger.budget import count_started
from gdpo_tune.spec.first_trials import count_first_trials, list_growth_levels
from gdpo_tune.tuning.plan import choose_tested, count_completions_left, tighten_references
from gdpo_tune.tuning.schedulers import Scheduler, Verdict

MOST_AHEAD = 7
"""Longest look ahead, in steps for each step that waiting trainings have: three doublings."""


class Growth(Scheduler):
    """Scheduler that continues one waiting training at a time; replicates run to their end."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._levels = list_growth_levels(ledger.spec)
        self._outlook: tuple[tuple[object, ...], Outlook] | None = None
        """The last outlook, and what it follows from: the engine asks several times a second."""

    def list_evaluation_steps(self, record: TrialRecord) -> tuple[int, ...]:
        """Return the steps at which a training that grows may wait."""
        return self._levels[:-1] if record.role in GROWING else ()

    def decide(self, record: TrialRecord, rung: Rung) -> Verdict:
        """Let a training wait at each level, but for those from which it was continued."""
        if rung.step not in self.list_evaluation_steps(record):
            return "continue"
        waits = record.state == "paused" and rung.completions == record.paused_at
        return "pause" if waits or rung.completions > record.paused_at else "continue"

    def find_promotable(self, *, alone: bool = False) -> int | None:
        """Return the training to continue; None if none is worth it, or fits into the budget."""
        spec = self._ledger.spec
        if count_started(self._ledger.get_records()) < count_first_trials(spec) - 1:
            return None  # all of the first ones begin before one goes on
        outlook = self._look_ahead()
        return outlook.continuations[0].number if outlook.is_worthwhile else None

    def find_ending(self) -> tuple[int, str] | None:
        """Return what ends where it waits: trainings at once, candidates by what they add."""
        spec, records = self._ledger.spec, self._ledger.get_records()
        if any(record.state == "running" and record.ends_at is None for record in records):
            return None
        for record in records:
            if record.role in GROWING and record.state == "paused":
                return record.number, self._look_ahead().explain_end()
        number = choose_tested(spec, records)
        return None if number is None else (number, "")

    def _look_ahead(self) -> Outlook:
        spec, records = self._ledger.spec, self._ledger.get_records()
        trainings = ((r.number, r.state, len(r.rungs)) for r in records if r.is_training)
        state = (spec.search.budget, *trainings)
        if self._outlook is None or self._outlook[0] != state:
            targets = {r.number: self._find_target(r) for r in records if r.role in GROWING}
            left = self._count_steps_left(records, targets)
            running = {n: step for n, step in targets.items() if records[n].state == "running"}
            waiting = {
                record.number: targets[record.number]
                for record in records
                if record.state == "paused" and record.role in GROWING
                if targets[record.number] - record.rungs[-1].step <= left
            }
            at = sum(records[number].rungs[-1].step for number in waiting)
            outlook = estimate_outlook(
                records,
                tighten_references(spec),
                waiting,
                running,
                math.log2(1 + min(left, MOST_AHEAD * at) / at) if at else 0.0,
                merges=bool(spec.has_candidates and spec.search.merges.budget),
                precision=spec.training.test_prompts / spec.training.validation_prompts,
            )
            self._outlook = state, outlook
        return self._outlook[1]

    def _find_target(self, record: TrialRecord) -> int:
        """Return the steps at the end of the next part of a training."""
        last = record.rungs[-1].step if record.rungs else 0
        return record.ends_at or next((step for step in self._levels if step > last), last)

    def _count_steps_left(
        self, records: Sequence[TrialRecord], targets: Mapping[int, int]
    ) -> float:
        """Count the steps that the budget leaves beside what runs."""
        spec = self._ledger.spec
        each = spec.training.completions_per_step
        promised = sum(
            targets.get(record.number, spec.training.steps) * each - record.cost.completions
            for record in records
            if record.state == "running" and record.is_training
        )
        return (count_completions_left(spec, records) - promised) / each
