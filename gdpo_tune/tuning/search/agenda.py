"""The plan of a sweep that runs, computed again only once something may have changed it.

Whom to train again takes half a second to find out among thousands of trials, and Ray asks for the
next trial all the time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.tuning.search.budget import describe_spent_budget, hours_of
from gdpo_tune.tuning.search.plan import Step, find_next_step


class PlanCache:
    """What is to be run next. It has to hear of every trial that begins, measures or ends."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._spec = ledger.spec
        self._step: Step | None = None
        self._step_is_known = False
        self._budget_is_known = False

    def begun(self) -> None:
        """A trial has begun."""
        self._step_is_known = False

    def measured(self) -> None:
        """A trial has measured something, which changes the plan through the budget alone."""
        self._budget_is_known = False

    def ended(self, record: TrialRecord) -> None:
        """A trial has ended.

        Where nothing was left to do, one that was stopped leaves nothing to do; at the end of a
        sweep most are stopped.
        """
        stopped = record.role == "search" and record.state in ("pruned", "paused")
        self._step_is_known &= stopped and self._step is None

    def next(self, *, idle: bool) -> Step | None:
        """What the plan says; None if there is nothing to begin as things stand.

        Args:
            idle: whether no trial is under way.
        """
        # hours pass by themselves
        may_be_spent = not self._budget_is_known or bool(self._spec.search.budget.hours)
        if not self._step_is_known or (self._step is None and idle):
            records = self._ledger.records()
            self._step = find_next_step(self._spec, records, self._hours(records))
            self._step_is_known = True
        elif self._step is not None and may_be_spent and self.budget_is_spent():
            self._step = None
        self._budget_is_known = True
        return self._step

    def budget_is_spent(self) -> bool:
        """Whether some part of `search.budget` is."""
        records = self._ledger.records()
        return bool(describe_spent_budget(self._spec, records, self._hours(records)))

    def _hours(self, records: Sequence[TrialRecord]) -> float:
        """In which the sweep ran; 0 if nobody asks."""
        if not self._spec.search.budget.hours:
            return 0.0
        return hours_of(self._ledger.sessions(), records, time.time())
