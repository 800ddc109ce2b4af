"""Scheduler `halving`: a budget for many configurations, then for few.

Every training begins with a first, short rung and waits there. Once all configurations of the wide
rung have been measured, `survivors` chooses those that go on; the others end, without a test
evaluation. Then always the shortest training goes on, to the next of a few levels, until all have
the length that the budget pays for. The others wait, without a process. So whenever a sweep ends,
by an hour's limit too, its trainings are about equally long, as the ends of a line of merges have
to be. What the budget leaves pays for further configurations.

Then each one ends where it waits: it is evaluated on test prompts, and merges begin.

What follows next depends on the records alone. The first line that holds decides:

    a baseline has not begun               it begins             plan.find_next_trial
    the wide rung lacks configurations     the next one begins   plan.find_next_trial
    some were not measured there           wait                  survivors.is_wide_rung_measured
    a chosen corner has not begun          it begins             survivors.find_corner
    one that was not chosen waits          it ends               Halving.list_stopped
    a next level fits into the budget      the shortest goes on  Halving.find_promotable
    a training waits                       it ends, with a test  Halving.find_ending
    a merge or checkpoint is worth a try   it is evaluated       plan.plan_merge_or_checkpoint
    the budget pays for a whole training   one begins            plan.can_begin
    a merge or checkpoint is worth a test  the best is tested    plan.choose_tested
    a place on the front is uncertain      a fresh seed trains   replicates.choose_replicate
"""

from __future__ import annotations

from collections.abc import Sequence

from gdpo_tune.core.trials import Rung, TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.spec.first_trials import GROWING, find_wide_step
from gdpo_tune.tuning.plan import choose_tested, count_completions_left
from gdpo_tune.tuning.schedulers import Scheduler, Verdict
from gdpo_tune.tuning.survivors import (
    Survivors,
    choose_survivors,
    find_corner,
    is_wide_rung_measured,
    list_levels,
    list_wide_rung_trials,
)

END = "no next part fits into what is left of the budget"
STOPPED = "stopped at the wide rung: others there span the front further"


class Halving(Scheduler):
    """Scheduler that continues the shortest chosen training; replicates run to their end."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._chosen: tuple[object, Survivors] | None = None

    def list_evaluation_steps(self, record: TrialRecord) -> tuple[int, ...]:
        """Return the steps at which a training may wait."""
        levels = self._list_levels() if record.role in GROWING else ()
        return tuple(step for step in levels if step < self._ledger.spec.training.steps)

    def decide(self, record: TrialRecord, rung: Rung) -> Verdict:
        """Let a training wait at each level, but for those from which it was continued."""
        if rung.step not in self.list_evaluation_steps(record):
            return "continue"
        waits = record.state == "paused" and rung.completions == record.paused_at
        return "pause" if waits or rung.completions > record.paused_at else "continue"

    def find_promotable(self) -> int | None:
        """Return the training to continue; None if no next part fits into the budget."""
        spec, records = self._ledger.spec, self._ledger.get_records()
        survivors = self._find_survivors()
        if survivors is None or find_corner(survivors, records) is not None:
            return None  # all begin before one goes on
        growing = [r for r in records if r.role in GROWING]
        levels = self._list_levels()
        targets = {r.number: _find_target(r, levels) for r in growing}
        each = spec.training.completions_per_step
        promised = sum(
            targets.get(record.number, spec.training.steps) * each - record.cost.completions
            for record in records
            if record.state == "running" and record.is_training
        )
        left = (count_completions_left(spec, records) - promised) / each  # in steps
        stopped = self.list_stopped()
        waiting = [
            (record.rungs[-1].step, record.number)
            for record in growing
            if record.state == "paused" and record.number not in stopped
            if 0 < targets[record.number] - record.rungs[-1].step <= left
        ]
        return min(waiting)[1] if waiting else None

    def list_stopped(self) -> Sequence[int]:
        """Return the waiting trainings of the wide rung that were not chosen."""
        records, survivors = self._ledger.get_records(), self._find_survivors()
        if survivors is None:
            return ()
        wide = list_wide_rung_trials(self._ledger.spec, records)
        return [r.number for r in wide if r.state == "paused" and r.number not in survivors.numbers]

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

    def explain(self, rung: Rung) -> str:
        """Say that others at the wide rung were chosen."""
        return STOPPED

    def _find_survivors(self) -> Survivors | None:
        """Return what goes on, computed again only if the wide rung has changed; None before."""
        spec, records = self._ledger.spec, self._ledger.get_records()
        if not is_wide_rung_measured(spec, records):
            return None
        ended = [r.number for r in records if r.role in GROWING and r.ends_at is not None]
        key = (
            spec.search,
            [(r.number, bool(r.rungs)) for r in list_wide_rung_trials(spec, records)],
            [(r.number, r.state) for r in records if r.is_initial],
            ended,
        )
        if self._chosen is None or self._chosen[0] != key:
            self._chosen = key, choose_survivors(spec, records)
        return self._chosen[1]

    def _list_levels(self) -> tuple[int, ...]:
        """Return the steps at which trainings wait or end, as far as they are known."""
        spec, records = self._ledger.spec, self._ledger.get_records()
        if (survivors := self._find_survivors()) is None:
            return (find_wide_step(spec, records),)
        return list_levels(spec, records, survivors.end)


def _find_target(record: TrialRecord, levels: Sequence[int]) -> int:
    last = record.rungs[-1].step if record.rungs else 0
    return record.ends_at or next((step for step in levels if step > last), last)
