"""The trainer of one trial: its prompts in their order, rewards, engine and schedule."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import set_seed
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback

from gdpo_tune.core import task_files
from gdpo_tune.core.parameters import build_shaping
from gdpo_tune.core.task_info import order_prompts
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.core.trials import Params
from gdpo_tune.training import colocated_engine, rollout, vllm_engine
from gdpo_tune.training.distributed import prepare_sharding
from gdpo_tune.training.evaluation import build_early_judging, build_reward_functions
from gdpo_tune.training.lora import build_adapter_config
from gdpo_tune.training.self_check import check_first_batch
from gdpo_tune.training.trainer import GDPOTrainer
from gdpo_tune.training.trl_arguments import build_trainer_arguments, count_prompts_per_step
from gdpo_tune.training.worker_cache import WorkerCache


def build_trainer(config: TrialConfig, cache: WorkerCache) -> tuple[GDPOTrainer, rollout.Generate]:
    """Build the trainer, and the sampler of held-out completions during and after training."""
    problems = cache.load_split("train").problems
    count = config.training.steps * count_prompts_per_step(config)
    order = order_prompts(len(problems), count, config.seed)
    data = Dataset.from_dict({"prompt": [problems[i].prompt for i in order], "problem": order})
    model = cache.take_policy()
    adapter = build_adapter_config(model, config.model, config.policy)
    engine = rollout.choose_engine(config, model)
    uses_vllm = engine == "vllm"
    for_engine = vllm_engine.build_engine_arguments(config, model) if uses_vllm else {}
    arguments = build_trainer_arguments(config, cache.task.rewards, for_engine)
    info = task_files.load_task_info(config.task, config.params)
    shaping = build_shaping(config.params, config.training, info)
    # A new adapter draws random numbers before TRL sets its own seed.
    set_seed(config.seed)
    preparing = (
        vllm_engine.prepare_engine(config, model, arguments, cache.initial, cache.engines)
        if uses_vllm
        else nullcontext()
    )
    with preparing, prepare_sharding() if config.sharded else nullcontext():
        trainer = GDPOTrainer(
            normalization=str(config.params["normalization"]),
            gamma=float(config.params["gamma"]),
            baseline=str(config.params["baseline"]),
            ranges=[info.rewards[name] for name in cache.task.rewards],
            reward_funcs=build_reward_functions(cache.task, problems, shaping),
            model=model,
            args=arguments,
            train_dataset=data,
            processing_class=cache.tokenizer,
            peft_config=adapter,
            encode=cache.encode_prompts,
            begin_judging=build_early_judging(cache.task, problems),
            check_batch=functools.partial(check_first_batch, dropout=config.model.dropout),
            rollout_func=rollout.sample_for_trainer if engine == "lean" else None,
        )
    trainer.remove_callback(PrinterCallback)
    if config.schedule:
        trainer.add_callback(MovingParameters(config, cache.task.rewards, trainer))
    if uses_vllm and config.rollout.vllm_mode == "colocate":
        colocated = colocated_engine.ColocatedEngine(trainer, sleeps=config.rollout.sleep)
        return trainer, colocated.generate
    if uses_vllm:
        colocated_engine.name_engine_failures(trainer)
    return trainer, rollout.choose_held_out_sampler(config)


@dataclass(eq=False)
class MovingParameters(TrainerCallback):
    """Callback that sets reward weights and learning rate at the beginning of a step.

    The values come from `TrialConfig.schedule` alone and never from a checkpoint. So a trial is
    bitwise equal to an uninterrupted one if it resumes from its own checkpoint, or from one of a
    training that had the same values until then.
    """

    config: TrialConfig
    rewards: Sequence[str]
    """Names in the order of the trainer's weights."""
    trainer: GDPOTrainer
    current: Params | None = None
    """Parameters that were set last; None: those of the trainer's arguments or of a checkpoint."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Set the parameters before an optimizer step; the first one of a step samples."""
        step = state.global_step // self.trainer.updates_per_step
        params = self.config.get_params_at(step)
        if params == self.current:
            return
        weights = self.config.get_reward_weights(step)
        self.trainer.reward_weights = torch.tensor(
            [weights[name] for name in self.rewards], dtype=self.trainer.reward_weights.dtype
        )
        # The peak of the learning rate changes; its shape over the steps stays.
        peak = float(params["learning_rate"])
        trained: Any = self.trainer  # TRL declares as optional what exists during training
        scheduler = trained.lr_scheduler
        # As LambdaLR computes it, so that the same value gives the same bits.
        rates = [peak * shape(scheduler.last_epoch) for shape in scheduler.lr_lambdas]
        scheduler.load_state_dict(
            {**scheduler.state_dict(), "base_lrs": [peak] * len(rates), "_last_lr": list(rates)}
        )
        for group, rate in zip(trained.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):  # of an optimizer that torch compiles
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self.current = params
