"""The trainer of one trial: its prompts in their order, and the engine that samples for it."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import torch
from accelerate.utils import set_seed
from datasets import Dataset
from transformers import PrinterCallback

from gdpo_tune.core import task_files
from gdpo_tune.core.engines import choose, installed_vllm
from gdpo_tune.core.trials import TrialConfig
from gdpo_tune.training import ranks, vllm_engine
from gdpo_tune.training.evaluation import Generate
from gdpo_tune.training.held_out import held_out_sampler
from gdpo_tune.training.lora import adapter_config
from gdpo_tune.training.rollout import rollout, supports
from gdpo_tune.training.scoring import reward_functions
from gdpo_tune.training.shaping import shaping_of
from gdpo_tune.training.trainer import GDPOTrainer
from gdpo_tune.training.trl_arguments import (
    computes_in_bfloat16,
    prompts_per_step,
    trainer_arguments,
)
from gdpo_tune.training.warm import Warm


def build_trainer(config: TrialConfig, state: Warm) -> tuple[GDPOTrainer, Generate]:
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
        vllm=installed_vllm() if ranks.count() == 1 else None,
    )
    uses_vllm = engine == "vllm"
    asked = vllm_engine.arguments(config, model) if uses_vllm else {}
    arguments = trainer_arguments(config, state.task.rewards, asked)
    info = task_files.task_info(config.task, config.params)
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
    return trainer, held_out_sampler(config)


def training_order(problems: int, count: int, seed: int) -> list[int]:
    """Indices of the `count` prompts that a trial meets; each pass over them has its own order.

    Laid out in advance: a data loader that shuffles by itself starts another order when a trial is
    resumed after its first pass.
    """
    generator = np.random.default_rng(seed)
    passes = -(-count // problems)
    order = np.concatenate([generator.permutation(problems) for _ in range(passes)])
    return order[:count].tolist()
