"""Carries out what the scheduler decides: in the ledger, and towards the trial itself.

A rung is in the ledger before the scheduler is asked about it. So a scheduler that is rebuilt from
the ledger decides the same, and what was decided when a process was killed, the next one carries
out.
"""

from __future__ import annotations

from gdpo_tune.core.errors import StoreUnreachableError
from gdpo_tune.core.trials import Rung, TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.ledger.sweep_store import SweepStore
from gdpo_tune.training.checkpoints import remove_all_but
from gdpo_tune.tuning.ray.stopping import open_stop_flag
from gdpo_tune.tuning.schedulers import handover
from gdpo_tune.tuning.schedulers.base import Scheduler
from gdpo_tune.tuning.schedulers.rungs import Verdict

NEVER_PROMOTED = "waited to the end of the sweep and was not promoted; "


class Referee:
    """Between the ledger, the scheduler and the running trials."""

    def __init__(self, ledger: Ledger, scheduler: Scheduler) -> None:
        self._ledger = ledger
        self._scheduler = scheduler
        self._halting: dict[int, tuple[Verdict, Rung]] = {}
        """Running trials that were asked to end -> what decided it."""
        self.stop_flag = open_stop_flag(ledger.directory, ledger.spec.address)
        """Through which trials are asked to end."""

    def catch_up(self) -> list[TrialRecord]:
        """Rebuild the scheduler, and do what is overdue; return the trials that this changed."""
        handover.finish(self._ledger)
        for number, rung in self._ledger.get_rungs():
            record = self._ledger.record(number)
            # what an ended trial was to do has been done
            take_in = self._scheduler.judge if record.is_open else self._scheduler.recall
            take_in(record, rung)
        self.stop_flag.clear()  # a process that was killed may have left a request
        changed = [self._settle(record) for record in self._ledger.records() if record.is_open]
        return [record for record in changed if record is not None]

    def decide(self, number: int, completions: int) -> None:
        """Ask about a new rung; if the trial is not to go on, ask it to end."""
        record = self._ledger.record(number)
        rung = next(rung for rung in record.rungs if rung.completions == completions)
        verdict = self._scheduler.judge(record, rung)
        if verdict != "continue":
            self._halting[number] = (verdict, rung)
            self.stop_flag.request(number)

    def is_halting(self, number: int) -> bool:
        """Whether a trial was asked to end."""
        return number in self._halting

    def record_halted(self, number: int) -> TrialRecord:
        """Record that such a trial has ended: it is pruned, or waits."""
        verdict, rung = self._halting[number]
        self.clear(number)
        if verdict == "pause":
            return self._ledger.pause(number)
        return self._prune(self._ledger.record(number), rung)

    def clear(self, number: int) -> None:
        """Take back what asks a trial to end."""
        if self._halting.pop(number, None):
            self.stop_flag.withdraw(number)

    def promotable(self, *, alone: bool = False) -> int | None:
        """Number of the waiting trial that may go on now; None if there is none.

        Args:
            alone: no other trial is to be started as things stand.
        """
        return self._scheduler.promotable(alone=alone)

    def promote(self, number: int) -> TrialRecord:
        """Record that a waiting trial goes on."""
        self._scheduler.promote(number)
        return self._ledger.resume(number)

    def close_waiting(self) -> list[TrialRecord]:
        """Prune the trials that still wait, because nothing is left that could promote them."""
        closed: list[TrialRecord] = []
        for record in self._ledger.records():
            if record.state == "paused":
                _, rung = self._standing(record)  # after a change of settings not its last one
                closed.append(self._prune(record, rung or record.rungs[-1], NEVER_PROMOTED))
        return closed

    def _settle(self, record: TrialRecord) -> TrialRecord | None:
        number = record.number
        verdict, rung = self._standing(record)
        if verdict == "stop" and rung is not None:
            return self._prune(record, rung)
        if verdict == "pause" and rung is not None and self._waits(record, rung):
            return self._ledger.pause(number) if record.state == "running" else None
        self._scheduler.promote(number)
        if record.state == "paused":  # under another scheduler; now it is unfinished
            self._ledger.resume(number)
        return None

    def _standing(self, record: TrialRecord) -> tuple[Verdict, Rung | None]:
        """The first verdict against a trial, and where."""
        for rung in record.rungs:
            verdict = self._scheduler.judge(record, rung)
            if verdict != "continue":
                return verdict, rung
        return "continue", None

    def _waits(self, record: TrialRecord, rung: Rung) -> bool:
        """Whether a trial that was to wait at a rung was not promoted from it."""
        return record.state == "paused" or record.paused_at < rung.completions

    def _prune(self, record: TrialRecord, rung: Rung, before: str = "") -> TrialRecord:
        reason = before + self._scheduler.reason(record.number, rung)
        pruned = self._ledger.prune(record.number, reason, record.cost)
        if self._ledger.spec.keep != "all":
            self._drop_checkpoints(record.number)
        return pruned

    def _drop_checkpoints(self, number: int) -> None:
        spec = self._ledger.spec
        if spec.address:
            try:
                SweepStore(spec, patience=0.0).keep_only({number: None})
            except StoreUnreachableError:
                return  # the sweep does not wait for this: they go at its end
        remove_all_but(self._ledger.trial_directory(number), None)
