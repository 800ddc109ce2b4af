"""One block of `gpu_step.py`: a few steps of one trainer on the prompts of a trial.

Ours is `gdpo_tune.training.train` itself, ended after the last counted step. TRL's is a plain
`GRPOTrainer` with the same policy, prompts, arguments and engine.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import nullcontext, suppress
from pathlib import Path

import torch
from alternation import Block, Stopwatch
from datasets import Dataset
from gpu_step_plan import Plan
from lookup_task import REWARDS
from step_parts import Timed
from transformers import PrinterCallback
from transformers.utils import logging as transformers_logging
from trl import GRPOTrainer

from gdpo_tune.core.prompt_order import order_prompts
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.training import train, vllm_engine
from gdpo_tune.training.trl_arguments import build_trainer_arguments, count_prompts_per_step
from gdpo_tune.training.worker_cache import open_worker_cache


class MeasuredError(Exception):
    """All counted steps are done."""


def run(plan: Plan, ours: bool, seed: int) -> Block:
    """Train a fresh trainer for a few steps and measure all but the first ones."""
    transformers_logging.disable_progress_bar()
    watch = Stopwatch(plan.steps, read_finish_time, plan.warm_up)
    with tempfile.TemporaryDirectory() as directory:
        config = plan.build_config(seed, Path(directory))
        (train_ours if ours else train_plain)(config, watch)
    if not torch.cuda.is_available():
        return watch.build_block()
    peak = torch.cuda.max_memory_allocated() / 2**20
    return watch.build_block(peak, torch.cuda.get_device_name())


def read_finish_time() -> float:
    """Wait until the GPU has finished its work and return the time."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def train_ours(config: TrialConfig, watch: Stopwatch) -> None:
    """Train the trial as a sweep runs it, without the final evaluation and checkpoint."""

    def report(measurement, checkpoint) -> None:
        watch.end_step(measurement.step, measurement.metrics["train/completions/mean_length"])
        if measurement.step == watch.last:
            raise MeasuredError

    with suppress(MeasuredError):
        train(config, resume=None, report=report)


def train_plain(config: TrialConfig, watch: Stopwatch) -> None:
    """Train TRL's trainer with its own GDPO on the same policy, prompts, arguments and engine."""
    torch.set_num_threads(config.threads)
    with open_worker_cache(config) as cache:
        problems = cache.load_split("train").problems
        order = order_prompts(
            len(problems), watch.last * count_prompts_per_step(config), config.seed
        )
        model = cache.take_policy()
        uses_vllm = config.rollout.engine == "vllm"
        engine = vllm_engine.build_engine_arguments(config, model) if uses_vllm else {}
        arguments = build_trainer_arguments(config, cache.task.rewards, engine)
        arguments.multi_objective_aggregation = "normalize_then_sum"
        arguments.max_steps = watch.last
        with vllm_engine.prepare_engine(config, model, arguments) if uses_vllm else nullcontext():
            trainer = GRPOTrainer(
                model=model,
                reward_funcs=REWARDS,
                args=arguments,
                train_dataset=Dataset.from_dict(
                    {"prompt": [cache.prompts.render(problems[row].prompt) for row in order]}
                ),
                processing_class=cache.tokenizer,
                callbacks=[Timed(watch)],
            )
        if uses_vllm:  # as TRL calls it, in the thread of the trainer
            trainer.vllm_generation.llm = trainer.vllm_generation.llm.llm
        trainer.remove_callback(PrinterCallback)
        trainer.train()
