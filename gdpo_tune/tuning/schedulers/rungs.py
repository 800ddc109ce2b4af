"""Asynchronous successive halving by dominance: who goes on from a rung. Knows no Ray.

At each level of the budget a trial is compared with all that were measured there before it. In the
stop variant it goes on or ends at once. In the promote variant it goes on or waits, and may be
promoted once more trials have come in behind it.

A trial on the front of its level always goes on. Of the others, those go on that are among the
first `1 / reduction_factor` in the order of `priority`, so that nobody in the worst third
does under a factor of 3.

Verdicts depend on the order in which trials are recorded, and on nothing else: recording the same
again gives the same verdicts.

Source: Li et al. 2020, A system for massively parallel hyperparameter tuning (ASHA); Schmucker et
al. 2021, Multi-objective asynchronous successive halving.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from gdpo_tune.analysis.pareto import losses
from gdpo_tune.core.trials import Objective
from gdpo_tune.tuning.schedulers.priority import (
    Floats,
    Ranks,
    add_rank,
    dominating,
    first_in_order,
    ranks,
    total_excess,
)

Verdict = Literal["continue", "stop", "pause"]
Variant = Literal["stop", "promote"]

AT_ONCE = 50
"""From so many trials on, ranking all anew takes less time than adding one after the other."""


class Rungs:
    """What trials were worth at each level, and what follows from it."""

    def __init__(
        self,
        objectives: Sequence[Objective],
        levels: Sequence[int],
        reduction_factor: float = 3,
        variant: Variant = "stop",
        constraints: int = 0,
    ) -> None:
        """
        Args:
            objectives: M of them.
            levels: completions at which trials are compared.
            reduction_factor: one of so many goes on, the front aside.
            variant: what happens to a trial that does not go on.
            constraints: how many there are, C.
        """
        self._objectives = tuple(objectives)
        self._variant: Variant = variant
        self._levels = {
            level: _Level(len(self._objectives), constraints, reduction_factor)
            for level in sorted(levels)
        }

    def record(
        self, number: int, completions: int, values: Sequence[float], excess: Sequence[float] = ()
    ) -> Verdict:
        """Take in what a trial measured, and decide.

        Args:
            number: of the trial.
            completions: sampled by then; what is no level decides nothing.
            values: M, in the units and directions of the objectives; finite.
            excess: C, by how much each constraint is broken; finite; 0 or less: it holds.

        Returns:
            What the trial is to do. A second record at the same level changes nothing.
        """
        level = self._levels.get(completions)
        if level is None:
            return "continue"
        if number not in level.verdicts:
            level.add(number, self._row(values, excess))
            goes_on = level.last_goes_on()
            self.promote(number)  # it would not be here if it still waited below
            turned_away: Verdict = "stop" if self._variant == "stop" else "pause"
            level.decide(number, "continue" if goes_on else turned_away)
        return level.verdicts[number]

    def recall(
        self, number: int, completions: int, values: Sequence[float], excess: Sequence[float] = ()
    ) -> None:
        """Take in what a trial measured that has ended since: `record`, but for the verdict.

        Others are compared with it, and that is all that is left of it.
        """
        level = self._levels.get(completions)
        if level is not None:
            level.add(number, self._row(values, excess))

    def promotable(self) -> int | None:
        """The waiting trial to go on with: of the highest level, the first in priority."""
        for level in reversed(self._levels.values()):
            number = level.promotable()
            if number is not None:
                return number
        return None

    def promote(self, number: int) -> None:
        """Let a waiting trial go on."""
        for level in self._levels.values():
            level.promote(number)

    def better(self, number: int, completions: int) -> tuple[int, ...]:
        """Trials that dominated a trial when it came to a level, in the order of their recording.

        Meeting the constraints, or coming closer to them, counts as dominating.
        """
        return self._levels[completions].better(number)

    def _row(self, values: Sequence[float], excess: Sequence[float]) -> Floats:
        return np.append(losses([values], self._objectives), np.asarray(excess, dtype=float))


class _Level:
    """The trials of one level, a row each."""

    def __init__(self, objectives: int, constraints: int, reduction_factor: float) -> None:
        self.verdicts: dict[int, Verdict] = {}
        self._numbers: list[int] = []
        self._row_of: dict[int, int] = {}
        self._waiting: dict[int, int] = {}
        """Number of a paused trial -> its row."""
        self._objectives = objectives
        self._rows = np.empty((16, objectives + constraints), order="F")  # read by columns
        self._rank = np.empty(16, dtype=np.int64)
        self._ranked = 0
        """Trials whose ranks are known."""
        self._factor = reduction_factor
        self._looked_at = 0
        """Trials when the waiting ones were last compared: only new ones make room."""

    def add(self, number: int, row: Floats) -> None:
        """Add a trial."""
        if len(self._numbers) == len(self._rows):
            self._rows = np.asfortranarray(np.concatenate([self._rows, np.empty_like(self._rows)]))
            self._rank = np.concatenate([self._rank, np.empty_like(self._rank)])
        last = len(self._numbers)
        self._rows[last] = row
        self._numbers.append(number)
        self._row_of[number] = last

    def last_goes_on(self) -> bool:
        """Whether the trial that was added last goes on."""
        last, broken = len(self._numbers) - 1, total_excess(self._excess)
        ahead = int(np.count_nonzero(dominating(self._losses, broken, last)))
        if not ahead:
            return True
        # Whoever dominates it stands before it: often that spares the ranks.
        return ahead < self._room and self._first_of([last], broken) is not None

    def decide(self, number: int, verdict: Verdict) -> None:
        """Take note of what becomes of a trial that was added."""
        self.verdicts[number] = verdict
        if verdict == "pause":
            self._waiting[number] = self._row_of[number]

    def promote(self, number: int) -> None:
        """Let a trial go on if it waits here."""
        if self._waiting.pop(number, None) is not None:
            self.verdicts[number] = "continue"

    def promotable(self) -> int | None:
        """The waiting trial that is next, if it is among those for whom there is room."""
        if self._looked_at == len(self._numbers) or not self._waiting:
            return None
        first = self._first_of(list(self._waiting.values()), total_excess(self._excess))
        if first is None:
            self._looked_at = len(self._numbers)
            return None
        return self._numbers[first]

    def better(self, number: int) -> tuple[int, ...]:
        """Trials recorded before one that dominate it."""
        end = self._row_of[number] + 1
        broken = total_excess(self._excess[:end])
        found = np.flatnonzero(dominating(self._losses[:end], broken, end - 1))
        return tuple(map(self._numbers.__getitem__, found.tolist()))

    @property
    def _room(self) -> int:
        """How many go on, those on the front aside."""
        return max(1, int(len(self._numbers) / self._factor))

    @property
    def _losses(self) -> Floats:
        return self._rows[: len(self._numbers), : self._objectives]

    @property
    def _excess(self) -> Floats:
        return self._rows[: len(self._numbers), self._objectives :]

    def _first_of(self, rows: Sequence[int], broken: Floats) -> int | None:
        rank = self._ranks(broken)
        return first_in_order(self._losses, broken, rank, np.asarray(rows), self._room)

    def _ranks(self, broken: Floats) -> Ranks:
        """Ranks of all; of those that are known only what new trials change is computed again."""
        count = len(self._numbers)
        rank = self._rank[:count]
        if count - self._ranked >= AT_ONCE:
            rank[:] = ranks(self._losses, broken)
        else:
            for end in range(self._ranked + 1, count + 1):
                add_rank(self._losses[:end], broken[:end], rank[:end])
        self._ranked = count
        return rank
