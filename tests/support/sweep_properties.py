"""Properties of a finished sweep, regardless of how often its driver was killed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlflow

from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.spec.first_trials import count_wide, find_wide_step
from gdpo_tune.tuning.halving import STOPPED
from tests.support.killed_sweeps import KilledSweep, read_steps_written


def check_sweep(sweep: KilledSweep) -> None:
    check_every_trial_once(sweep)
    check_no_trial_goes_back(sweep)
    check_rungs_decide(sweep)


def check_every_trial_once(sweep: KilledSweep) -> None:
    """Check that each trial has one start, one end and one directory, and none failed or runs."""
    spec = sweep.spec
    with Ledger.open(spec, read_only=True) as ledger:
        records = ledger.get_records()
        states = {trial.state.name for trial in ledger.study.trials}
    assert states <= {"COMPLETE", "PRUNED"}
    numbers = [record.number for record in records]
    written = [json.loads(line) for line in sweep.read_journal()]
    begun = [entry for entry in written if "state" in entry and "trial_id" not in entry]
    assert len(begun) == len(numbers)
    closed = [entry["trial_id"] for entry in written if "state" in entry and "trial_id" in entry]
    assert sorted(closed) == numbers
    ends = [e["trial_id"] for e in written if {"outcome", "end"} & e.get("user_attr", {}).keys()]
    assert sorted(ends) == numbers
    directories = {int(directory.name) for directory in (spec.directory / "trials").iterdir()}
    assert directories | {0} == set(numbers)  # the untrained policy may need none

    roles = Counter(record.role for record in records)
    assert (roles["untrained"], roles["published"]) == (1, 1)
    if spec.search.is_divided:
        assert roles["search"] >= count_wide(spec)
    else:
        assert roles["search"] == spec.search.trials
    trained_again = sum(r.role == "replicate" and r.is_training for r in records)
    assert 1 <= trained_again <= spec.search.replicates.max_runs
    if spec.search.is_divided:
        trained = sum(record.cost.completions for record in records)
        assert roles["merge"] <= spec.count_merges(trained)
        tested = [r for r in records if r.role == "merge" and r.state == "complete"]
        assert len(tested) <= spec.search.merges.budget
    else:
        assert roles["merge"] <= spec.search.merges.budget
    assert roles["checkpoint"] <= spec.search.checkpoints.budget
    candidates = [r.parts for r in records if r.role in ("merge", "checkpoint")]
    assert len(set(candidates)) == len(candidates)
    assert len({record.seed for record in records}) == len(records)
    if not sweep.fake:
        runs = find_mlflow_trials(sweep.directory, spec.tracking.experiment)
        assert sorted(int(run.data.tags["trial"]) for run in runs) == numbers
        assert "RUNNING" not in {run.info.status for run in runs}


def check_no_trial_goes_back(sweep: KilledSweep) -> None:
    """Check that each start of a trial resumes from its newest checkpoint.

    A trial starts at 0 only until it has written its first checkpoint.
    """
    spec = sweep.spec
    with Ledger.open(spec, read_only=True) as ledger:
        numbers = [record.number for record in ledger.get_records()]
    if sweep.fake:
        newest: dict[int, int] = {}
        for entry in sweep.read_log():
            number = int(entry["trial"])
            checkpoint = newest.get(number, 0)
            assert entry.get("from", checkpoint) >= checkpoint, entry
            newest[number] = entry.get("checkpoint", checkpoint)
        assert sorted(newest) == numbers
        return
    every = spec.training.checkpoint_every
    for number in numbers:
        steps = read_steps_written(spec.directory / "trials" / str(number))
        for before, step in zip([0, *steps], steps, strict=False):
            # The checkpoint of a step is written before anything is of the next one.
            earliest = before + 1 if step > before else (before - 1) // every * every + 1
            assert earliest <= step <= before + 1, (number, steps)


def check_rungs_decide(sweep: KilledSweep) -> None:
    """Check that no rung is lost or recorded twice, and that rungs explain each end."""
    with Ledger.open(sweep.spec, read_only=True) as ledger:
        records = ledger.get_records()
    for record in records:
        if record.parts:
            assert (record.state == "pruned") == bool(record.reason)
        elif not sweep.spec.search.is_divided:
            assert (record.state, record.reason, record.paused_at) == ("complete", "", 0)
            assert [rung.step for rung in record.rungs] == list_expected_steps(sweep, record)
    if sweep.spec.search.is_divided:
        check_lengths(sweep, [record for record in records if record.is_training])


def check_lengths(sweep: KilledSweep, trained: list[TrialRecord]) -> None:
    """Check that each training of a budget has all its rungs, and ended within the budget."""
    spec = sweep.spec
    first = find_wide_step(spec, trained)
    for record in trained:
        steps = [rung.step for rung in record.rungs]
        assert record.state in ("complete", "pruned")
        if record.state == "pruned":
            assert (steps[-1], record.reason) == (first, STOPPED)
        else:
            assert steps[-1] == (record.ends_at or steps[-1]) >= first
        assert steps == (list(range(1, steps[-1] + 1)) if sweep.fake else sorted(set(steps)))
        assert record.cost.completions == steps[-1] * spec.training.completions_per_step
    grown = [record for record in trained if record.role != "replicate"]
    assert sum(record.cost.completions for record in grown) <= spec.search.budget.completions


def list_expected_steps(sweep: KilledSweep, record: TrialRecord) -> list[int]:
    """List the steps with a measurement of a trial that ran to its end."""
    if record.role == "untrained" and not sweep.fake:
        return []
    training = sweep.spec.training
    return [
        step
        for step in range(1, training.steps + 1)
        if sweep.fake or step == training.steps or step % training.evaluate_every == 0
    ]


def list_rungs(records: Sequence[TrialRecord]) -> list[tuple[int, int]]:
    """List number and step of every rung, in the order of their times."""
    rungs = [(rung.recorded or 0.0, r.number, rung.step) for r in records for rung in r.rungs]
    return [(number, step) for _, number, step in sorted(rungs)]


def collect_facts(sweep: KilledSweep) -> dict[str, Any]:
    """Collect all decisions and measurements of a sweep, without times."""
    with Ledger.open(sweep.spec, read_only=True) as ledger:
        return {
            "order of rungs": list_rungs(ledger.get_records()),
            "trials": [describe_record(record) for record in ledger.get_records()],
        }


def collect_search_facts(sweep: KilledSweep) -> list[dict[str, Any]]:
    """Collect the facts of all trials except replicates, which depend on the order of ends."""
    return [trial for trial in collect_facts(sweep)["trials"] if trial["role"] != "replicate"]


def describe_record(record: TrialRecord) -> dict[str, Any]:
    """Describe a trial without its times."""
    return {
        "number": record.number,
        "role": record.role,
        "proposer": record.proposer,
        "replicate of": record.replicate_of,
        "parts": record.parts,
        "params": dict(record.params),
        "seed": record.seed,
        "state": record.state,
        "reason": record.reason,
        "paused at": record.paused_at,
        "ends at": record.ends_at,
        "rungs": [(r.step, r.completions, dict(r.validation)) for r in record.rungs],
        "validation": dict(record.validation),
        "test": dict(record.test),
    }


def find_mlflow_trials(directory: Path, experiment: str) -> list[mlflow.entities.Run]:
    client = mlflow.MlflowClient(f"sqlite:///{directory}/mlflow.db")
    record = client.get_experiment_by_name(experiment)
    assert record is not None
    runs = client.search_runs([record.experiment_id], max_results=1000)
    assert [run.data.tags["role"] for run in runs].count("sweep") == 1
    return [run for run in runs if run.data.tags["role"] != "sweep"]
