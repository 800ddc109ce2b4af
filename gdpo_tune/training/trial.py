"""One trial: `train(config)` trains a policy with GDPO, then evaluates it on held-out prompts.

A plain function that knows neither Ray nor Optuna. Equal configs give bitwise equal metrics on a
CPU, in a fresh process or a reused one, uninterrupted or resumed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback
from transformers.utils import logging as transformers_logging

from gdpo_tune.policies.load import load_policy
from gdpo_tune.steps import append_step
from gdpo_tune.training.checkpoints import (
    Checkpoint,
    keep_only,
    read_checkpoint,
    write_checkpoint,
)
from gdpo_tune.training.evaluation import HeldOut, evaluate, evaluation_seed
from gdpo_tune.training.rollout import rollout, supports
from gdpo_tune.training.scoring import reward_functions
from gdpo_tune.training.settings import prompts_per_step, trainer_arguments
from gdpo_tune.training.state import save_state
from gdpo_tune.training.trainer import GDPOTrainer
from gdpo_tune.training.warm import Warm, warm
from gdpo_tune.trials import Cost, Estimate, Measurement, Outcome, Report, TrialConfig

_RENAMED = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "entropy": "entropy",
    "kl": "kl",
    "clip_ratio/region_mean": "clip_ratio",
    "completions/mean_length": "mean_length",
}
"""Step metrics that TRL logs -> their names here, after `train/`; ours keep theirs."""


def train(config: TrialConfig, *, resume: Path | None, report: Report) -> Outcome:
    """Run one trial to its end.

    Writes `steps.jsonl` and checkpoints to `config.directory`; during training only the newest
    checkpoint stays. `report` is called once a step, with the checkpoint's folder if one was just
    written; it may end the trial by raising. `SystemExit` passes through once a checkpoint of the
    step just done is on disk.

    Step metrics are `train/loss`, `train/grad_norm`, `train/learning_rate`, `train/entropy`,
    `train/mean_length` (tokens), `train/reward/<name>/mean|std|dead_groups|share` (see
    `GDPOTrainer`), `train/kl` where beta is above 0, `train/clip_ratio`, and `validation/<metric>`
    every `evaluate_every` steps and at the last one.

    Args:
        config: what decides the trial.
        resume: a checkpoint of the same trial to go on from.
        report: told about every step.

    Raises:
        TrialFailure: the trial cannot go on, such as `NonFiniteError`; its message is the reason.
        PolicyError, SandboxUnavailable, SandboxInfraError: from the policy or the task.
    """
    torch.set_num_threads(config.threads)
    # Bars and notes about every checkpoint would land in whoever's display it is.
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    with warm(config) as state:
        if not config.train:
            return _untrained(config, state)
        start = None if resume is None else read_checkpoint(resume)
        clock = _Clock(Cost() if start is None else start.cost, config)
        if start is not None and start.step >= config.training.steps:
            model = _placed(load_policy(str(start.path))[0])
            steps = config.training.steps
            validation = _evaluate(config, state, model, state.validation(), steps)
            checkpoint = start.path
        else:
            trainer = _build_trainer(config, state)
            progress = _Progress(config, state, trainer, clock, report)
            trainer.add_callback(progress)
            trainer.train(resume_from_checkpoint=None if start is None else str(start.path))
            model = _policy(trainer)
            validation, checkpoint = progress.validation, progress.checkpoint
        test = _evaluate(config, state, model, state.test(), config.training.steps)
        return Outcome(
            validation=validation,
            test=test,
            cost=clock.read(config.training.steps),
            checkpoint=checkpoint,
            environment=state.task.environment(),
        )


def training_order(problems: int, count: int, seed: int) -> list[int]:
    """Indices of the `count` prompts that a trial meets; each pass over them has its own order.

    Laid out in advance: a data loader that shuffles by itself starts another order when a trial is
    resumed after its first pass.
    """
    generator = np.random.default_rng(seed)
    passes = -(-count // problems)
    order = np.concatenate([generator.permutation(problems) for _ in range(passes)])
    return order[:count].tolist()


def _untrained(config: TrialConfig, state: Warm) -> Outcome:
    clock = _Clock(Cost(), config)
    model = _placed(state.fresh_policy())
    return Outcome(
        validation=_evaluate(config, state, model, state.validation(), 0),
        test=_evaluate(config, state, model, state.test(), 0),
        cost=clock.read(0),
        checkpoint=None,
        environment=state.task.environment(),
    )


def _build_trainer(config: TrialConfig, state: Warm) -> GDPOTrainer:
    problems = state.train_problems()
    count = config.training.steps * prompts_per_step(config)
    order = training_order(len(problems), count, config.seed)
    data = Dataset.from_dict({"prompt": [problems[i].prompt for i in order], "problem": order})
    model = state.fresh_policy()
    trainer = GDPOTrainer(
        normalization=str(config.params["normalization"]),
        reward_funcs=reward_functions(state.task, problems),
        model=model,
        args=trainer_arguments(config, state.task.rewards),
        train_dataset=data,
        processing_class=state.tokenizer,
        rollout_func=rollout if supports(model) else None,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _evaluate(
    config: TrialConfig, state: Warm, model: PreTrainedModel, held_out: HeldOut, step: int
) -> dict[str, Estimate]:
    seed = evaluation_seed(config.seed, held_out.split, step)
    return evaluate(model, state.tokenizer, state.task, held_out, config.training, seed)


def _policy(trainer: GDPOTrainer) -> PreTrainedModel:
    return trainer.accelerator.unwrap_model(trainer.model)


def _placed(model: PreTrainedModel) -> PreTrainedModel:
    network: Any = model
    return network.to("cuda") if torch.cuda.is_available() else model


class _Clock:
    """What the trial has spent, its earlier runs included."""

    def __init__(self, before: Cost, config: TrialConfig) -> None:
        self._before = before
        self._completions = config.training.completions_per_step
        self._seconds = time.monotonic()
        self._cpu_seconds = time.process_time()

    def read(self, step: int) -> Cost:
        return Cost(
            completions=step * self._completions,
            seconds=self._before.seconds + time.monotonic() - self._seconds,
            cpu_seconds=self._before.cpu_seconds + time.process_time() - self._cpu_seconds,
        )


class _Progress(TrainerCallback):
    """At the end of each step: evaluate, write a checkpoint, append to the file, report."""

    def __init__(
        self, config: TrialConfig, state: Warm, trainer: GDPOTrainer, clock: _Clock, report: Report
    ) -> None:
        self.validation: Mapping[str, Estimate] = {}
        self.checkpoint: Path | None = None
        self._config = config
        self._state = state
        self._trainer = trainer
        self._clock = clock
        self._report = report
        self._passes: list[dict[str, float]] = []

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
        self._passes.append(_step_metrics(logs))
        step, rest = divmod(state.global_step, self._trainer.num_iterations)
        if rest == 0:
            metrics = _mean_of_each(self._passes)
            self._passes.clear()
            self._end_step(step, metrics)

    def _end_step(self, step: int, metrics: dict[str, float]) -> None:
        settings = self._config.training
        last = step == settings.steps
        if last or step % settings.evaluate_every == 0:
            model = _policy(self._trainer)
            held_out = self._state.validation()
            self.validation = _evaluate(self._config, self._state, model, held_out, step)
            metrics |= {f"validation/{name}": e.mean for name, e in self.validation.items()}
        due = last or step % settings.checkpoint_every == 0
        written = self._save(step) if due else None
        measurement = Measurement(step, metrics, self._clock.read(step))
        append_step(self._config.directory, measurement)
        try:
            self._report(measurement, written.path if written else None)
        except SystemExit:
            if written is None:
                self._save(step)  # asked to stop: the next start goes on from here
            raise
        if written is not None:
            # Only now, since until the report the older one is what others know of.
            keep_only(written)

    def _save(self, step: int) -> Checkpoint:
        written = write_checkpoint(
            self._config.directory,
            step,
            self._clock.read(step),
            lambda folder: save_state(self._trainer, folder),
        )
        self.checkpoint = written.path
        return written


def _step_metrics(logs: Mapping[str, Any]) -> dict[str, float]:
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
