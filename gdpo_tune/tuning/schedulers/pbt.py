"""Population-based training: the last members of each generation take over from the first.

Generations are synchronous. Every member runs up to the next meeting, in turns if there are fewer
slots than members. Then its process ends, and it waits with a checkpoint. Once no member is
running, the generation is decided and recorded, checkpoints are copied, and all continue. So the
decisions do not depend on the speed of trials, the number of slots, or kills of the driver.
"""

from __future__ import annotations

from collections.abc import Sequence

from gdpo_tune.analysis.lineage import trace_training
from gdpo_tune.core.trial_config import MUTABLE_WHILE_TRAINING
from gdpo_tune.core.trials import Generation, Rung, TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.spec import PbtSettings
from gdpo_tune.tuning.schedulers.base import Scheduler, read_values
from gdpo_tune.tuning.schedulers.exploits import apply_exploit
from gdpo_tune.tuning.schedulers.population import MemberStanding, decide_exploits
from gdpo_tune.tuning.schedulers.rungs import Verdict


class Pbt(Scheduler):
    """Scheduler whose members wait for one another; baselines and replicates run to their end.

    Once started, a population runs to its end: halfway it has no finished policy.
    """

    promotes_beyond_budget = True
    ends_at_evaluations = True

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._spec = ledger.spec
        settings = self._spec.search.scheduler
        assert isinstance(settings, PbtSettings)
        self._settings = settings
        self._meetings = settings.list_meetings(self._spec.training.steps)
        searched = self._spec.space.searched_domains.items()
        self._domains = {
            name: domain for name, domain in searched if name.startswith(MUTABLE_WHILE_TRAINING)
        }

    def list_evaluation_steps(self, record: TrialRecord) -> tuple[int, ...]:
        """Return the steps of the meetings that a member has not reached yet."""
        if record.role != "member":
            return ()
        met = self._ledger.find_last_meeting(record.number)
        return tuple(step for step in self._meetings if step > met)

    def judge(self, record: TrialRecord, rung: Rung) -> Verdict:
        """Let a member wait at each coming meeting."""
        return "pause" if rung.step in self.list_evaluation_steps(record) else "continue"

    def find_promotable(self, *, alone: bool = False) -> int | None:
        """Return a member whose meeting is over; once all members wait, hold the next meeting."""
        members = [record for record in self._ledger.get_records() if record.role == "member"]
        waiting = [record for record in members if record.state == "paused"]
        free = [record.number for record in waiting if self._find_meeting(record) is None]
        is_running = any(record.state == "running" for record in members)
        if alone and waiting and not free and not is_running:
            free = list(self._decide_generation(waiting).members)
        return min(free, default=None)

    def _find_meeting(self, record: TrialRecord) -> int | None:
        coming = self.list_evaluation_steps(record)
        return max((rung.step for rung in record.rungs if rung.step in coming), default=None)

    def _decide_generation(self, waiting: Sequence[TrialRecord]) -> Generation:
        """Decide for the members at the earliest meeting: others joined later, or are ahead."""
        steps = {record.number: self._find_meeting(record) or 0 for record in waiting}
        step = min(steps.values())
        standings = [self._build_standing(r, step) for r in waiting if steps[r.number] == step]
        objectives, seed = self._spec.list_objectives(), self._spec.search.seed
        exploits = decide_exploits(step, standings, objectives, self._domains, self._settings, seed)
        generation = Generation(step, tuple(s.number for s in standings), exploits)
        self._ledger.record_generation(generation)
        for exploit in exploits:
            apply_exploit(self._ledger, exploit)
        return generation

    def _build_standing(self, record: TrialRecord, step: int) -> MemberStanding:
        rung = next(rung for rung in record.rungs if rung.step == step)
        values, excess = read_values(self._ledger.spec, rung)
        training = trace_training(self._ledger.get_records(), record.number)
        params = dict(training.params)
        for segment in training.schedule:
            params |= self._spec.space.align(segment.params)
        active = self._spec.space.select_active(training.params)
        movable = {name: params[name] for name in self._domains if name in active}
        return MemberStanding(record.number, values, movable, excess)
