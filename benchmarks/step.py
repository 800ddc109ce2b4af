"""One training step of ours and of plain `trl.GRPOTrainer`, in CPU seconds on one thread.

Both train the embedded policy on the same prompts, 8 a step with 8 completions of at most 64
tokens, in float32 without checkpointing. TRL samples with Transformers. Rewards cost nothing on
both sides. Blocks of steps alternate, so that a noisy machine affects both. The floor is the
forward and backward pass of TRL's padded batch alone. A second comparison uses micro-batches of 8,
with the fast CPU sampler on both sides and without our packed forward pass. It measures padding
alone: micro-batches of similar lengths against TRL's shuffled ones. The last line is one JSON
object.

    python benchmarks/step.py [--small]
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial

import torch
from datasets import Dataset
from harness import run
from lookup_task import REWARDS
from paired_timing import Block, Stopwatch, alternate
from transformers import PrinterCallback, TrainerCallback
from transformers.utils import logging as transformers_logging
from trl import GRPOConfig, GRPOTrainer

from gdpo_tune.policies.load_policy import load_policy
from gdpo_tune.tasks.code import draw_code_problems
from gdpo_tune.training.micro_batches import MicroBatchTrainer
from gdpo_tune.training.rollout import sample_for_trainer
from gdpo_tune.training.trainer import GDPOTrainer

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")


PROMPTS, GROUP, TOKENS = 8, 8, 64
MICRO_BATCH = 8


class Padded(MicroBatchTrainer):
    """Trainer without the packed forward pass: each completion has its own copy of the prompt."""

    def _can_pack(self, model):
        return False


OURS = partial(GDPOTrainer, normalization="gdpo", rollout_func=sample_for_trainer)
BY_LENGTH = partial(Padded, rollout_func=sample_for_trainer)
SHUFFLED = partial(GRPOTrainer, rollout_func=sample_for_trainer)


class Timed(TrainerCallback):
    """Callback that reports every step to a stopwatch."""

    def __init__(self, watch: Stopwatch) -> None:
        self.watch = watch

    def on_log(self, args, state, control, logs=None, **_):
        """Record a step; the trainer calls this once more at the end, without a loss."""
        if logs is not None and "loss" in logs:
            self.watch.end_step(state.global_step, logs["completions/mean_length"])


def run_block(build: Callable[..., GRPOTrainer], steps: int, seed: int, at_once: int) -> Block:
    """Train a fresh trainer for a few steps and measure all but the first.

    Args:
        build: builds the trainer from TRL's arguments.
        steps: number of measured steps.
        seed: seed of the prompts and the samples.
        at_once: completions of a micro-batch.
    """
    watch = Stopwatch(steps, time.process_time)
    model, tokenizer = load_policy("embedded")
    problems = draw_code_problems("train", PROMPTS * watch.last, seed)
    data = Dataset.from_dict({"prompt": [problem.prompt for problem in problems]})
    with tempfile.TemporaryDirectory() as directory:
        arguments = GRPOConfig(
            output_dir=directory,
            seed=seed,
            max_steps=watch.last,
            per_device_train_batch_size=at_once,
            gradient_accumulation_steps=PROMPTS * GROUP // at_once,
            num_generations=GROUP,
            max_completion_length=TOKENS,
            learning_rate=1e-7,  # keeps the policy, and so the lengths, equal on both sides
            multi_objective_aggregation="normalize_then_sum",
            shuffle_dataset=False,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            dataloader_pin_memory=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_steps=1,
        )
        trainer = build(
            model=model,
            reward_funcs=REWARDS,
            args=arguments,
            train_dataset=data,
            processing_class=tokenizer,
            callbacks=[Timed(watch)],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return watch.build_block()


def measure_floor(steps: int, length: float) -> float:
    """Measure the CPU seconds of the forward and backward pass alone, padded as in TRL."""
    model, tokenizer = load_policy("embedded")
    problems = draw_code_problems("train", PROMPTS, 0)
    prompts = [problem.prompt for problem in problems for _ in range(GROUP)]
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    # A batch is as wide as its longest completion, which is nearly always a truncated one.
    tail = torch.randint(2, 500, (len(prompts), TOKENS))
    ids = torch.cat([batch["input_ids"], tail], dim=1)
    kept = (torch.arange(TOKENS) < length).expand(len(prompts), -1)
    mask = torch.cat([batch["attention_mask"], kept.long()], dim=1)
    times = []
    for _ in range(steps + 1):
        started = time.process_time()
        logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=TOKENS + 1).logits
        logits[:, :-1].log_softmax(-1).gather(2, tail[:, :, None]).sum().backward()
        times.append(time.process_time() - started)
    return statistics.median(times[1:])


def measure(blocks: int = 8, steps: int = 12):
    """Measure both trainers in turns, the floor, and both trainers in micro-batches."""

    def take_turns(ours, plain, at_once):
        def run(is_ours, seed):
            return run_block(ours if is_ours else plain, steps, seed, at_once)

        return alternate(run, blocks, 3 * blocks)

    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    pair = take_turns(OURS, GRPOTrainer, PROMPTS * GROUP)
    whole, parts = (
        one.build_figures("cpu_seconds")
        for one in (pair, take_turns(BY_LENGTH, SHUFFLED, MICRO_BATCH))
    )
    floor = round(measure_floor(steps, pair.plain.compute_length()), 4)
    for name, figures in (("whole batches", whole), (f"micro-batches of {MICRO_BATCH}", parts)):
        seconds = f"ours {figures['ours_cpu_seconds']} s, TRL {figures['trl_cpu_seconds']} s"
        print(f"{name}: {seconds}, ratio {figures['ratio']}")
    return {**whole, "floor_cpu_seconds": floor, "steps_per_block": steps, "micro_batches": parts}


if __name__ == "__main__":
    run(measure, {"blocks": 1, "steps": 4})
