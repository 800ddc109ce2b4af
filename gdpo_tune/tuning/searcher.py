"""What Ray Tune asks for trials and tells of their ends: the plan, the sampler and the ledger.

Ray asks whenever it has room in its queue. A trial is handed out only when a slot is free, so that
a proposal knows every result that exists by then; until then the answer is "not now".
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray.tune.search import Searcher

from gdpo_tune.errors import DiskFullError
from gdpo_tune.files import room_in
from gdpo_tune.ledger import Ledger
from gdpo_tune.trials import (
    Cost,
    Event,
    Measurement,
    Outcome,
    TrialConfig,
    TrialFinished,
    TrialProgress,
    TrialRecord,
    TrialStarted,
)
from gdpo_tune.tuning.plan import next_step, trial_seed
from gdpo_tune.tuning.projection import Projection
from gdpo_tune.tuning.trainable import Setup


class LedgerSearcher(Searcher):
    """Emits unfinished trials first, then what the plan says; records how each one ends."""

    def __init__(
        self, ledger: Ledger, setup: Setup, slots: int, emit: Callable[[Event], None]
    ) -> None:
        """
        Args:
            ledger: open for writing.
            setup: goes to every trial.
            slots: trials that fit side by side.
            emit: takes events.
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
        self._unfinished = ledger.unfinished()
        self._stopping = False
        self._projection = Projection(ledger.spec)
        self._projection.load((r, ledger.sampler_state(r.number)) for r in ledger.records())

    def stop(self) -> None:
        """Hand out nothing more."""
        self._stopping = True

    def suggest(self, trial_id: str) -> Any:
        """The next trial's config (a dict), None for "not now", or FINISHED."""
        if self._stopping:
            return self.FINISHED
        if len(self._numbers) >= self._slots:
            return None
        record = self._unfinished.pop(0) if self._unfinished else None
        if record is None:
            with self._recording():
                record = self._new_trial()
        if self._stopping:
            return self.FINISHED
        if record is None:
            return None if self._numbers else self.FINISHED
        self._numbers[trial_id] = record.number
        self._emit(TrialStarted(record))
        return {"trial": self._config(record), "setup": self._setup}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Take a measurement of a running trial."""
        measurement: Measurement | None = result.get("measurement")
        if measurement is None:
            return
        number = self._numbers[trial_id]
        self._spent[number] = measurement.cost
        if measurement.validated:
            with self._recording():
                self._ledger.progress(number, measurement)
        self._emit(TrialProgress(number, measurement))

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Record how a trial ended. Of an error, `on_failure` tells the reason."""
        if error or trial_id not in self._numbers:
            return
        number = self._numbers.pop(trial_id)
        result = result or {}
        outcome: Outcome | None = result.get("outcome")
        if outcome is not None:
            with self._recording():
                self._finished(self._ledger.complete(number, outcome))
        elif "failure" in result:
            self._fail(number, result["failure"])
        elif "fatal" in result:
            self.fatal = result["fatal"]
            self.stop()
        # otherwise it was interrupted: it stays unfinished, and the next start goes on with it

    def on_failure(self, trial_id: str, reason: str) -> None:
        """Record that a trial failed for good."""
        self._fail(self._numbers.pop(trial_id), reason)

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
        except DiskFullError as error:
            self.fatal = error
            self.stop()

    def _finished(self, record: TrialRecord) -> None:
        self._projection.observe(record)
        self._emit(TrialFinished(record))

    def _new_trial(self) -> TrialRecord | None:
        records = self._ledger.records()
        step = next_step(self._spec, records)
        if step is None:
            return None
        params, proposer, sampler_state = step.params, step.proposer, {}
        if params is None:
            suggestion = self._projection.ask()
            params, proposer = suggestion.params, suggestion.proposer
            sampler_state = suggestion.sampler_state
        seed = trial_seed(self._spec, len(records))
        record = self._ledger.start(
            params, step.role, proposer, seed, step.replicate_of, sampler_state
        )
        self._projection.observe(record, sampler_state)
        return record

    def _config(self, record: TrialRecord) -> TrialConfig:
        directory = Path(self._ledger.trial_directory(record.number))
        config = self._spec.trial_config(record.params, record.seed, directory)
        return replace(config, train=record.role != "untrained")
