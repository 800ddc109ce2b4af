"""Asynchronous successive halving by dominance: most trials end at a rung.

At each level of the budget a trial is compared with all that were measured there before it. In the
stop variant it continues or ends. In the promote variant it continues or waits, and may be promoted
once more trials rank behind it.

A trial on the front of its level always continues. Others continue if they are among the first
`1 / reduction_factor` in the order by dominance (see `schedulers`). The same records in the same
order give the same verdicts.

Source: Li et al. 2020, A system for massively parallel hyperparameter tuning (ASHA); Schmucker et
al. 2021, Multi-objective asynchronous successive halving.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from gdpo_tune.analysis.pareto import compute_losses
from gdpo_tune.core.text import format_first
from gdpo_tune.core.trials import Objective, Rung, TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.spec.model import AshaSettings
from gdpo_tune.tuning.schedulers import (
    MAX_NAMED,
    Floats,
    Scheduler,
    Verdict,
    compute_ranks,
    find_dominating,
    find_first,
    read_values,
    sum_violations,
    update_ranks,
)

RERANK_FROM = 50
"""Number of new trials from which ranking all again is faster than adding them one by one."""
Variant = Literal["stop", "promote"]


class Asha(Scheduler):
    """Scheduler that compares search trials at rungs; baselines and replicates run to their end."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        spec, settings = ledger.spec, ledger.spec.search.scheduler
        assert isinstance(settings, AshaSettings)
        self._steps = settings.list_rungs(spec.training.steps)
        self._rungs = SuccessiveHalving(
            spec.list_objectives(),
            [step * spec.training.completions_per_step for step in self._steps],
            settings.reduction_factor,
            settings.variant,
            len(spec.constraints),
        )

    def list_evaluation_steps(self, record: TrialRecord) -> tuple[int, ...]:
        """Return the steps of the rungs for search trials, and none for others."""
        return self._steps if record.role == "search" else ()

    def decide(self, record: TrialRecord, rung: Rung) -> Verdict:
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

    def find_promotable(self) -> int | None:
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


class SuccessiveHalving:
    """Measurements of trials at each level, and the verdicts that follow."""

    def __init__(
        self,
        objectives: Sequence[Objective],
        levels: Sequence[int],
        reduction_factor: float = 3,
        variant: Variant = "stop",
        constraints: int = 0,
    ) -> None:
        """Create empty levels, in completions; `constraints` is the number C.

        `reduction_factor` is the inverse of the share of trials that continue besides the front.
        """
        self._objectives = tuple(objectives)
        self._otherwise: Verdict = "stop" if variant == "stop" else "pause"
        self._levels = {
            level: _Level(len(self._objectives), constraints, reduction_factor)
            for level in sorted(levels)
        }

    def record(
        self,
        number: int,
        completions: int,
        values: Sequence[float],
        violations: Sequence[float] = (),
    ) -> Verdict:
        """Take in a trial's measurement and return the verdict.

        A second record at the same level changes nothing. Between levels, the trial continues. All
        numbers are finite. The M `values` are in the units and directions of the objectives; of the
        C `violations`, one of 0 or less means that the constraint is met.
        """
        level = self._levels.get(completions)
        if level is None:
            return "continue"
        if number not in level.verdicts:
            self.promote(number)  # it does not wait at a lower level any more
            self.replay(number, completions, values, violations)
            level.decide_last(self._otherwise)
        return level.verdicts[number]

    def replay(
        self,
        number: int,
        completions: int,
        values: Sequence[float],
        violations: Sequence[float] = (),
    ) -> None:
        """Take in, as `record` does, a trial that has ended: others are compared with it."""
        level = self._levels.get(completions)
        if level is not None:
            losses = compute_losses([values], self._objectives)
            level.add(number, np.append(losses, np.asarray(violations, dtype=float)))

    def find_promotable(self) -> int | None:
        """Return the first waiting trial, from the highest level whose quota it fits."""
        numbers = (level.find_promotable() for level in reversed(self._levels.values()))
        return next((number for number in numbers if number is not None), None)

    def promote(self, number: int) -> None:
        """Let a waiting trial continue."""
        for level in self._levels.values():
            if level.waiting.pop(number, None) is not None:
                level.verdicts[number] = "continue"

    def list_dominating(self, number: int, completions: int) -> tuple[int, ...]:
        """Return the trials that dominated a trial when it reached a level, in recorded order."""
        return self._levels[completions].list_dominating(number)


class _Level:
    """Trials of one level, one row each."""

    def __init__(self, objectives: int, constraints: int, reduction_factor: float) -> None:
        self.verdicts: dict[int, Verdict] = {}
        self.waiting: dict[int, int] = {}  # number of a paused trial -> its row
        self._numbers: list[int] = []
        self._row_of: dict[int, int] = {}
        self._objectives = objectives
        self._rows = np.empty((16, objectives + constraints), order="F")  # read by columns
        self._rank = np.empty(16, dtype=np.int64)
        self._ranked = 0  # number of trials whose ranks are computed
        self._factor = reduction_factor
        self._compared = 0
        """Number of trials when the waiting ones were last compared: only new trials help them."""

    def add(self, number: int, row: Floats) -> None:
        if len(self._numbers) == len(self._rows):
            self._rows = np.asfortranarray(np.concatenate([self._rows, np.empty_like(self._rows)]))
            self._rank = np.concatenate([self._rank, np.empty_like(self._rank)])
        self._row_of[number] = len(self._numbers)
        self._rows[len(self._numbers)] = row
        self._numbers.append(number)

    def decide_last(self, otherwise: Verdict) -> None:
        """Store the verdict on the trial added last: `continue`, or else `otherwise`."""
        last, total = len(self._numbers) - 1, sum_violations(self._violations)
        ahead = int(np.count_nonzero(find_dominating(self._losses, total, last)))
        # trials that dominate it come before it: often this makes ranks unnecessary
        continues = not ahead or (
            ahead < self._quota and self._find_first([last], total) is not None
        )
        self.verdicts[self._numbers[last]] = "continue" if continues else otherwise
        if not continues and otherwise == "pause":
            self.waiting[self._numbers[last]] = last

    def find_promotable(self) -> int | None:
        if self._compared == len(self._numbers) or not self.waiting:
            return None
        first = self._find_first(list(self.waiting.values()), sum_violations(self._violations))
        if first is None:
            self._compared = len(self._numbers)
            return None
        return self._numbers[first]

    def list_dominating(self, number: int) -> tuple[int, ...]:
        end = self._row_of[number] + 1
        total = sum_violations(self._violations[:end])
        rows = np.flatnonzero(find_dominating(self._losses[:end], total, end - 1))
        return tuple(self._numbers[row] for row in rows.tolist())

    @property
    def _quota(self) -> int:
        """Number of trials that continue, besides the front."""
        return max(1, int(len(self._numbers) / self._factor))

    @property
    def _losses(self) -> Floats:
        return self._rows[: len(self._numbers), : self._objectives]

    @property
    def _violations(self) -> Floats:
        return self._rows[: len(self._numbers), self._objectives :]

    def _find_first(self, rows: Sequence[int], total: Floats) -> int | None:
        """Return the first of some rows in the order of all; None if it is beyond the quota."""
        count = len(self._numbers)
        rank = self._rank[:count]
        if count - self._ranked >= RERANK_FROM:
            rank[:] = compute_ranks(self._losses, total)
        else:
            for end in range(self._ranked + 1, count + 1):
                update_ranks(self._losses[:end], total[:end], rank[:end])
        self._ranked = count
        return find_first(self._losses, total, rank, np.asarray(rows), self._quota)
