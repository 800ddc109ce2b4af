"""What Ray Tune asks for trials and tells of their ends: the plan, the sampler and the ledger.

Ray asks whenever it has room in its queue. A trial is handed out only when a slot is free, so that
a proposal knows every result that exists by then; until then the answer is "not now".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray.tune.search import Searcher

from gdpo_tune.analysis.lineage import training_of
from gdpo_tune.core.errors import (
    DiskFullError,
    FolderLostError,
    LedgerHeldError,
    LedgerUnreachableError,
    ResourcesError,
    StoreError,
    StoreUnreachableError,
)
from gdpo_tune.core.events import (
    Disturbed,
    Event,
    TrialFinished,
    TrialPaused,
    TrialProgress,
    TrialStarted,
)
from gdpo_tune.core.files import room_in
from gdpo_tune.core.trials import Cost, Incident, TrialConfig, TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.tuning.ray.messages import (
    AttemptConfig,
    Failed,
    Fatal,
    Finished,
    Setup,
    TrialNotice,
    TrialUpdate,
    pack,
    unpack_message,
)
from gdpo_tune.tuning.ray.nodes import ClusterNode, count_slots
from gdpo_tune.tuning.ray.reporter import choose_interval
from gdpo_tune.tuning.schedulers.base import Scheduler
from gdpo_tune.tuning.schedulers.exploits import write_schedule
from gdpo_tune.tuning.schedulers.rung_decisions import RungDecisions
from gdpo_tune.tuning.search.earlier_sweeps import load_earlier_trials
from gdpo_tune.tuning.search.plan import PlanCache, derive_trial_seed
from gdpo_tune.tuning.search.projection import Projection
from gdpo_tune.tuning.search.proposals import Proposals

LEAVE_NO_CHOICE = (
    DiskFullError,
    LedgerUnreachableError,
    LedgerHeldError,
    StoreError,
    StoreUnreachableError,
)
"""Errors after which nothing can be recorded, so that the sweep ends."""


class LedgerSearcher(Searcher):
    """Emits unfinished trials first, then what the plan says; records how each one ends."""

    def __init__(
        self,
        ledger: Ledger,
        setup: Setup,
        slots: int,
        emit: Callable[[Event], None],
        scheduler: Scheduler,
    ) -> None:
        """
        Args:
            ledger: open for writing.
            setup: goes to every trial.
            slots: trials that fit side by side.
            emit: takes events.
            scheduler: decides who goes on from a rung.
        """
        super().__init__()
        self.fatal: Exception | None = None
        """The error that ended the sweep because every trial would meet it."""
        self._ledger = ledger
        self._spec = ledger.spec
        self._setup = setup
        self._slots = slots
        self._emit = emit
        self._numbers: dict[str, int] = {}
        """Ray's trial id -> number, for trials that have not ended."""
        self._spent: dict[int, Cost] = {}
        """What running trials have cost so far: a failure has a price too."""
        self._stopping = False
        self._scheduler = scheduler
        self._referee = RungDecisions(ledger, scheduler)
        self.stop_flag = self._referee.stop_flag
        """Through which trials are asked to end."""
        for record in self._referee.restore():
            self._tell(record)
        self._unfinished = ledger.list_unfinished()
        projection = Projection(ledger.spec, slots)
        projection.load_earlier(load_earlier_trials(ledger.spec))
        self._proposals = Proposals(projection)
        self._proposals.load((r, ledger.get_sampler_state(r.number)) for r in ledger.records())
        self._thinking = False
        """Whether a free slot waits for a proposal."""
        self._agenda = PlanCache(ledger)

    def fit(self, nodes: Sequence[ClusterNode]) -> None:
        """The cluster has other nodes now: as many trials are handed out as they have room for."""
        try:
            self._slots = count_slots(self._spec, nodes)
        except ResourcesError as error:
            self._slots = 0
            self.note(f"the sweep waits for nodes: {error}", [])
        self._setup = replace(self._setup, interval=choose_interval(self._slots))

    def note(self, what: str, trials: Sequence[str]) -> None:
        """Record what has befallen the sweep, or trials by Ray's ids."""
        numbers = tuple(sorted({self._numbers[n] for n in trials if n in self._numbers}))
        incident = Incident(time.time(), what, numbers)
        with self._recording():
            self._ledger.record_incident(incident)
        self._emit(Disturbed(incident))

    def stop(self) -> None:
        """Hand out nothing more."""
        self._stopping = True

    def close(self) -> None:
        """End the thread of the sampler."""
        self._proposals.close()

    def suggest(self, trial_id: str) -> Any:
        """The next trial's config (a dict), None for "not now", or FINISHED."""
        if self._stopping:
            return self.FINISHED
        if len(self._numbers) >= self._slots:
            return None
        record = self._unfinished.pop(0) if self._unfinished else None
        if record is None:
            with self._recording():
                record = self._promoted() or self._new_trial() or self._promoted(alone=True)
        if self._stopping:
            return self.FINISHED
        if record is None:
            return None if self._numbers or self._thinking else self._nothing_left()
        self._numbers[trial_id] = record.number
        self._emit(TrialStarted(record))
        ends_at = self._scheduler.list_ending_steps(record)
        return pack(AttemptConfig(self._config(record), self._setup, ends_at, str(record.started)))

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Take a measurement of a running trial, or what it has to wait for."""
        message = unpack_message(result)
        if isinstance(message, TrialNotice):
            self.note(message.text, [trial_id])
        if not isinstance(message, TrialUpdate):
            return
        measurement = message.measurement
        number = self._numbers[trial_id]
        self._spent[number] = measurement.cost
        # what comes after a verdict counts for nothing: where it was given, the trial goes on
        if measurement.validated and not self._referee.is_halting(number):
            with self._recording():
                self._agenda.measured()
                if self._ledger.record_rung(number, measurement):
                    self._referee.decide(number, measurement.cost.completions)
                    self._proposals.observe(self._ledger.record(number))
        self._emit(TrialProgress(number, measurement, message.earlier))

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Record how a trial ended. Of an error, `on_failure` tells the reason."""
        if error or trial_id not in self._numbers:
            return
        number = self._numbers.pop(trial_id)
        end = unpack_message(result)
        if isinstance(end, Finished):
            outcome = end.outcome
            with self._recording():
                self._referee.clear(number)
                if self._spec.address and outcome.checkpoint:
                    outcome.checkpoint.mkdir(parents=True)  # stands for the one in the store
                self._finished(self._ledger.complete(number, outcome))
        elif self._referee.is_halting(number):
            self._let_go(number)
        elif isinstance(end, Failed):
            self._fail(number, end.reason)
        elif isinstance(end, Fatal):
            self.fatal = end.error
            self.stop()
        # otherwise it was interrupted: it stays unfinished, and the next start goes on with it

    def on_failure(self, trial_id: str, reason: str) -> None:
        """Record that a trial failed for good; one that was to end anyway has not failed."""
        number = self._numbers.pop(trial_id)
        if self._referee.is_halting(number):
            self._let_go(number)
        else:
            self._fail(number, reason)

    def save(self, checkpoint_path: str) -> None:
        """Nothing to save: the ledger is the state, and Ray's snapshots are never restored."""

    def __getstate__(self) -> dict[str, Any]:
        """An empty state, for the copy that Ray writes and nothing ever reads.

        Listeners hold threads and terminals, which no file can keep.
        """
        return {}

    def _fail(self, number: int, reason: str) -> None:
        with self._recording():
            self._finished(self._ledger.fail(number, reason, self._spent.get(number)))

    @contextmanager
    def _recording(self) -> Generator[None]:
        """A write to the ledger: Ray takes an error in here for one of the trial's and goes on."""
        try:
            with room_in(self._ledger.directory, "the ledger"):
                yield
        except LEAVE_NO_CHOICE as error:
            self.fatal = error
            self.stop()
        except OSError as error:  # of a folder that is gone from under the ledger
            self.fatal = FolderLostError(
                f"the ledger in {self._ledger.directory} cannot be written to "
                f"({error.strerror or error}); what is recorded is kept, and the same command goes "
                "on once it can"
            )
            self.stop()

    def _let_go(self, number: int) -> None:
        with self._recording():
            self._finished(self._referee.record_halted(number))

    def _nothing_left(self) -> str:
        with self._recording():
            for record in self._referee.prune_waiting():
                self._finished(record)
        return self.FINISHED

    def _finished(self, record: TrialRecord) -> None:
        self._spent.pop(record.number, None)
        self._agenda.ended(record)
        self._proposals.observe(record)
        self._tell(record)

    def _tell(self, record: TrialRecord) -> None:
        self._emit(TrialPaused(record) if record.state == "paused" else TrialFinished(record))

    def _promoted(self, *, alone: bool = False) -> TrialRecord | None:
        number = self._scheduler.find_promotable(alone=alone)
        if number is None:
            return None
        if not self._scheduler.promotes_beyond_budget and self._agenda.budget_is_spent():
            return None
        return self._referee.promote(number)

    def _new_trial(self) -> TrialRecord | None:
        self._thinking = False
        step = self._agenda.next(idle=not self._numbers)
        if step is None:
            return None
        params, proposer, sampler_state = step.params, step.proposer, {}
        if params is None:
            suggestion = self._proposals.poll(idle=not self._numbers)
            if suggestion is None:
                self._thinking = True
                return None
            params, proposer = suggestion.params, suggestion.proposer
            sampler_state = suggestion.sampler_state
        self._agenda.begun()
        seed = derive_trial_seed(self._spec, len(self._ledger.records()))
        record = self._ledger.start(
            params, step.role, proposer, seed, step.replicate_of, sampler_state
        )
        self._proposals.observe(record, sampler_state)
        return record

    def _config(self, record: TrialRecord) -> TrialConfig:
        directory = Path(self._ledger.trial_directory(record.number))
        if record.role == "member":
            write_schedule(self._ledger, record.number)
        training = training_of(self._ledger.records(), record.number)
        return replace(
            self._spec.trial_config(training.params, training.seed, directory),
            train=record.role != "untrained",
            evaluate_at=self._scheduler.list_evaluation_steps(record),
            schedule=training.schedule,
        )
