"""Population-based training: members meet again and again, and the last take over from the first.

A meeting is synchronous. Every member runs up to it, in turns where there are fewer slots than
members, then its process ends and it waits with a checkpoint. Once nobody is under way any more,
the generation is decided and recorded, checkpoints are handed over, and all go on. So who takes
over from whom does not hang on how fast trials are, on the number of slots, or on when the driver
was killed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gdpo_tune.analysis.lineage import training_of
from gdpo_tune.core.trials import MOVABLE, Generation, Params, Rung, TrialRecord
from gdpo_tune.ledger import Ledger, compute_violation
from gdpo_tune.spec import PbtSettings
from gdpo_tune.tuning.schedulers.base import Scheduler
from gdpo_tune.tuning.schedulers.handover import hand_over
from gdpo_tune.tuning.schedulers.population import Exploration, Range, Standing, decide
from gdpo_tune.tuning.schedulers.rungs import Verdict


def build(ledger: Ledger) -> Scheduler:
    """The scheduler of a sweep whose trials are a population."""
    assert isinstance(ledger.spec.search.scheduler, PbtSettings)
    return Pbt(ledger, ledger.spec.search.scheduler)


class Pbt(Scheduler):
    """Lets members wait for one another; baselines and replicates run to their end.

    Once begun, a population goes on to its end: halfway it has no policy to show.
    """

    promotes_beyond_budget = True

    def __init__(self, ledger: Ledger, settings: PbtSettings) -> None:
        super().__init__()
        self._ledger = ledger
        self._spec = ledger.spec
        self._settings = settings
        self._meetings = settings.meetings(ledger.spec.training.steps)

    def __getstate__(self) -> dict[str, Any]:
        """An empty state, for the copy that Ray writes and nothing ever reads: the connection to a
        database cannot be written to a file."""
        return {}

    def evaluate_at(self, record: TrialRecord) -> tuple[int, ...]:
        """Where a member still has to meet others."""
        if record.role != "member":
            return ()
        met = self._ledger.find_last_meeting(record.number)
        return tuple(step for step in self._meetings if step > met)

    def ends_at(self, record: TrialRecord) -> tuple[int, ...]:
        """The same: nobody goes on before all have met."""
        return self.evaluate_at(record)

    def judge(self, record: TrialRecord, rung: Rung) -> Verdict:
        """A member waits where it has to meet others."""
        return "pause" if rung.step in self.evaluate_at(record) else "continue"

    def promotable(self, *, alone: bool = False) -> int | None:
        """A member that has met the others; the meeting takes place once all are there."""
        members = [record for record in self._ledger.records() if record.role == "member"]
        waiting = [record for record in members if record.state == "paused"]
        free = [record.number for record in waiting if self._waits_at(record) is None]
        under_way = any(record.state == "running" for record in members)
        if alone and waiting and not free and not under_way:
            free = list(self._meet(waiting).members)
        return min(free, default=None)

    def _waits_at(self, record: TrialRecord) -> int | None:
        """The step of the meeting that a member waits for."""
        coming = self.evaluate_at(record)
        return max((rung.step for rung in record.rungs if rung.step in coming), default=None)

    def _meet(self, waiting: Sequence[TrialRecord]) -> Generation:
        """Decide for those who wait at the earliest step: others joined later, or came further."""
        places = {record.number: self._waits_at(record) or 0 for record in waiting}
        step = min(places.values())
        standings = [self._standing(r, step) for r in waiting if places[r.number] == step]
        exploits = decide(
            step, standings, self._spec.objective_list(), self._domains(), self._exploration()
        )
        generation = Generation(step, tuple(s.number for s in standings), exploits)
        self._ledger.record_generation(generation)
        for exploit in exploits:
            hand_over(self._ledger, exploit)
        return generation

    def _standing(self, record: TrialRecord, step: int) -> Standing:
        found = next(rung for rung in record.rungs if rung.step == step).validation
        return Standing(
            record.number,
            tuple(found[name].mean for name in self._spec.objectives),
            self._moving(record.number),
            tuple(
                compute_violation(bound, found[n].mean)
                for n, bound in self._spec.constraints.items()
            ),
        )

    def _moving(self, number: int) -> Params:
        """Present values of all that moves: what is searched and has an effect."""
        training = training_of(self._ledger.records(), number)
        params = dict(training.params)
        for segment in training.schedule:
            params |= segment.params
        active = self._spec.space.active(training.params)
        return {name: params[name] for name in self._domains() if name in active}

    def _domains(self) -> dict[str, Range]:
        searched = self._spec.space.searched.items()
        return {name: domain for name, domain in searched if name.startswith(MOVABLE)}

    def _exploration(self) -> Exploration:
        chosen, seed = self._settings, self._spec.search.seed
        return Exploration(chosen.quantile, chosen.factors, chosen.resample, seed)
