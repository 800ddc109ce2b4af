"""One trial: `train(config)` trains a policy with GDPO, then evaluates it on held-out prompts.

A plain function that knows neither Ray nor Optuna. Equal configs give bitwise equal metrics on a
CPU, in a fresh process or a reused one, uninterrupted or resumed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed
from datasets import Dataset
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback
from transformers.utils import logging as transformers_logging

from gdpo_tune import task_files
from gdpo_tune.engines import choose, installed_vllm
from gdpo_tune.files import room_in
from gdpo_tune.policies.load import load_policy
from gdpo_tune.steps import append_step
from gdpo_tune.training import processes, vllm_engine
from gdpo_tune.training.adapters import adapter_config, with_adapter
from gdpo_tune.training.checkpoints import (
    Checkpoint,
    keep_newest,
    read_checkpoint,
    write_checkpoint,
)
from gdpo_tune.training.evaluation import Generate, HeldOut, evaluate, evaluation_seed
from gdpo_tune.training.exhaustion import memory_guard
from gdpo_tune.training.rollout import generate, generate_in_bfloat16, rollout, supports
from gdpo_tune.training.scoring import reward_functions
from gdpo_tune.training.settings import (
    computes_in_bfloat16,
    prompts_per_step,
    trainer_arguments,
)
from gdpo_tune.training.shaping import shaping_of
from gdpo_tune.training.state import RandomState, random_state, save_state
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
    "sampling/importance_sampling_ratio/mean": "rollout/importance_ratio",
    "sampling/sampling_logp_difference/mean": "rollout/logp_difference",
    "sampling/sampling_logp_difference/max": "rollout/logp_difference_max",
}
"""Step metrics that TRL logs -> their names here, after `train/`; ours keep theirs."""


def train(config: TrialConfig, *, resume: Path | None, report: Report) -> Outcome:
    """Run one trial to its end.

    Writes `steps.jsonl` and checkpoints to `config.directory`; during training the two newest
    checkpoints stay. `report` is called once a step, with the checkpoint's folder if one was just
    written; it may end the trial by raising. `SystemExit` passes through once a checkpoint of the
    step just done is on disk.

    Several processes that were launched as one group (see `processes`) train one policy together:
    each calls this with the same arguments, samples and scores its part of every step and of every
    held-out split, and gets the same outcome. The first one writes. `report` is called in all of
    them and has to raise `SystemExit` in all or none.

    Step metrics are `train/loss`, `train/grad_norm`, `train/learning_rate`, `train/entropy`,
    `train/mean_length` (tokens), `train/reward/<name>/mean|std|dead_groups|share` (see
    `GDPOTrainer`), `train/kl` where beta is above 0, `train/clip_ratio`, and `validation/<metric>`
    every `evaluate_every` steps and at the last one; with vLLM also
    `train/rollout/importance_ratio` (mean over completions, those beyond TRL's bound counted as 0)
    and `train/rollout/logp_difference`, `..._max` (nats a token between engine and trainer).

    Args:
        config: what decides the trial.
        resume: a checkpoint of the same trial to go on from.
        report: told about every step.

    Raises:
        TrialFailure: the trial cannot go on, such as `NonFiniteError`; its message is the reason.
        DiskFullError: there is no room for a checkpoint or a measurement.
        PolicyError, SandboxUnavailable, SandboxInfraError: from the policy or the task.
        EngineError: completions are to be sampled with vLLM, which cannot be done here.
    """
    torch.set_num_threads(config.threads)
    processes.join()
    vllm_engine.limit_gpu_memory(config.gpu_share)
    # Bars and notes about every checkpoint would land in whoever's display it is.
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("trl").setLevel(logging.ERROR)
    with memory_guard(config), warm(config) as state:
        if not config.train:
            return _untrained(config, state)
        start = None if resume is None else read_checkpoint(resume)
        clock = _Clock(Cost() if start is None else start.cost, config)
        sampler = _held_out_sampler(config)
        if start is not None and start.step >= config.training.steps:
            model = _placed(_trained_policy(config, state, start.path))
            steps = config.training.steps
            validation = _evaluate(config, state, model, state.validation(), steps, sampler)
            checkpoint = start.path
        else:
            trainer, sampler = _build_trainer(config, state)
            progress = _Progress(config, state, trainer, sampler, clock, report)
            trainer.add_callback(progress)
            trainer.train(resume_from_checkpoint=None if start is None else str(start.path))
            model = _policy(trainer)
            validation, checkpoint = progress.validation, progress.checkpoint
        test = _evaluate(config, state, model, state.test(), config.training.steps, sampler)
        return Outcome(
            validation=validation,
            test=test,
            cost=clock.read(config.training.steps),
            checkpoint=checkpoint,
            environment={**state.task.environment(), **task_files.provenance(config.task)},
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
    sampler = _held_out_sampler(config)
    return Outcome(
        validation=_evaluate(config, state, model, state.validation(), 0, sampler),
        test=_evaluate(config, state, model, state.test(), 0, sampler),
        cost=clock.read(0),
        checkpoint=None,
        environment={**state.task.environment(), **task_files.provenance(config.task)},
    )


def _build_trainer(config: TrialConfig, state: Warm) -> tuple[GDPOTrainer, Generate]:
    """The trainer, and what samples held-out completions while and after it trains."""
    problems = state.train_problems()
    count = config.training.steps * prompts_per_step(config)
    order = training_order(len(problems), count, config.seed)
    data = Dataset.from_dict({"prompt": [problems[i].prompt for i in order], "problem": order})
    model = state.fresh_policy()
    adapter = adapter_config(model, config.model, config.policy)
    plain = adapter is None and not computes_in_bfloat16(config.model)
    engine = choose(
        config.rollout,
        gpu=torch.cuda.is_available(),
        lean=plain and supports(model),
        vllm=installed_vllm() if processes.count() == 1 else None,
    )
    uses_vllm = engine == "vllm"
    asked = vllm_engine.arguments(config, model) if uses_vllm else {}
    arguments = trainer_arguments(config, state.task.rewards, asked)
    info = task_files.task_info(config.task)
    # An adapter begins at random, before TRL gets to its own seed.
    set_seed(config.seed)
    with vllm_engine.starting(config, model, arguments) if uses_vllm else nullcontext():
        trainer = GDPOTrainer(
            normalization=str(config.params["normalization"]),
            gamma=float(config.params["gamma"]),
            baseline=str(config.params["baseline"]),
            ranges=[info.rewards[name] for name in state.task.rewards],
            reward_funcs=reward_functions(state.task, problems, shaping_of(config, info)),
            model=model,
            args=arguments,
            train_dataset=data,
            processing_class=state.tokenizer,
            peft_config=adapter,
            encode=state.prompts.encode,
            rollout_func=rollout if engine == "lean" else None,
        )
    trainer.remove_callback(PrinterCallback)
    if uses_vllm and config.rollout.vllm_mode == "colocate":
        return trainer, vllm_engine.ColocatedEngine(trainer).generate
    return trainer, _held_out_sampler(config)


def _held_out_sampler(config: TrialConfig) -> Generate:
    """What samples where no engine runs, in the precision of the training."""
    return generate_in_bfloat16 if computes_in_bfloat16(config.model) else generate


def _trained_policy(config: TrialConfig, state: Warm, checkpoint: Path) -> PreTrainedModel:
    """What a training that is over left behind, as it was in memory."""
    if not config.model.lora_rank:
        return load_policy(str(checkpoint))[0]
    return with_adapter(state.fresh_policy(), checkpoint)


def _evaluate(
    config: TrialConfig,
    state: Warm,
    model: PreTrainedModel,
    held_out: HeldOut,
    step: int,
    sampler: Generate,
) -> dict[str, Estimate]:
    seed = evaluation_seed(config.seed, held_out.split, step)
    return evaluate(model, state.tokenizer, state.task, held_out, config.training, seed, sampler)


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
        """By the clock of one process; CPU time is that of all of them."""
        cpu_seconds = sum(processes.gather(time.process_time() - self._cpu_seconds))
        return Cost(
            completions=step * self._completions,
            seconds=self._before.seconds + time.monotonic() - self._seconds,
            cpu_seconds=self._before.cpu_seconds + cpu_seconds,
        )


class _Progress(TrainerCallback):
    """At the end of each step: evaluate, write a checkpoint, append to the file, report."""

    def __init__(
        self,
        config: TrialConfig,
        state: Warm,
        trainer: GDPOTrainer,
        sampler: Generate,
        clock: _Clock,
        report: Report,
    ) -> None:
        self.validation: Mapping[str, Estimate] = {}
        self.checkpoint: Path | None = None
        self._config = config
        self._state = state
        self._trainer = trainer
        self._sampler = sampler
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
            self.validation = _evaluate(
                self._config, self._state, model, held_out, step, self._sampler
            )
            metrics |= {f"validation/{name}": e.mean for name, e in self.validation.items()}
        measurement = Measurement(step, metrics, self._clock.read(step))
        if processes.is_first():
            # Before the checkpoint: a start from it would not come to this step again.
            with room_in(self._config.directory, f"the measurements of step {step}"):
                append_step(self._config.directory, measurement)
        due = last or step % settings.checkpoint_every == 0
        written = self._save(step) if due else None
        try:
            self._report(measurement, written.path if written else None)
        except SystemExit:
            if written is None:
                self._save(step)  # asked to stop: the next start goes on from here
            raise
        if written is not None and processes.is_first():
            # Only now, since until the report the older one is what others know of.
            keep_newest(self._config.directory)

    def _save(self, step: int) -> Checkpoint:
        cost, states = self._clock.read(step), processes.gather(random_state())
        last = step == self._config.training.steps
        written = None
        if processes.is_first():
            written = write_checkpoint(
                self._config.directory,
                step,
                cost,
                lambda folder: self._fill(folder, states, last=last),
            )
        known = processes.from_first(written)
        assert known is not None, "the first process has written it, or has raised"
        self.checkpoint = known.path
        return known

    def _fill(self, folder: Path, states: Sequence[RandomState], *, last: bool) -> None:
        save_state(self._trainer, states, folder, last=last)
        self._state.prompts.save(folder)


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
