"""Execution of decisions on trials: in the ledger, and as requests to the trial.

A rung is in the ledger before the scheduler judges it. So a scheduler that is rebuilt from the
ledger decides the same, and the next process executes a decision that a kill interrupted. So it is
with the request of a person that a trial stop.
"""

from __future__ import annotations

from gdpo_tune.core.trials import Cost, Rung, TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.tuning.kept_checkpoints import trim_ended_trial
from gdpo_tune.tuning.ray.stopping import open_stop_flag
from gdpo_tune.tuning.schedulers.base import Scheduler
from gdpo_tune.tuning.schedulers.candidate_verdict import explain_stop
from gdpo_tune.tuning.schedulers.exploits import finish_exploits
from gdpo_tune.tuning.schedulers.rungs import Verdict

NEVER_PROMOTED = "waited to the end of the sweep and was not promoted; "


class RungDecisions:
    """Rung decisions of one sweep."""

    def __init__(self, ledger: Ledger, scheduler: Scheduler) -> None:
        self._ledger = ledger
        self._scheduler = scheduler
        self._halting: dict[int, tuple[Verdict, Rung]] = {}
        """Running trials that were told to end -> the verdict, and its rung."""
        self._stopping: set[int] = set()
        """Running trials that were told to end because a person asked for it."""
        self.stop_flag = open_stop_flag(ledger.directory, ledger.spec.address)
        """Flag that tells trials to end."""

    def restore(self) -> list[TrialRecord]:
        """Rebuild the scheduler and do what is overdue; return the trials that this changed."""
        finish_exploits(self._ledger)
        for number, rung in self._ledger.get_rungs():
            record = self._ledger.get_record(number)
            if record.parts:
                continue  # no scheduler compares it
            # a verdict on an ended trial has been executed
            take_in = self._scheduler.judge if record.is_open else self._scheduler.replay
            take_in(record, rung)
        self.stop_flag.clear()  # a process that was killed may have left a request
        stopped = self._ledger.steering.stopped
        changed = [
            self.prune_stopped(record.number) if record.number in stopped else self._settle(record)
            for record in self._ledger.get_records()
            if record.is_open
        ]
        return [record for record in changed if record is not None]

    def decide(self, number: int, completions: int) -> None:
        """Judge a new rung; if the trial may not continue, tell it to end."""
        record = self._ledger.get_record(number)
        rung = next(rung for rung in record.rungs if rung.completions == completions)
        verdict = self._judge(record, rung)
        if verdict != "continue":
            self._halting[number] = (verdict, rung)
            self.stop_flag.request(number)

    def stop(self, number: int) -> None:
        """Tell a running trial to end, as a request in the ledger says."""
        self._stopping.add(number)
        self.stop_flag.request(number)

    def is_halting(self, number: int) -> bool:
        """Return whether a trial was told to end."""
        return number in self._halting or number in self._stopping

    def record_halted(self, number: int, cost: Cost | None = None) -> TrialRecord:
        """Record that a halting trial has ended, at its cost so far: it is pruned, or waits."""
        is_stopped = number in self._stopping
        verdict, rung = self._halting.get(number, ("stop", None))
        self.clear(number)
        if is_stopped or rung is None:
            return self.prune_stopped(number, cost)
        if verdict == "pause":
            return self._ledger.pause(number)
        return self._prune(self._ledger.get_record(number), rung)

    def clear(self, number: int) -> None:
        """Withdraw the request that a trial end."""
        if self.is_halting(number):
            self._halting.pop(number, None)
            self._stopping.discard(number)
            self.stop_flag.withdraw(number)

    def prune_stopped(self, number: int, cost: Cost | None = None) -> TrialRecord:
        """Record that a trial has ended because a person asked for it."""
        self._scheduler.promote(number)  # it waits for nothing any more
        reason = self._ledger.steering.stopped[number]
        pruned = self._ledger.prune(number, reason, cost or self._ledger.get_record(number).cost)
        return trim_ended_trial(self._ledger, pruned)

    def promote(self, number: int) -> TrialRecord:
        """Record that a waiting trial continues."""
        self._scheduler.promote(number)
        return self._ledger.resume(number)

    def prune_waiting(self) -> list[TrialRecord]:
        """Prune the trials that still wait when no later trial can promote them."""
        pruned: list[TrialRecord] = []
        for record in self._ledger.get_records():
            if record.state == "paused":
                _, rung = self._find_verdict(record)  # not its last one if settings have changed
                pruned.append(self._prune(record, rung or record.rungs[-1], NEVER_PROMOTED))
        return pruned

    def _settle(self, record: TrialRecord) -> TrialRecord | None:
        """Bring an open trial to the state that its rungs imply; return it if it has ended."""
        verdict, rung = self._find_verdict(record)
        if verdict == "stop" and rung is not None:
            return self._prune(record, rung)
        if verdict == "pause" and rung is not None:
            if record.state == "paused":
                return None
            if record.paused_at < rung.completions:  # otherwise it was promoted from this rung
                return self._ledger.pause(record.number)
        self._scheduler.promote(record.number)
        if record.state == "paused":  # by another scheduler; now it is unfinished
            self._ledger.resume(record.number)
        return None

    def _find_verdict(self, record: TrialRecord) -> tuple[Verdict, Rung | None]:
        """Return the first verdict against a trial, and its rung."""
        for rung in record.rungs:
            verdict = self._judge(record, rung)
            if verdict != "continue":
                return verdict, rung
        return "continue", None

    def _judge(self, record: TrialRecord, rung: Rung) -> Verdict:
        """Return the verdict on a trial; a candidate that trains nothing meets no scheduler."""
        if not record.parts:
            return self._scheduler.judge(record, rung)
        return "stop" if self._explain_stop(record, rung) else "continue"

    def _explain_stop(self, record: TrialRecord, rung: Rung) -> str:
        """Explain why a merge or checkpoint gets no test evaluation; empty if it gets one."""
        return explain_stop(record, rung, self._ledger.get_records(), self._ledger.spec)

    def _prune(self, record: TrialRecord, rung: Rung, prefix: str = "") -> TrialRecord:
        if record.parts:
            reason = self._explain_stop(record, rung)
        else:
            reason = prefix + self._scheduler.explain(record.number, rung)
        pruned = self._ledger.prune(record.number, reason, record.cost)
        return trim_ended_trial(self._ledger, pruned)
