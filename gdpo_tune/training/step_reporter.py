"""End of each step of a trial: evaluation, checkpoint, `steps.jsonl`, report."""

from __future__ import annotations

import math
import time
import uuid
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from gdpo_tune.core.errors import NO_SIGNAL, NoSignalError, SupersededError, TrialFailure
from gdpo_tune.core.files import explain_full_disk, write_atomically
from gdpo_tune.core.text import format_number, format_percent
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.core.trial_files import (
    CLIPPED,
    KEPT,
    MOST_CUT,
    REWARDS,
    TRAINER_STATE_FILE,
    ZERO_STD,
    append_step,
    read_steps,
    shorten_completion,
    teaches_nothing,
    write_completions,
)
from gdpo_tune.core.trials import Cost, Estimate, Measurement, Report
from gdpo_tune.training import distributed
from gdpo_tune.training.checkpoints import (
    OPTIMIZER_FILE,
    SCHEDULER_FILE,
    Checkpoint,
    keep_newest,
    write_checkpoint,
)
from gdpo_tune.training.devices import read_gpu_metrics
from gdpo_tune.training.evaluation import Evaluator
from gdpo_tune.training.lora import gather_policy
from gdpo_tune.training.progress import TRAINING
from gdpo_tune.training.trainer import GDPOTrainer, StartTrainer
from gdpo_tune.training.training_state import (
    gather_optimizer,
    read_random_state,
    save_random_states,
)
from gdpo_tune.training.trl_arguments import choose_weights_dtype
from gdpo_tune.training.written_policy import write_policy

_EXAMPLES = 3
"""Completions that are kept of a trial without a signal."""


class TrialWriterToken:
    """Right to write a trial's directory, held by the process that took it last.

    A node that counted as dead may come back after another process has resumed its trial. Without
    the token it would overwrite newer steps and delete the unfinished checkpoint.
    """

    def __init__(self, directory: Path) -> None:
        """Take the token; the trial's directory is created if missing."""
        self._file = directory / "writer"
        self._token = uuid.uuid4().hex
        with explain_full_disk(directory, "the start of the trial"):
            directory.mkdir(parents=True, exist_ok=True)
            write_atomically(self._file, self._token)

    def append_step(self, measurement: Measurement, subject: str) -> None:
        """Append a measurement, named `subject` in errors, to the trial's steps.

        Raises:
            SupersededError: another process has taken the token.
            DiskFullError: there is no room for it.
        """
        directory = self._file.parent
        if self._file.read_text() != self._token:
            raise SupersededError(f"another process has taken over the trial in {directory}")
        with explain_full_disk(directory, subject):
            append_step(directory, measurement)


@dataclass(frozen=True)
class Clock:
    """Cost of the trial, the runs before its last resume included."""

    before: Cost
    completions_per_step: int
    started: float = field(default_factory=time.monotonic)
    cpu_started: float = field(default_factory=time.process_time)

    def read(self, step: int, evaluated: int) -> Cost:
        """Return the cost after `step` steps, CPU time of all processes.

        `evaluated`: completions of evaluations since the start or the last resume.
        """
        cpu_seconds = sum(distributed.gather(time.process_time() - self.cpu_started))
        return Cost(
            completions=step * self.completions_per_step,
            seconds=self.before.seconds + time.monotonic() - self.started,
            cpu_seconds=self.before.cpu_seconds + cpu_seconds,
            evaluation_completions=self.before.evaluation_completions + evaluated,
        )


@dataclass(eq=False)
class StepReporter(TrainerCallback):
    """Callback that ends each step: evaluate, write steps and checkpoint, report."""

    config: TrialConfig
    trainer: GDPOTrainer | StartTrainer
    evaluator: Evaluator
    clock: Clock
    report: Report
    validation: Mapping[str, Estimate] = field(default_factory=dict[str, Estimate])
    """Result of the latest evaluation."""
    checkpoint: Path | None = None
    """The newest checkpoint."""

    def __post_init__(self) -> None:
        self._passes: dict[str, list[float]] = defaultdict(list)
        self._token = TrialWriterToken(self.config.directory) if distributed.is_first() else None

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Collect metrics: TRL logs after each optimizer step, and a summary without a loss."""
        state.log_history.clear()  # or every checkpoint would hold the whole history again
        if logs is None or "loss" not in logs:
            return
        for name, value in select_metrics(logs, self.trainer.logged_metrics).items():
            self._passes[name].append(value)
        TRAINING.note_progress(step=True)
        step, rest = divmod(state.global_step, self.trainer.updates_per_step)
        if rest == 0:
            metrics = {name: float(np.mean(values)) for name, values in self._passes.items()}
            self._passes.clear()
            self._end_step(step, metrics)

    def _end_step(self, step: int, metrics: dict[str, float]) -> None:
        settings = self.config.training
        last = step == settings.steps
        validation: Mapping[str, Estimate] = {}
        failure: TrialFailure | None = None
        due = last or step % settings.evaluate_every == 0 or step in self.config.evaluate_at
        if due and self.config.supervised is None:  # a start is evaluated as trials begin at it
            try:
                validation = self.evaluator.evaluate(self.trainer.model, "validation", step)
            except TrialFailure as error:
                if not last or distributed.count_processes() > 1:  # others may not have failed
                    raise
                failure = error  # raised when the training is saved, to be evaluated again
            self.validation = validation
            metrics |= {f"validation/{name}": e.mean for name, e in validation.items()}
        metrics |= read_gpu_metrics()
        cost = self.clock.read(step, self.evaluator.sampled)
        measurement = Measurement(step, metrics, cost, validation, time.time())
        if self._token is not None:
            # Before the checkpoint, because a run that resumes from it does not repeat this step.
            self._token.append_step(measurement, f"the measurements of step {step}")
        due = last or step % settings.checkpoint_every == 0 or step in self.config.keep_at
        written = self._save(step, validation) if due or failure else None
        if failure:
            raise failure
        try:
            with TRAINING.pause():
                self.report(measurement, written.path if written else None)
        except SystemExit:
            if written is None:
                self._save(step, validation)  # a stop was requested: the next run resumes here
            raise
        if written is not None and distributed.is_first():
            # Only now: before the report, other processes know only the older checkpoint.
            keep_newest(self.config.directory, self.config.keep_at)
        if settings.dead_steps and teaches_nothing(measurement):
            # The steps before a resume are in the trial's file alone.
            steps = read_steps(self.config.directory)
            in_a_row = len(list(takewhile(teaches_nothing, reversed(steps))))
            dead = distributed.broadcast_from_first(in_a_row)
            if dead >= min(settings.dead_steps, settings.steps):
                weights = self.config.get_reward_weights()
                if distributed.is_first():
                    self._keep_examples(weights)
                raise NoSignalError(NO_SIGNAL + describe_dead_step(metrics, weights, dead))

    def _keep_examples(self, weights: Mapping[str, float]) -> None:
        trainer: Any = self.trainer
        logs = trainer._logs
        texts = list(zip(logs["prompt"], logs["completion"], strict=True))
        rows = range(0, len(texts), max(1, len(texts) // _EXAMPLES))  # of different prompts
        examples = [
            shorten_completion(
                *texts[r], {n: v[r] for n, v in logs["rewards"].items() if weights[n]}
            )
            for r in rows[:_EXAMPLES]
        ]
        with explain_full_disk(self.config.directory, "some completions"):
            write_completions(self.config.directory, examples)

    def _save(self, step: int, validation: Mapping[str, Estimate]) -> Checkpoint:
        cost = self.clock.read(step, self.evaluator.sampled)
        states = distributed.gather(read_random_state())
        last = step == self.config.training.steps
        # Trials train adapters on a start, and PEFT has no adapter of an adapter.
        whole = last and (self.config.writes_whole or self.config.supervised is not None)
        dtype = choose_weights_dtype(self.config) if last and not whole else torch.float32
        policy = gather_policy(self.trainer.model, whole=whole)
        trainer: Any = self.trainer  # TRL declares as optional what exists during training
        # No training continues after its last step, and this is most of the bytes.
        optimizer = None if last else gather_optimizer(trainer.optimizer)

        def fill(directory: Path) -> None:
            cache = self.evaluator.cache
            write_policy(trainer, cache, directory, whole=whole, dtype=dtype, gathered=policy)
            if optimizer is not None:
                torch.save(optimizer, directory / OPTIMIZER_FILE)
            torch.save(trainer.lr_scheduler.state_dict(), directory / SCHEDULER_FILE)
            save_random_states(states, directory)
            if trainer.selection is not None:
                trainer.selection.save(directory)
            trainer.state.save_to_json(str(directory / TRAINER_STATE_FILE))

        written = None
        if distributed.is_first():
            written = write_checkpoint(self.config.directory, step, cost, fill, validation)
        checkpoint = distributed.broadcast_from_first(written)
        assert checkpoint is not None, "the first process has written it, or has raised"
        self.checkpoint = checkpoint.path
        return checkpoint


def select_metrics(logs: Mapping[str, Any], logged: Collection[str] = ()) -> dict[str, float]:
    """Select the finite metrics of one pass, after `train/`: `KEPT`, `logged`, of rewards."""
    kept = ((k, v) for k, v in logs.items() if k in KEPT or k in logged or k.startswith(REWARDS))
    return {f"train/{k}": float(v) for k, v in kept if v is not None and math.isfinite(v)}


def describe_dead_step(
    metrics: Mapping[str, float], weights: Mapping[str, float], steps: int
) -> str:
    """Describe the last of `steps` dead steps: which reward is equal where, and at which value."""
    parts: list[str] = []
    for name in (name for name, weight in weights.items() if weight):
        reward = f"train/{REWARDS}{name}"
        if f"{reward}/mean" not in metrics:
            parts.append(f"{name} has no value")
        elif metrics.get(f"{reward}/std") == 0:
            value = format_number(metrics[f"{reward}/mean"])
            parts.append(f"{name} is {value} for every completion")
        elif metrics[f"{reward}/{ZERO_STD}"] == 1:
            parts.append(f"{name} is equal within each group")
        else:
            parts.append(f"{name} varies, but its advantages cancel")
    if (cut := metrics.get(f"train/{CLIPPED}", 0.0)) > MOST_CUT:
        parts.append(f"{format_percent(cut)} of the completions are cut at max_completion_length")
    return f"every advantage was 0 in {steps} steps in a row: {', '.join(parts)}"
