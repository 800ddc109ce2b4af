"""One trial: `train(config)` trains a policy with GDPO, then evaluates it on held-out prompts.

A plain function that knows neither Ray nor Optuna. Equal configs give bitwise equal metrics on a
CPU, in a fresh process or a reused one, uninterrupted or resumed.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from gdpo_tune.core import task_files
from gdpo_tune.core.trials import Cost, Outcome, Report, TrialConfig
from gdpo_tune.policies.load_policy import load_policy
from gdpo_tune.training import ranks, vllm_engine
from gdpo_tune.training.build import build_trainer
from gdpo_tune.training.checkpoints import read_checkpoint
from gdpo_tune.training.exhaustion import memory_guard
from gdpo_tune.training.held_out import evaluate_split, evaluate_test, held_out_sampler
from gdpo_tune.training.lora import with_adapter
from gdpo_tune.training.moving_parameters import Schedule
from gdpo_tune.training.step_end import Clock, Progress, say_again
from gdpo_tune.training.warm import Warm, warm


def train(config: TrialConfig, *, resume: Path | None, report: Report) -> Outcome:
    """Run one trial to its end.

    Writes `steps.jsonl`, `completions.jsonl` and checkpoints to `config.directory`; during training
    the two newest checkpoints stay. `report` is called once a step, with the checkpoint's folder if
    one was just written; it may end the trial by raising. `SystemExit` passes through once a
    checkpoint of the step just done is on disk.

    A start from a checkpoint at whose step an evaluation had taken place reports that measurement
    again, without step metrics: whoever was to hear of it may have been killed in between.

    Several processes that were launched as one group (see `processes`) train one policy together:
    each calls this with the same arguments, samples and scores its part of every step and of every
    held-out split, and gets the same outcome. The first one writes. `report` is called in all of
    them and has to raise `SystemExit` in all or none.

    Step metrics are `train/loss`, `train/grad_norm`, `train/learning_rate`, `train/entropy`,
    `train/mean_length` (tokens), `train/reward/<name>/mean|std|dead_groups|share` (see
    `GDPOTrainer`), `train/kl` where beta is above 0, `train/clip_ratio`, and `validation/<metric>`
    every `evaluate_every` steps, at `evaluate_at` and at the last one; with vLLM also
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
    ranks.join()
    vllm_engine.limit_gpu_memory(config.gpu_share)
    # Bars and notes about every checkpoint would land in whoever's display it is.
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("trl").setLevel(logging.ERROR)
    with memory_guard(config), warm(config) as state:
        if not config.train:
            return _untrained(config, state)
        start = None if resume is None else read_checkpoint(resume)
        clock = Clock(Cost() if start is None else start.cost, config)
        sampler = held_out_sampler(config)
        if start is not None and start.step >= config.training.steps:
            say_again(start, report)
            model = _placed(_trained_policy(config, state, start.path))
            steps = config.training.steps
            validation = evaluate_split(config, state, model, state.validation(), steps, sampler)
            checkpoint = start.path
        else:
            trainer, sampler = build_trainer(config, state)
            if config.schedule:
                trainer.add_callback(Schedule(config, state.task.rewards, trainer))
            progress = Progress(config, state, trainer, sampler, clock, report, start)
            trainer.add_callback(progress)
            trainer.train(resume_from_checkpoint=None if start is None else str(start.path))
            model = trainer.policy
            validation, checkpoint = progress.validation, progress.checkpoint
        test = evaluate_test(config, state, model, config.training.steps, sampler)
        return Outcome(
            validation=validation,
            test=test,
            cost=clock.read(config.training.steps),
            checkpoint=checkpoint,
            environment={**state.environment(), **task_files.provenance(config.task)},
        )


def _untrained(config: TrialConfig, state: Warm) -> Outcome:
    clock = Clock(Cost(), config)
    model = _placed(state.fresh_policy())
    sampler = held_out_sampler(config)
    return Outcome(
        validation=evaluate_split(config, state, model, state.validation(), 0, sampler),
        test=evaluate_test(config, state, model, 0, sampler),
        cost=clock.read(0),
        checkpoint=None,
        environment={**state.environment(), **task_files.provenance(config.task)},
    )


def _trained_policy(config: TrialConfig, state: Warm, checkpoint: Path) -> PreTrainedModel:
    """What a training that is over left behind, as it was in memory."""
    if not config.model.lora_rank:
        return load_policy(str(checkpoint))[0]
    return with_adapter(state.fresh_policy(), checkpoint)


def _placed(model: PreTrainedModel) -> PreTrainedModel:
    network: Any = model
    return network.to("cuda") if torch.cuda.is_available() else model
