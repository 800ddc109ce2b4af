"""What happens at the end of each step of a trial: evaluation, checkpoint, measurement, report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import TrainerCallback

from gdpo_tune.core.files import room_in
from gdpo_tune.core.steps import append_step
from gdpo_tune.core.trials import Cost, Estimate, Measurement, Report, TrialConfig
from gdpo_tune.training import ranks
from gdpo_tune.training.checkpoints import Checkpoint, keep_newest, write_checkpoint
from gdpo_tune.training.claim import Claim
from gdpo_tune.training.evaluation import Generate
from gdpo_tune.training.gpu_meter import GpuMeter
from gdpo_tune.training.held_out import evaluate_split
from gdpo_tune.training.state import RandomState, random_state, save_state
from gdpo_tune.training.trainer import GDPOTrainer
from gdpo_tune.training.warm import Warm

_RENAMED = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "entropy": "entropy",
    "kl": "kl",
    "clip_ratio/region_mean": "clip_ratio",
    "completions/mean_length": "mean_length",
    "sampling/importance_sampling_ratio/mean": "rollout/importance_ratio",
    "sampling/sampling_logp_difference/mean": "rollout/logp_difference",
    "sampling/sampling_logp_difference/max": "rollout/logp_difference_max",
}
"""Step metrics that TRL logs -> their names here, after `train/`; ours keep theirs."""


class Clock:
    """What the trial has spent, its earlier runs included."""

    def __init__(self, before: Cost, config: TrialConfig) -> None:
        self._before = before
        self._completions = config.training.completions_per_step
        self._seconds = time.monotonic()
        self._cpu_seconds = time.process_time()

    def read(self, step: int) -> Cost:
        """By the clock of one process; CPU time is that of all of them."""
        cpu_seconds = sum(ranks.gather(time.process_time() - self._cpu_seconds))
        return Cost(
            completions=step * self._completions,
            seconds=self._before.seconds + time.monotonic() - self._seconds,
            cpu_seconds=self._before.cpu_seconds + cpu_seconds,
        )


class Progress(TrainerCallback):
    """At the end of each step: evaluate, write a checkpoint, append to the file, report."""

    def __init__(
        self,
        config: TrialConfig,
        state: Warm,
        trainer: GDPOTrainer,
        sampler: Generate,
        clock: Clock,
        report: Report,
        start: Checkpoint | None,
    ) -> None:
        self.validation: Mapping[str, Estimate] = {}
        self.checkpoint: Path | None = None
        self._config = config
        self._state = state
        self._trainer = trainer
        self._sampler = sampler
        self._clock = clock
        self._report = report
        self._start = start
        self._passes: list[dict[str, float]] = []
        self._meter = GpuMeter()
        self._claim = Claim(config.directory) if ranks.is_first() else None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Say again what was measured where this run goes on."""
        if self._start is not None:
            say_again(self._start, self._report)

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """TRL logs once an optimizer pass, and a summary without a loss at the end."""
        state.log_history.clear()  # or every checkpoint would hold the whole history again
        if logs is None or "loss" not in logs:
            return
        self._passes.append(step_metrics(logs))
        step, rest = divmod(state.global_step, self._trainer.num_iterations)
        if rest == 0:
            metrics = _mean_of_each(self._passes)
            self._passes.clear()
            self._end_step(step, metrics)

    def _end_step(self, step: int, metrics: dict[str, float]) -> None:
        settings = self._config.training
        last = step == settings.steps
        measured: Mapping[str, Estimate] = {}
        if last or step % settings.evaluate_every == 0 or step in self._config.evaluate_at:
            model, held_out = self._trainer.policy, self._state.validation()
            measured = evaluate_split(
                self._config, self._state, model, held_out, step, self._sampler
            )
            self.validation = measured
            metrics |= {f"validation/{name}": e.mean for name, e in measured.items()}
        metrics |= self._meter.read()
        measurement = Measurement(step, metrics, self._clock.read(step), measured)
        if self._claim is not None:
            self._claim.check()
            # Before the checkpoint: a start from it would not come to this step again.
            with room_in(self._config.directory, f"the measurements of step {step}"):
                append_step(self._config.directory, measurement)
        due = last or step % settings.checkpoint_every == 0
        written = self._save(step, measured) if due else None
        try:
            self._report(measurement, written.path if written else None)
        except SystemExit:
            if written is None:
                self._save(step, measured)  # asked to stop: the next start goes on from here
            raise
        if written is not None and ranks.is_first():
            # Only now, since until the report the older one is what others know of.
            keep_newest(self._config.directory)

    def _save(self, step: int, measured: Mapping[str, Estimate]) -> Checkpoint:
        cost, states = self._clock.read(step), ranks.gather(random_state())
        last = step == self._config.training.steps
        written = None
        if ranks.is_first():
            written = write_checkpoint(
                self._config.directory,
                step,
                cost,
                lambda folder: self._fill(folder, states, last=last),
                measured,
            )
        known = ranks.from_first(written)
        assert known is not None, "the first process has written it, or has raised"
        self.checkpoint = known.path
        return known

    def _fill(self, folder: Path, states: Sequence[RandomState], *, last: bool) -> None:
        save_state(self._trainer, states, folder, last=last)
        self._state.prompts.save(folder)


def say_again(start: Checkpoint, report: Report) -> None:
    """Report what was measured at a checkpoint that a run goes on from, if anything was."""
    if start.validation:
        report(Measurement(start.step, {}, start.cost, start.validation), start.path)


def step_metrics(logs: Mapping[str, Any]) -> dict[str, float]:
    """What is kept of TRL's figures of one pass, under the names that they have here."""
    named = {f"train/{new}": logs[old] for old, new in _RENAMED.items() if old in logs}
    ours = {f"train/{name}": value for name, value in logs.items() if name.startswith("reward/")}
    return {name: float(value) for name, value in {**named, **ours}.items() if value is not None}


def _mean_of_each(passes: list[dict[str, float]]) -> dict[str, float]:
    """Mean of every metric over the optimizer passes that have it."""
    names = dict.fromkeys(name for metrics in passes for name in metrics)
    return {
        name: float(np.mean([metrics[name] for metrics in passes if name in metrics]))
        for name in names
    }
