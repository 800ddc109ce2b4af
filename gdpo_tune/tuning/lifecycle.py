"""Life of every trial of a running sweep, from the plan to the ledger. Knows no Ray.

An engine, such as Ray Tune, asks for attempts and passes on what becomes of each:

    next_attempt       a slot is free: an `AttemptConfig`, WAIT, or FINISHED
    on_placed          its process has begun on a node
    on_measurement     a step was measured; a rung is recorded, then decided on
    on_end             it came to a result
    on_failure         it was lost with its process: it is tried again, or given up
    on_nodes_changed   nodes were lost or have joined

The ledger is the log. A rung, or the request of a person, is in it before anything follows from it,
so a process that opens the ledger after a kill decides the same and does what is overdue. A stop
flag asks a trial to stop: it writes a checkpoint and ends, where Ray would end it at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from gdpo_tune.core import events
from gdpo_tune.core.errors import (
    DirectoryLostError,
    DiskFullError,
    LedgerHeldError,
    ResourcesError,
    StoreError,
    StoreUnreachableError,
    UsageError,
)
from gdpo_tune.core.files import explain_full_disk
from gdpo_tune.core.text import format_number
from gdpo_tune.core.trial_config import TrainedPart, TrialConfig
from gdpo_tune.core.trial_files import read_steps, teaches_nothing
from gdpo_tune.core.trials import Cost, Measurement, Rung, TrialRecord, find_start
from gdpo_tune.ledger import Ledger
from gdpo_tune.ledger.requests import list_pending, set_aside, settle_request
from gdpo_tune.tuning import plan
from gdpo_tune.tuning.attempts import (
    FINISHED,
    LOSSES,
    WAIT,
    Answer,
    AttemptConfig,
    AttemptFailure,
    Failed,
    Fatal,
    Finished,
    OpenTrial,
    RunSettings,
    StopFlag,
    TrialResult,
    choose_interval,
)
from gdpo_tune.tuning.nodes import ClusterNode, Nodes, count_slots
from gdpo_tune.tuning.proposals import Proposals, SamplerView, Suggestion, load_earlier_trials
from gdpo_tune.tuning.retention import list_kept_steps, trim_ended_trial
from gdpo_tune.tuning.schedulers import Scheduler, Verdict

LOST_AGAIN = "its node was lost again and again, each time before it had a result"
"""Reason for giving up a trial that may itself kill its nodes."""
POLL_SECONDS = 1.0
"""Seconds between two polls of the directory of requests."""
FIRST_STEPS = 3
"""Steps of a trial without any advantage after which the sweep says so."""
FATAL_ERRORS = (
    DirectoryLostError,
    DiskFullError,
    LedgerHeldError,
    StoreError,
    StoreUnreachableError,
)
"""Errors after which no record can be written any more."""


class Lifecycle:
    """Trials of a sweep: unfinished ones first, then those of the plan. All in one thread."""

    def __init__(
        self,
        ledger: Ledger,
        scheduler: Scheduler,
        setup: RunSettings,
        slots: int,
        emit: Callable[[events.Event], None],
        nodes: Nodes | None = None,
    ) -> None:
        """Restore the sweep from its ledger, open for writing; `slots` trials fit side by side."""
        self.fatal: Exception | None = None
        """Error that ended the sweep because every trial would meet it."""
        self._ledger, self._scheduler, self._setup = ledger, scheduler, setup
        self.slots, self._emit = slots, emit
        self._nodes = nodes or Nodes(list)
        self._nodes.on_change = self.on_nodes_changed
        self._trials: dict[int, OpenTrial] = {}
        self._running: dict[str, OpenTrial] = {}
        """The engine's id of an attempt under way -> its trial."""
        self.is_stopping = False
        self.stop_flag = StopFlag(ledger.directory, ledger.spec.address)
        self._restore()
        running = (r for r in ledger.get_records() if r.state == "running")
        self._queue = [record.number for record in running]
        """Trials to start before any other: unfinished, or lost with their process."""
        self._proposals = self._build_proposals()
        self._is_proposing = False  # True if a free slot waits for a proposal
        self._plan = plan.PlanCache(ledger)
        self._inbox = RequestInbox(ledger)
        self._knows_signal = any(record.rungs for record in ledger.get_records())
        """True once a training has had a signal, or the sweep has said that there was none."""

    def stop(self) -> None:
        """Start no further trial."""
        self.is_stopping = True

    def close(self) -> None:
        """End the thread of the sampler."""
        self._proposals.close()

    # What the engine asks, and what it passes on.

    def next_attempt(self, name: str) -> AttemptConfig | Answer:
        """Return the next attempt, which the engine calls `name` from now on."""
        self.apply_requests()
        if not self.is_stopping and len(self._running) >= self.slots:
            return WAIT
        record = self._take_queued()
        if record is None and not self.is_stopping:
            if self._ledger.steering.pause is not None:
                is_open = any(record.is_open for record in self._ledger.get_records())
                if is_open or self._plan.get_next_trial(idle=True) is not None:
                    return WAIT
            with self._write_guard():
                for number in self._scheduler.list_stopped():
                    waiting = self._ledger.get_record(number)
                    self._handle_end(self._prune(waiting, waiting.rungs[-1]))
                record = (
                    self._end_at_target()
                    or self._promote()
                    or self._start_trial()
                    or self._end_waiting()
                )
        if self.is_stopping:
            return FINISHED
        if record is None:
            if self._running or self._is_proposing or self._take_requests():
                return WAIT
            with self._write_guard():  # nothing continues what still waits
                for waiting in [r for r in self._ledger.get_records() if r.state == "paused"]:
                    _, rung = self._find_verdict(waiting)  # settings have changed if not its last
                    self._handle_end(self._prune(waiting, rung or waiting.rungs[-1]))
            return FINISHED
        if record.number not in self._trials:
            self._trials[record.number] = OpenTrial(record.number)
            self._emit(events.TrialStarted(record))
        self._running[name] = self._trials[record.number]
        return AttemptConfig(self._build_config(record), self._setup, str(record.started))

    def on_placed(self, name: str, node: str) -> None:
        """Note the node on which an attempt has begun."""
        trial = self._running[name]
        trial.node = node
        if trial.moving:
            trial.moving = False
            where = self._nodes.describe(node)
            self.record_incident(f"resumes on node {where}", [trial.number])

    def on_notice(self, name: str, text: str) -> None:
        """Record what a running trial waits for."""
        self.record_incident(text, [self._running[name].number])

    def on_measurement(self, name: str, measurement: Measurement) -> None:
        """Take in a measurement; record a rung, decide on it, and ask the trial to stop if due."""
        trial = self._running[name]
        number, trial.cost = trial.number, measurement.cost
        trial.lost = 0
        is_unknown = not self._knows_signal and bool(measurement.metrics)
        if is_unknown and self._ledger.get_record(number).is_training:
            self._report_missing_signal(number, measurement)
        # measurements after a verdict do not count: a promoted trial continues from its rung
        if measurement.has_validation and trial.verdict is None:
            with self._write_guard():
                self._plan.invalidate()
                if self._ledger.record_rung(number, measurement):
                    record = self._ledger.get_record(number)
                    completions = measurement.cost.completions
                    rung = next(r for r in record.rungs if r.completions == completions)
                    verdict = self._decide(record, rung)
                    if verdict != "continue":
                        trial.verdict = verdict, rung
                        self.stop_flag.request(number)
                    self._proposals.observe(self._ledger.get_record(number))
        self._emit(events.TrialProgress(number, measurement))

    def on_end(self, name: str, result: TrialResult) -> None:
        """Record the end of a trial; an interrupted one stays unfinished, for the next start."""
        trial = self._running.pop(name)
        if isinstance(result, Finished):
            ledger, number, outcome = self._ledger, trial.number, result.outcome
            with self._write_guard():
                self._withdraw(trial)
                if ledger.spec.address:  # empty directories stand for checkpoints in the store
                    records = ledger.get_records()
                    steps = list_kept_steps(ledger.spec, records, records[number])
                    paths = [ledger.get_checkpoint(number, step) for step in steps]
                    for path in (*paths, *filter(None, [outcome.checkpoint])):
                        path.mkdir(parents=True, exist_ok=True)
                record = ledger.complete(number, outcome)
                if record.role == ledger.spec.baselines[0]:
                    self._report_start(record)
                if record.role == "start" and record.state == "failed":
                    self._end_without_start(record.reason)
                self._handle_end(trim_ended_trial(self._ledger, record))
        elif trial.verdict is not None:
            self._record_stopped(trial)
        elif isinstance(result, Failed):
            self._give_up(trial, result.reason)
        elif isinstance(result, Fatal):
            self._give_up(trial, result.error)

    def on_failure(self, name: str, failure: AttemptFailure) -> None:
        """Count an attempt that was lost with its process; try the trial again, or give it up.

        Errors of the trial count against it. Lost nodes, unreachable stores and crowded GPUs do
        not, unless they come in a row.
        """
        trial = self._running.pop(name, None)
        if trial is None:
            return  # its result has come already
        failure = self._find_cause(failure, trial)
        cause, reason, number = failure.cause, failure.reason, trial.number
        where = self._nodes.describe(trial.node)
        again = cause in ("needs_new_process", "directory") or trial.count_failure(
            failure, time.monotonic()
        )
        if cause == "directory":
            self.record_incident(reason, [number])
        elif cause == "lost":
            self._note_cut_off(trial)
        elif cause == "store":
            self.record_incident(f"leaves node {where}: {reason}", [number])
        elif cause != "needs_new_process":
            directory = self._ledger.get_trial_directory(number)
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "error.txt").write_text(failure.traceback, encoding="utf-8")
            if again:
                self.record_incident(f"{events.IS_TRIED_AGAIN}: {reason}", [number])
        trial.node = ""
        if trial.verdict is not None:  # it was to end anyway, and resumes from its checkpoint if so
            self._record_stopped(trial)
            return
        if not again:
            trial.given_up = _explain_give_up(failure)
        self._queue.insert(0, number)

    def on_preempted(self, name: str) -> None:
        """Note an attempt whose node was taken away, and which the engine starts elsewhere."""
        trial = self._running[name]
        self._note_cut_off(trial)
        trial.node = ""

    def _note_cut_off(self, trial: OpenTrial) -> None:
        if not trial.moving:  # otherwise it was reported together with the others there
            trial.moving, trial.cut_from = True, trial.node
            where = self._nodes.describe(trial.node)
            self.record_incident(f"was cut off from node {where}", [trial.number])

    def on_nodes_changed(self, lost: Sequence[ClusterNode], joined: Sequence[ClusterNode]) -> None:
        """Report lost and joined nodes, and excuse failures of trials on lost nodes."""
        for node in lost:
            running = [t for t in self._trials.values() if t.node == node.id]
            for trial in running:
                trial.moving = True
            excused = [t for t in self._trials.values() if t.excuse(node.id, time.monotonic())]
            cut_off = [t for t in self._trials.values() if t.cut_from == node.id]
            numbers = [t.number for t in (*running, *excused, *cut_off)]
            self.record_incident(f"node {node} {events.WAS_LOST}", numbers)
        for node in joined:
            self.record_incident(f"node {node} has joined")
        try:
            self.slots = count_slots(self._ledger.spec, self._nodes.list_alive())
        except ResourcesError as error:
            self.slots = 0
            self.record_incident(f"the sweep waits for nodes: {str(error).partition(chr(10))[0]}")
        self._setup = replace(self._setup, interval=choose_interval(self.slots))

    def record_incident(self, text: str, numbers: Collection[int] = ()) -> None:
        """Record an incident of the sweep, or of trials."""
        incident = events.Incident(time.time(), text, tuple(sorted(set(numbers))))
        with self._write_guard():
            self._ledger.record_incident(incident)
        self._emit(events.IncidentOccurred(incident))

    def apply_requests(self) -> None:
        """Apply the requests of people that wait; look for them about once a second."""
        if not self.is_stopping and self._inbox.is_due():
            self._take_requests()

    # What a trial starts with.

    def _take_queued(self) -> TrialRecord | None:
        while self._queue and not self.is_stopping:
            number = self._queue.pop(0)
            trial = self._trials.get(number)
            if trial is None or trial.given_up is None:
                return self._ledger.get_record(number)
            self._give_up(trial, trial.given_up)
        return None

    def _promote(self) -> TrialRecord | None:
        number = None if self._plan.is_budget_spent() else self._scheduler.find_promotable()
        if number is None:
            return None
        return self._ledger.resume(number)

    def _end_at_target(self) -> TrialRecord | None:
        """Let a waiting training that meets `search.target` on validation prompts be tested."""
        spec = self._ledger.spec
        for record in self._ledger.get_records() if spec.search.target else ():
            waits = record.state == "paused" and record.is_training
            if waits and spec.meets_target(record.rungs[-1].validation):
                reason = "it meets search.target on validation prompts"
                return self._ledger.resume(record.number, ends=reason)
        return None

    def _end_waiting(self) -> TrialRecord | None:
        """Let a waiting trial end where it waits, if no other one can go on; None if none does."""
        ending = None if self._is_proposing else self._scheduler.find_ending()
        if ending is None:
            return None
        number, why = ending
        if why and self._plan.is_budget_spent():
            why = "the budget is spent"
        return self._ledger.resume(number, ends=why)

    def _start_trial(self) -> TrialRecord | None:
        self._is_proposing = False
        planned = self._plan.get_next_trial(idle=not self._running)
        if planned is None:
            return None
        if planned.params is not None:
            suggestion = Suggestion(planned.params, planned.proposer)
        else:
            suggestion = self._proposals.poll(idle=not self._running)
            if suggestion is None:
                self._is_proposing = True
                return None
        self._plan.invalidate()
        record = self._ledger.start(
            suggestion.params,
            planned.role,
            suggestion.proposer,
            plan.derive_seed(self._ledger.spec, len(self._ledger.get_records())),
            planned.replicate_of,
            planned.parts,
            planned.request,
        )
        self._proposals.observe(record)
        return record

    def _build_config(self, record: TrialRecord) -> TrialConfig:
        ledger, spec, records = self._ledger, self._ledger.spec, self._ledger.get_records()
        directory = ledger.get_trial_directory(record.number)
        if record.parts:
            # a merge has no parameters; any parent's make the same task
            params = records[record.parts[0].trial].params
            config = spec.build_trial_config(params, record.seed, directory)
            parts = tuple(
                TrainedPart(ledger.get_checkpoint(part.trial, part.step), part.weight)
                for part in record.parts
            )
            measured = record.rungs[-1] if record.ends_at is not None else None
            start = find_start(records)
            return replace(config, train=False, start=start, parts=parts, measured=measured)
        if record.role == "start":
            return spec.build_start_config(record.params, record.seed, directory)
        keep_at = list_kept_steps(spec, records, record)
        config = spec.build_trial_config(record.params, record.seed, directory)
        if record.role != "untrained":
            config = replace(config, start=find_start(records))
        # a fresh seed trains as long as the first one did
        original = record if record.replicate_of is None else records[record.replicate_of]
        if ends_at := record.ends_at or original.ends_at:
            config = replace(config, training=config.training.replace(steps=ends_at))
        return replace(
            config,
            train=record.is_training,
            evaluate_at=tuple(sorted({*self._scheduler.list_evaluation_steps(record), *keep_at})),
            keep_at=keep_at,
        )

    def _build_proposals(self) -> Proposals:
        ledger = self._ledger
        view = SamplerView(ledger.spec, self.slots)
        view.load_earlier(load_earlier_trials(ledger.spec))
        view.load(ledger.get_records())
        return Proposals(view)

    # Verdicts.

    def _restore(self) -> None:
        """Do what is overdue by the ledger."""
        self.stop_flag.clear()  # a process that was killed may have left a request
        stopped = self._ledger.steering.stopped
        for record in self._ledger.get_records():
            if record.is_open:
                number = record.number
                changed = self._prune_stopped(number) if number in stopped else self._settle(record)
                if changed is not None:
                    self._emit_state(changed)

    def _settle(self, record: TrialRecord) -> TrialRecord | None:
        """Replay the decisions at the rungs of an open trial; return it if it has ended."""
        verdict, rung = self._find_verdict(record)
        if verdict == "stop" and rung is not None:
            return self._prune(record, rung)
        if verdict == "pause" and rung is not None:
            if record.state == "paused":
                return None
            # otherwise it was promoted from this rung
            if record.parts or record.paused_at < rung.completions:
                return self._ledger.pause(record.number)
        if record.state == "paused":  # by another scheduler; now it is unfinished
            self._ledger.resume(record.number)
        return None

    def _decide(self, record: TrialRecord, rung: Rung) -> Verdict:
        """Return the verdict on a trial; a candidate that trains nothing meets no scheduler."""
        if not record.parts:
            return self._scheduler.decide(record, rung)
        spec = self._ledger.spec
        if record.ends_at is not None or record.request:  # it has waited, or a person wants it
            return "continue"
        _, reason = plan.judge_candidate(record, rung, self._ledger.get_records(), spec)
        if reason:
            return "stop"
        # of a divided budget later ones may make its test evaluation superfluous
        waits = spec.search.is_divided and record.replicate_of is None
        return "pause" if waits else "continue"

    def _find_verdict(self, record: TrialRecord) -> tuple[Verdict, Rung | None]:
        for rung in record.rungs:
            verdict = self._decide(record, rung)
            if verdict != "continue":
                return verdict, rung
        return "continue", None

    def _withdraw(self, trial: OpenTrial) -> None:
        if trial.verdict is not None:
            trial.verdict = None
            self.stop_flag.withdraw(trial.number)

    # Ends.

    def _record_stopped(self, trial: OpenTrial) -> None:
        """Record that a trial that was asked to stop has ended: it is pruned, or waits."""
        with self._write_guard():
            verdict, rung = trial.verdict or ("stop", None)
            self._withdraw(trial)
            if rung is None:
                ended = self._prune_stopped(trial.number, trial.cost)
            elif verdict == "pause":
                ended = self._ledger.pause(trial.number)
            else:
                ended = self._prune(self._ledger.get_record(trial.number), rung)
            self._handle_end(ended)

    def _give_up(self, trial: OpenTrial, why: str | Exception) -> None:
        """Record that a trial failed for good; an error that is not its fault ends the sweep."""
        if isinstance(why, Exception):
            self.fatal = why
            self.stop()
            return
        if self._ledger.get_record(trial.number).role == "start":
            self._end_without_start(why)
            return
        with self._write_guard():
            record = self._ledger.fail(trial.number, why, trial.cost)
            self._handle_end(trim_ended_trial(self._ledger, record))

    def _end_without_start(self, why: str) -> None:
        """Stop the sweep: no trial can begin. Nothing is lost, and the next start tries again."""
        self.fatal = UsageError(
            f"start: the supervised training failed: {why}\n    fix: correct the demonstrations or "
            "lower start.learning_rate, and begin anew with --fresh; the same command tries again"
        )
        self.stop()

    def _prune(self, record: TrialRecord, rung: Rung) -> TrialRecord:
        if record.parts:
            records, spec = self._ledger.get_records(), self._ledger.spec
            _, reason = plan.judge_candidate(record, rung, records, spec)
            reason = reason or "search.merges.budget is spent"
        else:
            reason = self._scheduler.explain(rung)
        pruned = self._ledger.prune(record.number, reason, record.cost)
        return trim_ended_trial(self._ledger, pruned)

    def _prune_stopped(self, number: int, cost: Cost | None = None) -> TrialRecord:
        """Record that a trial has ended because a person asked for it."""
        reason = self._ledger.steering.stopped[number]
        pruned = self._ledger.prune(number, reason, cost or self._ledger.get_record(number).cost)
        return trim_ended_trial(self._ledger, pruned)

    def _handle_end(self, record: TrialRecord) -> None:
        self._trials.pop(record.number, None)
        self._plan.invalidate()
        self._proposals.observe(record)
        self._emit_outlook()
        self._emit_state(record)

    def _emit_outlook(self) -> None:
        records, hours = self._ledger.get_records(), self._ledger.compute_hours(time.time())
        added = self._ledger.steering.list_waiting(records)
        self._emit(plan.estimate_outlook(self._ledger.spec, records, hours, added))

    def _emit_state(self, record: TrialRecord) -> None:
        self._emit(
            events.TrialPaused(record) if record.state == "paused" else events.TrialFinished(record)
        )

    def _find_cause(self, failure: AttemptFailure, trial: OpenTrial) -> AttemptFailure:
        """Return the failure with its cause: its process, or with it its node."""
        self._nodes.refresh()
        if failure.node_died and self._nodes.is_alive(trial.node):
            self._nodes.mark_lost(trial.node)
        if failure.cause == "died" and trial.node and not self._nodes.is_alive(trial.node):
            return replace(failure, cause="lost")
        return failure

    def _report_missing_signal(self, number: int, measurement: Measurement) -> None:
        # Steps between two results are in the trial's file alone.
        steps = [*read_steps(self._ledger.get_trial_directory(number)), measurement]
        teaches = not all(map(teaches_nothing, steps))
        self._knows_signal = teaches or measurement.step >= FIRST_STEPS
        if self._knows_signal and not teaches:
            self.record_incident(
                "learns nothing so far: its rewards are equal in every group of its first "
                f"{measurement.step} steps; see 'A start that can learn' in docs/policies.md",
                [number],
            )

    def _report_start(self, record: TrialRecord) -> None:
        """Report an initial policy that earns the same everywhere, or nearly all there is."""
        title = "supervised start" if record.role == "start" else "untrained policy"
        if equal := plan.find_equal_rewards(self._ledger.spec, record):
            values = ", ".join(f"{name} {format_number(mean)}" for name, mean in equal.items())
            self.record_incident(
                f"the {title} earns the same for every completion ({values}), so it may "
                "learn nothing; see 'A start that can learn' in docs/policies.md"
            )
        elif ceiling := plan.find_ceiling(self._ledger.spec, record):
            values = ", ".join(f"{name} {format_number(mean)}" for name, mean in ceiling.items())
            self.record_incident(
                f"the {title} earns nearly everything already ({values}), so few "
                "groups differ; see 'A start at its ceiling' in docs/policies.md"
            )

    # Requests of people.

    def _take_requests(self) -> bool:
        taken = False
        with self._write_guard():
            self._ledger.record_gaps()
            for request in self._inbox.take(self.record_incident):
                self._apply(request)
                taken = True
        return taken

    def _apply(self, request: events.RecordedRequest) -> None:
        number = request.effect.stop
        running = next((t for t in self._running.values() if t.number == number), None)
        if running is not None:
            running.verdict = "stop", None
            self.stop_flag.request(running.number)
        elif number is not None:
            self._queue = [other for other in self._queue if other != number]
            self._handle_end(self._prune_stopped(number))
        if request.effect.settings:  # a new process would build its sampler from them
            self._proposals.close(wait=False)
            self._proposals, self._is_proposing = self._build_proposals(), False
        self._plan.invalidate()
        self._emit_outlook()
        self._emit(events.SweepSteered(request, self._ledger.steering.pause))

    @contextmanager
    def _write_guard(self) -> Generator[None]:
        """Stop the sweep if a write to the ledger fails; an engine would blame the trial."""
        try:
            with explain_failed_write(self._ledger.directory):
                yield
        except FATAL_ERRORS as error:
            self.fatal = error
            self.stop()


@contextmanager
def explain_failed_write(directory: Path) -> Generator[None]:
    """Turn a failure to write the ledger into a `DiskFullError` or a `DirectoryLostError`."""
    try:
        with explain_full_disk(directory, "the ledger"):
            yield
    except OSError as error:
        raise DirectoryLostError(
            f"the ledger in {directory} cannot be written to ({error.strerror or error}); what "
            "is recorded is kept. Once the directory is back, run the same command to resume"
        ) from error


def _explain_give_up(failure: AttemptFailure) -> str | Exception:
    """Return why a trial is not tried again; an error, which stops the sweep, if not its fault."""
    if failure.cause == "gpu_contention":
        return ResourcesError(
            f"{failure.reason}; {LOSSES + 1} attempts in a row\n    fix: end the other processes "
            "on that GPU, or take another one, and run the same command to resume"
        )
    return LOST_AGAIN if failure.cause == "lost" else failure.outage or failure.reason


class RequestInbox:
    """Requests of people that wait, as files, for the driver of one sweep.

    Each is recorded in the ledger, then its file is removed, then the caller applies it. So a kill
    at any moment loses none, and none is applied twice: its id is in the ledger.
    """

    def __init__(self, ledger: Ledger, clock: Callable[[], float] = time.monotonic) -> None:
        self._ledger, self._clock = ledger, clock
        self._polled = float("-inf")
        self._ignored: set[Path] = set()  # files that can be neither used nor moved

    def is_due(self) -> bool:
        """Return whether it is time to poll the directory of requests again."""
        return self._clock() - self._polled >= POLL_SECONDS

    def take(
        self, report_damage: Callable[[str], None] | None = None
    ) -> Iterator[events.RecordedRequest]:
        """Record the requests that wait and yield each one, for the caller to apply at once."""
        self._polled = self._clock()
        for file in list_pending(self._ledger.directory):
            if file.request is None:
                if report_damage is not None and file.path not in self._ignored:
                    try:
                        set_aside(file.path)
                        where = "it was moved to requests/damaged"
                    except OSError:
                        self._ignored.add(file.path)
                        where = "it stays there"
                    what = f"is no request ({file.problem}); {where}"
                    report_damage(f"{file.path.name} in requests/ {what}")
                continue
            recorded = None
            if file.request.id not in {r.id for r in self._ledger.get_requests()}:
                now = time.time()
                recorded = settle_request(self._ledger.take_snapshot(now), file.request, now)
                self._ledger.record_request(recorded)
            with suppress(OSError):  # the file of a recorded request does no harm
                file.path.unlink()
            if recorded is not None:
                yield recorded
