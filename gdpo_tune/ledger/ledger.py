"""The one durable record of a sweep: every trial, its values, state, cost and reason.

    <storage>/<name>/ledger.journal    the Optuna study, one record a line; or a table of `ledger:`
                     ledger.lock       who writes it
                     spec.yaml         the resolved spec
                     trials/<number>/  step metrics and checkpoints

Step metrics lie beside the study, and MLflow and every figure can be drawn again from both.
The study's values are the objectives on validation prompts, which is what a sampler may see;
estimates on test prompts, which the front is claimed on, are kept beside them.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial, Trial, TrialState

from gdpo_tune.core.closing import Closing
from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.trials import (
    Cost,
    Measurement,
    Outcome,
    Params,
    Proposer,
    Role,
    Rung,
    State,
    TrialRecord,
)
from gdpo_tune.ledger.encoding import (
    RUNG,
    add_costs_to_outcome,
    compute_violation,
    create_running_trial,
    decode_rungs_in_order,
    decode_trial,
    encode_outcome,
    encode_rung,
    stored_rungs,
    trial_directory,
)
from gdpo_tune.ledger.generations import Generations
from gdpo_tune.ledger.journal import Journal, Lease, replayed
from gdpo_tune.ledger.opening import for_reading, for_writing
from gdpo_tune.ledger.sessions import Sessions
from gdpo_tune.ledger.study import open_study, write_spec
from gdpo_tune.spec import SweepSpec


class Ledger(Sessions, Closing):
    """A sweep's trials. `open` it; use it as a context manager.

    It holds what it has written in memory, so reading records costs no disk access.
    """

    def __init__(self, spec: SweepSpec, journal: Journal, lease: Lease | None) -> None:
        """Not for callers: `open` checks what this takes for granted."""
        self.spec = spec
        self.directory = spec.directory.absolute()
        self._journal = journal
        self._lease = lease
        storage = replayed(journal)
        super().__init__(storage, open_study(storage, spec, writable=lease is not None))
        self._stale: set[int] = set()
        """Numbers of the trials whose records are to be read again."""
        self.generations = Generations(storage, self._study_id, self._stale)
        self.moved_aside: Path | None = None
        """Where an earlier sweep of this name is now, if opening this one moved it."""
        self._rungs = sum(len(stored_rungs(trial)) for trial in self._trials())
        if lease is not None:
            self._finish_what_was_known()
        self._records = self._read_all()

    @classmethod
    def open(cls, spec: SweepSpec, *, fresh: bool = False, read_only: bool = False) -> Ledger:
        """Open the sweep's ledger, or begin one.

        Args:
            spec: the sweep; its `directory` is where the ledger lives.
            fresh: move an earlier sweep of this name aside (nothing is deleted) and begin anew.
            read_only: take no lease and change nothing; works beside the process that writes.

        Raises:
            LedgerHeldError: another live process writes this ledger.
            IdentityError: the ledger belongs to a sweep with another task, policy, objectives,
                space or training.
            UsageError: `read_only` and there is no such sweep yet, or the folder cannot be used.
        """
        directory = spec.directory.absolute()
        try:
            if read_only:
                return cls._over(spec, for_reading(spec), None)
            opened = for_writing(spec, fresh=fresh)
            ledger = cls._over(spec, opened.journal, opened.lease)
            ledger.moved_aside = opened.aside
            return ledger
        except OSError as error:
            raise UsageError(
                f"the sweep cannot be kept in {directory}: {error}; make that folder readable and "
                "writable, or choose another with --set storage=FOLDER"
            ) from error

    @classmethod
    def _over(cls, spec: SweepSpec, journal: Journal, lease: Lease | None) -> Ledger:
        """The ledger over a journal, which is closed if that fails."""
        try:
            ledger = cls(spec, journal, lease)
            if lease is not None:
                write_spec(spec)
        except BaseException:
            journal.close()
            if lease is not None:
                lease.release()
            raise
        return ledger

    def close(self) -> None:
        """Close the file and give the lease back; a second call does nothing."""
        self._journal.close()
        if self._lease is not None:
            self._lease.release()

    def records(self) -> list[TrialRecord]:
        """Every trial, by number."""
        if self._lease is None:
            self._records = self._read_all()
        for number in sorted(self._stale):
            self.record(number)
        return list(self._records)

    def record(self, number: int) -> TrialRecord:
        """One trial."""
        if number in self._stale:
            self._records[number] = self._read(self._trial(number))
            self._stale.discard(number)
        return self._records[number]

    def unfinished(self) -> list[TrialRecord]:
        """Trials that were started, have no end yet and do not wait for a promotion."""
        return [record for record in self.records() if record.state == "running"]

    def start(
        self,
        params: Params,
        role: Role,
        proposer: Proposer,
        seed: int,
        replicate_of: int | None = None,
        sampler_state: Mapping[str, Any] | None = None,
    ) -> TrialRecord:
        """Record a trial as running, in one write; its folder does not exist or is deleted.

        Args:
            params: complete parameters.
            role: why it is run.
            proposer: who chose its parameters.
            seed: of the training.
            replicate_of: number of the trial whose parameters it repeats.
            sampler_state: what the sampler wants to find again beside this trial.
        """
        about = {
            "role": role,
            "proposer": proposer,
            "seed": seed,
            "replicate_of": replicate_of,
            "params": dict(params),
            "sampler_state": dict(sampler_state or {}),
        }
        number = len(self._records)
        # a trial whose record was torn off leaves a folder with other parameters' checkpoints
        if self.trial_directory(number).exists():
            shutil.rmtree(self.trial_directory(number))
        self._storage.create_new_trial(
            self._study_id, create_running_trial(self.spec, params, about)
        )
        self._records.append(self._read(self._trial(number)))
        return self._records[number]

    def progress(self, number: int, measurement: Measurement) -> bool:
        """Keep what a trial has measured on validation prompts, by the completions sampled so far.

        What a trial measures again, after it went on from an earlier step, is not kept: decisions
        rest on what was kept first.

        Returns:
            Whether it was kept.

        Raises:
            NonFiniteError: see `encode_rung`.
        """
        key = f"{RUNG}{measurement.cost.completions}"
        if key in self._trial(number).user_attrs:
            return False
        self._set(number, key, encode_rung(measurement, self._rungs, self.spec))
        self._rungs += 1
        return True

    def rungs(self) -> list[tuple[int, Rung]]:
        """Every rung with its trial's number, in the order of their recording."""
        return decode_rungs_in_order(self._trials(), self.spec)

    def pause(self, number: int) -> TrialRecord:
        """Record that a trial waits at its last rung, without a process."""
        rung = self.record(number).rungs[-1]
        self._set(number, "pause", {"at": rung.completions, "waits": True})
        return self.record(number)

    def resume(self, number: int) -> TrialRecord:
        """Record that a paused trial goes on."""
        self._set(number, "pause", {"at": self.record(number).paused_at, "waits": False})
        return self.record(number)

    def complete(self, number: int, outcome: Outcome) -> TrialRecord:
        """Record what a finished trial is worth; a value that is not finite makes it a failure."""
        outcome = add_costs_to_outcome(outcome, self.spec)
        for split, estimates in (("validation", outcome.validation), ("test", outcome.test)):
            for name in self.spec.judged:
                if name not in estimates or not math.isfinite(estimates[name].mean):
                    found = estimates[name].mean if name in estimates else "missing"
                    return self.fail(number, f"{split} {name} is {found}", outcome.cost)
        with self._journal.together():
            self._set(number, "outcome", encode_outcome(outcome, self.directory))
            self._close_trial(number)
        return self.record(number)

    def fail(self, number: int, reason: str, cost: Cost | None = None) -> TrialRecord:
        """Record that a trial ended without a result.

        Args:
            number: of the trial.
            reason: why, in one line.
            cost: what it has spent; None: what was recorded when it last measured something.
        """
        return self._end(number, "failed", reason, cost or self.record(number).cost)

    def prune(self, number: int, reason: str, cost: Cost) -> TrialRecord:
        """Record that the scheduler stopped a trial; its rungs stay."""
        return self._end(number, "pruned", reason, cost)

    def sampler_state(self, number: int) -> dict[str, Any]:
        """What `start` was given for the sampler."""
        return dict(self._trial(number).user_attrs["trial"]["sampler_state"])

    def forget_checkpoints(self, numbers: Sequence[int]) -> None:
        """Look again whether the checkpoints of these trials exist."""
        self._stale.update(numbers)

    def trial_directory(self, number: int) -> Path:
        """A trial's own folder."""
        return trial_directory(self.directory, number)

    def _trials(self) -> list[FrozenTrial]:
        return self._storage.get_all_trials(self._study_id, deepcopy=False)

    def _trial(self, number: int) -> FrozenTrial:
        return self._storage.get_trial(self._trial_id(number))

    def _read_all(self) -> list[TrialRecord]:
        self._stale.clear()
        return [self._read(trial) for trial in self._trials()]

    def _read(self, trial: FrozenTrial) -> TrialRecord:
        return decode_trial(
            trial, self.spec, self.directory, self.generations.lineage(trial.number)
        )

    def _set(self, number: int, key: str, value: Mapping[str, Any]) -> None:
        self._storage.set_trial_user_attr(self._trial_id(number), key, dict(value))
        self._stale.add(number)

    def _trial_id(self, number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number)

    def _end(self, number: int, state: State, reason: str, cost: Cost) -> TrialRecord:
        with self._journal.together():
            self._set(number, "end", {"state": state, "reason": reason, "cost": vars(cost)})
            self._close_trial(number)
        return self.record(number)

    def _close_trial(self, number: int) -> None:
        """Give a trial the state that its last attribute asks for."""
        trial, trial_id = self._trial(number), self._trial_id(number)
        self._stale.add(number)
        if "outcome" not in trial.user_attrs:
            pruned = trial.user_attrs["end"]["state"] == "pruned"
            state = TrialState.PRUNED if pruned else TrialState.FAIL
            self._storage.set_trial_state_values(trial_id, state)
            return
        found = {name: e.mean for name, e in self._read(trial).validation.items()}
        for name, bound in self.spec.constraints.items():
            if name not in trial.constraints:
                Trial(self.study, trial_id).set_constraint(
                    name, compute_violation(bound, found[name])
                )
        values = [found[name] for name in self.spec.objectives]
        self._storage.set_trial_state_values(trial_id, TrialState.COMPLETE, values)

    def _finish_what_was_known(self) -> None:
        """Close trials whose end was written before a crash, but not their new state."""
        for trial in self._trials():
            known = "outcome" in trial.user_attrs or "end" in trial.user_attrs
            if trial.state == TrialState.RUNNING and known:
                self._close_trial(trial.number)
