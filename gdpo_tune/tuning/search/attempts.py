"""Configuration of an attempt at a trial, and the checkpoints that it has stored."""

from __future__ import annotations

from dataclasses import replace

from gdpo_tune.analysis.front import trace_training
from gdpo_tune.core.trial_config import TrainedPart, TrialConfig
from gdpo_tune.core.trials import Outcome, TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.tuning.kept_checkpoints import list_kept_steps
from gdpo_tune.tuning.schedulers.base import Scheduler
from gdpo_tune.tuning.schedulers.exploits import write_schedule


def build_config(ledger: Ledger, scheduler: Scheduler, record: TrialRecord) -> TrialConfig:
    """Build the configuration of a trial, with the checkpoints that it keeps or starts from."""
    spec, directory = ledger.spec, ledger.get_trial_directory(record.number)
    if record.role == "member":
        write_schedule(ledger, record.number)
    records = ledger.get_records()
    if record.parts:
        # a merge has no parameters; any parent's make the same task
        params = records[record.parts[0].trial].params
        config = spec.build_trial_config(params, record.seed, directory)
        parts = tuple(
            TrainedPart(ledger.get_checkpoint(part.trial, part.step), part.weight)
            for part in record.parts
        )
        return replace(config, train=False, parts=parts)
    training = trace_training(records, record.number)
    keep_at = list_kept_steps(spec, records, record)
    return replace(
        spec.build_trial_config(training.params, training.seed, directory),
        train=record.is_training,
        evaluate_at=tuple(sorted({*scheduler.list_evaluation_steps(record), *keep_at})),
        keep_at=keep_at,
        schedule=training.schedule,
    )


def mark_stored_checkpoints(ledger: Ledger, number: int, outcome: Outcome) -> None:
    """Create empty directories that stand for the checkpoints of a trial in the store."""
    records = ledger.get_records()
    steps = list_kept_steps(ledger.spec, records, records[number])
    paths = [ledger.get_checkpoint(number, step) for step in steps]
    for path in (*paths, *filter(None, [outcome.checkpoint])):
        path.mkdir(parents=True, exist_ok=True)
