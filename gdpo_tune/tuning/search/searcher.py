"""Searcher of Ray Tune: starts trials by plan and sampler, and records their ends in the ledger.

Ray asks for a trial whenever its queue has room. A trial starts only when a slot is free, so that a
proposal knows every result that exists by then; until then the answer is "not now".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ray.tune.search import Searcher

from gdpo_tune.core.errors import ResourcesError
from gdpo_tune.core.events import (
    Event,
    Incident,
    IncidentOccurred,
    RecordedRequest,
    SweepSteered,
    TrialFinished,
    TrialPaused,
    TrialProgress,
    TrialStarted,
)
from gdpo_tune.core.text import format_number
from gdpo_tune.core.trial_files import teaches_nothing
from gdpo_tune.core.trials import Cost, Measurement, TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.spec import SweepSpec
from gdpo_tune.tuning.kept_checkpoints import trim_ended_trial
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
from gdpo_tune.tuning.schedulers.rung_decisions import RungDecisions
from gdpo_tune.tuning.search.applied_requests import RequestInbox
from gdpo_tune.tuning.search.attempts import build_config, mark_stored_checkpoints
from gdpo_tune.tuning.search.candidate_plan import count_candidates
from gdpo_tune.tuning.search.earlier_sweeps import load_earlier_trials
from gdpo_tune.tuning.search.fatal_errors import FATAL_ERRORS, explain_lost_directory
from gdpo_tune.tuning.search.plan import PlanCache, count_planned, derive_seed, find_equal_rewards
from gdpo_tune.tuning.search.projection import Projection
from gdpo_tune.tuning.search.proposals import Proposals

FIRST_STEPS = 3
"""Steps of a trial without any advantage after which the sweep says so."""


class LedgerSearcher(Searcher):
    """Searcher that starts unfinished trials first, then those of the plan."""

    def __init__(
        self,
        ledger: Ledger,
        setup: Setup,
        slots: int,
        emit: Callable[[Event], None],
        scheduler: Scheduler,
        on_resize: Callable[[int], None] = lambda slots: None,
    ) -> None:
        """Restore the state of the sweep from its ledger, which is open for writing.

        `slots` is the number of trials that fit side by side; `on_resize` is called with a new one.
        """
        super().__init__()
        self.fatal: Exception | None = None
        """Error that ended the sweep because every trial would meet it."""
        self._ledger = ledger
        self._setup = setup
        self._slots = slots
        self._on_resize = on_resize
        self._emit = emit
        self._numbers: dict[str, int] = {}
        """Ray's id -> number, for trials that have not ended."""
        self._spent: dict[int, Cost] = {}
        """Costs of running trials so far, in case they fail."""
        self._stopping = False
        self._scheduler = scheduler
        self._decisions = RungDecisions(ledger, scheduler)
        self.stop_flag = self._decisions.stop_flag
        """Flag that tells trials to end."""
        for record in self._decisions.restore():
            self._emit_state(record)
        self._unfinished = ledger.list_unfinished()
        self._proposals = self._build_proposals()
        self._is_proposing = False
        """True if a free slot waits for a proposal."""
        self._plan = PlanCache(ledger)
        self._inbox = RequestInbox(ledger)
        self._knows_signal = any(record.rungs for record in ledger.get_records())
        """True once a training has had a signal, or the sweep has said that there was none."""

    @property
    def _spec(self) -> SweepSpec:
        """Specification; requests may change its settings."""
        return self._ledger.spec

    def _build_proposals(self) -> Proposals:
        ledger = self._ledger
        projection = Projection(ledger.spec, self._slots)
        projection.load_earlier(load_earlier_trials(ledger.spec))
        projection.load((r, ledger.get_sampler_state(r.number)) for r in ledger.get_records())
        return Proposals(projection)

    def resize(self, nodes: Sequence[ClusterNode]) -> None:
        """Change the number of slots to what the present nodes have room for."""
        try:
            self._slots = count_slots(self._spec, nodes)
        except ResourcesError as error:
            self._slots = 0
            reason = str(error).partition("\n")[0]
            self.record_incident(f"the sweep waits for nodes: {reason}", [])
        self._setup = replace(self._setup, interval=choose_interval(self._slots))
        self._on_resize(self._slots)

    def record_incident(self, text: str, trials: Sequence[str]) -> None:
        """Record an incident of the sweep, or of trials by Ray's ids."""
        numbers = tuple(sorted({self._numbers[n] for n in trials if n in self._numbers}))
        incident = Incident(time.time(), text, numbers)
        with self._write_guard():
            self._ledger.record_incident(incident)
        self._emit(IncidentOccurred(incident))

    def stop(self) -> None:
        """Start no further trial."""
        self._stopping = True

    def close(self) -> None:
        """End the thread of the sampler."""
        self._proposals.close()

    def suggest(self, trial_id: str) -> Any:
        """Return the next trial's config (a dict), None for "not now", or FINISHED."""
        self.apply_requests()
        if self._stopping:
            return self.FINISHED
        if len(self._numbers) >= self._slots:
            return None
        record = self._unfinished.pop(0) if self._unfinished else None
        if record is None and self._is_paused():
            return None
        if record is None:
            with self._write_guard():
                record = self._promote() or self._start_trial() or self._promote(alone=True)
        if self._stopping:
            return self.FINISHED
        if record is None:
            if self._numbers or self._is_proposing or self._take_requests():
                return None
            with self._write_guard():
                for pruned in self._decisions.prune_waiting():
                    self._handle_end(pruned)
            return self.FINISHED
        self._numbers[trial_id] = record.number
        self._emit(TrialStarted(record))
        config = build_config(self._ledger, self._scheduler, record)
        ends = self._scheduler.ends_at_evaluations
        ends_at = self._scheduler.list_evaluation_steps(record) if ends else ()
        return pack(AttemptConfig(config, self._setup, ends_at, str(record.started)))

    def apply_requests(self) -> None:
        """Apply the requests of people that wait; look for them about once a second."""
        if not self._stopping and self._inbox.is_due():
            self._take_requests()

    def _take_requests(self) -> bool:
        taken = 0
        with self._write_guard():
            self._ledger.record_gaps()
            for request in self._inbox.take(lambda text: self.record_incident(text, [])):
                self._apply(request)
                taken += 1
        return taken > 0

    def _apply(self, request: RecordedRequest) -> None:
        if request.effect.stop is not None:
            self._stop_trial(request.effect.stop)
        if request.effect.settings:  # a new process would build its sampler from them
            self._proposals.abandon()
            self._proposals, self._is_proposing = self._build_proposals(), False
        self._plan.note_request()
        spec, records, steering = self._spec, self._ledger.get_records(), self._ledger.steering
        planned = count_planned(spec, records, steering.list_waiting(records))
        self._emit(SweepSteered(request, planned, count_candidates(spec), steering.pause))

    def _stop_trial(self, number: int) -> None:
        """End a trial: tell its process, or record it at once if it has none."""
        if number in self._numbers.values():
            self._decisions.stop(number)
            return
        self._unfinished = [record for record in self._unfinished if record.number != number]
        self._handle_end(self._decisions.prune_stopped(number))

    def _is_paused(self) -> bool:
        """Return whether something is left to start, and a request keeps it from starting."""
        if self._ledger.steering.pause is None:
            return False
        is_open = any(record.is_open for record in self._ledger.get_records())
        return is_open or self._plan.get_step(idle=True) is not None

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Take in a measurement of a running trial, or a notice about waiting."""
        message = unpack_message(result)
        if isinstance(message, TrialNotice):
            self.record_incident(message.text, [trial_id])
        if not isinstance(message, TrialUpdate):
            return
        measurement = message.measurement
        number = self._numbers[trial_id]
        self._spent[number] = measurement.cost
        if not self._knows_signal and measurement.metrics:
            self._report_missing_signal(trial_id, [*message.earlier, measurement])
        # measurements after a verdict do not count: a promoted trial continues from its rung
        if measurement.has_validation and not self._decisions.is_halting(number):
            with self._write_guard():
                self._plan.note_measurement()
                if self._ledger.record_rung(number, measurement):
                    self._decisions.decide(number, measurement.cost.completions)
                    self._proposals.observe(self._ledger.get_record(number))
        self._emit(TrialProgress(number, measurement, message.earlier))

    def _report_missing_signal(self, trial_id: str, measurements: Sequence[Measurement]) -> None:
        """Say once that the first steps of the first trainings teach nothing."""
        if not all(map(teaches_nothing, measurements)):
            self._knows_signal = True
        elif measurements[-1].step >= FIRST_STEPS:
            self._knows_signal = True
            self.record_incident(
                "learns nothing so far: its rewards are equal in every group of its first "
                f"{measurements[-1].step} steps; see 'A start that can learn' in docs/policies.md",
                [trial_id],
            )

    def _report_equal_rewards(self, record: TrialRecord) -> None:
        """Say so if the untrained policy earned the same for every held-out completion."""
        if equal := find_equal_rewards(self._spec, record):
            values = ", ".join(f"{name} {format_number(mean)}" for name, mean in equal.items())
            self.record_incident(
                f"the untrained policy earns the same for every completion ({values}), so it may "
                "learn nothing; see 'A start that can learn' in docs/policies.md",
                [],
            )

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Record how a trial ended; `on_failure` records errors."""
        if not error and trial_id in self._numbers:
            self._record_end(self._numbers.pop(trial_id), unpack_message(result))

    def on_failure(self, trial_id: str, reason: str) -> None:
        """Record that a trial failed for good, unless it was told to end anyway."""
        self._record_end(self._numbers.pop(trial_id), Failed(reason))

    def save(self, checkpoint_path: str) -> None:
        """Save nothing: the ledger is the state, and Ray's snapshots are never restored."""

    def __getstate__(self) -> dict[str, Any]:
        """Return an empty state for Ray's snapshots, which are never restored.

        Listeners hold threads and terminals, which cannot be written to a file.
        """
        return {}

    def _record_end(self, number: int, end: object) -> None:
        """Record the end of a trial; an interrupted one stays unfinished, for the next start."""
        with self._write_guard():
            if isinstance(end, Finished):
                self._decisions.clear(number)
                if self._spec.address:
                    mark_stored_checkpoints(self._ledger, number, end.outcome)
                record = self._ledger.complete(number, end.outcome)
                if record.role == "untrained":
                    self._report_equal_rewards(record)
                self._handle_end(trim_ended_trial(self._ledger, record))
            elif self._decisions.is_halting(number):
                self._handle_end(self._decisions.record_halted(number, self._spent.get(number)))
            elif isinstance(end, Failed):
                record = self._ledger.fail(number, end.reason, self._spent.get(number))
                self._handle_end(trim_ended_trial(self._ledger, record))
            elif isinstance(end, Fatal):
                self.fatal = end.error
                self.stop()

    @contextmanager
    def _write_guard(self) -> Generator[None]:
        """Stop the sweep if a write to the ledger fails; Ray would blame the trial and continue."""
        try:
            with explain_lost_directory(self._ledger.directory):
                yield
        except FATAL_ERRORS as error:
            self.fatal = error
            self.stop()

    def _handle_end(self, record: TrialRecord) -> None:
        self._spent.pop(record.number, None)
        self._plan.note_end(record)
        self._proposals.observe(record)
        self._emit_state(record)

    def _emit_state(self, record: TrialRecord) -> None:
        self._emit(TrialPaused(record) if record.state == "paused" else TrialFinished(record))

    def _promote(self, *, alone: bool = False) -> TrialRecord | None:
        number = self._scheduler.find_promotable(alone=alone)
        if number is None:
            return None
        if not self._scheduler.promotes_beyond_budget and self._plan.is_budget_spent():
            return None
        return self._decisions.promote(number)

    def _start_trial(self) -> TrialRecord | None:
        self._is_proposing = False
        step = self._plan.get_step(idle=not self._numbers)
        if step is None:
            return None
        params, proposer, sampler_state = step.params, step.proposer, {}
        if params is None:
            suggestion = self._proposals.poll(idle=not self._numbers)
            if suggestion is None:
                self._is_proposing = True
                return None
            params, proposer = suggestion.params, suggestion.proposer
            sampler_state = suggestion.sampler_state
        self._plan.note_start()
        seed = derive_seed(self._spec, len(self._ledger.get_records()))
        record = self._ledger.start(
            params,
            step.role,
            proposer,
            seed,
            step.replicate_of,
            sampler_state,
            step.parts,
            step.request,
        )
        self._proposals.observe(record, sampler_state)
        return record
