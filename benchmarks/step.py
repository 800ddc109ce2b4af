"""One training step of ours and of plain `trl.GRPOTrainer`, in CPU seconds on one thread.

    python benchmarks/step.py [--small]

Both train the embedded policy on the same prompts, 8 a step with 8 completions of at most 64
tokens, in float32 without checkpointing. TRL samples with Transformers; rewards cost nothing.
Blocks of steps alternate, so that a noisy machine affects both. The floor is the forward and
backward pass of TRL's padded batch alone. A second comparison uses micro-batches of 8, with the
fast CPU sampler on both sides and without our packed forward pass: it measures micro-batches of
similar lengths against TRL's shuffled ones.

    python benchmarks/step.py --policy DIRECTORY [--prompt 104] [--tokens 40] [--group 8]
                              [--completions 32] [--precisions float32 bfloat16] [--at-once 0]

Both train LoRA adapters of a policy of Transformers, in float32 and in bfloat16, each in a process
of its own; the better of TRL's two counts. Prompts are random words, cut at `--prompt` tokens. TRL
computes `--at-once` completions in a micro-batch, 0 for all, and ours all. Peak memory is that of
the whole process.

    OMP_NUM_THREADS=1 python benchmarks/step.py --policy DIRECTORY --engine vllm [...]

Both sample with vLLM, here a build for CPUs, after short prompts. TRL's policy reads all tokens
twice in a step, before the loss to weight what vLLM sampled and for the loss. Ours is measured as
it is, which keeps the first pass, and `ours_twice` without that. On a CPU, TRL cannot send its
weights to vLLM, and the time of that is left out for TRL alone. The last line is JSON.
"""

from __future__ import annotations

import os
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from harness import call_apart, print_table, run
from lookup_task import REWARDS
from paired_timing import Block, Plan, Stopwatch, alternate, compute_length
from transformers import PrinterCallback, TrainerCallback
from transformers.utils import logging as transformers_logging
from trl import GRPOConfig, GRPOTrainer

from gdpo_tune.core.settings import ModelSettings
from gdpo_tune.core.task_info import order_prompts
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.policies.load_policy import load_policy
from gdpo_tune.tasks.code import draw_code_problems
from gdpo_tune.training import train, vllm_engine
from gdpo_tune.training.lora import build_adapter_config
from gdpo_tune.training.memory import MicroBatchLimit
from gdpo_tune.training.micro_batches import MicroBatchTrainer
from gdpo_tune.training.rollout import sample_for_trainer
from gdpo_tune.training.trainer import GDPOTrainer
from gdpo_tune.training.trl_arguments import build_trainer_arguments, count_prompts_per_step
from gdpo_tune.training.worker_cache import open_worker_cache

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")


PROMPTS, GROUP, TOKENS = 8, 8, 64
MICRO_BATCH = 8


class Padded(MicroBatchTrainer):
    """Trainer that pads: each completion has its own copy of the prompt."""

    def _can_pack(self, model):
        return False


OURS = partial(GDPOTrainer, normalization="gdpo", rollout_func=sample_for_trainer)
BY_LENGTH = partial(
    Padded,
    rollout_func=sample_for_trainer,
    shared_prompts="off",
    limit=MicroBatchLimit(MICRO_BATCH),
)
SHUFFLED = partial(GRPOTrainer, rollout_func=sample_for_trainer)


class Timed(TrainerCallback):
    """Callback that reports every step to a stopwatch."""

    def __init__(self, watch: Stopwatch) -> None:
        self.watch = watch

    def on_log(self, args, state, control, logs=None, **_):
        """Record a step; the trainer calls this once more at the end, without a loss."""
        if logs is not None and "loss" in logs:
            self.watch.end_step(state.global_step, logs["completions/mean_length"])


def train_timed(
    build: Callable[..., GRPOTrainer],
    policy: tuple[Any, Any],
    prompts: list[str],
    steps: int,
    settings: Mapping[str, Any],
    **others: Any,
) -> Block:
    """Train a fresh trainer for `steps` measured steps, after one that is not.

    `policy` is a model with its tokenizer, and there is a prompt for each group, step by step;
    `settings` are fields of TRL's configuration, `others` arguments of the trainer.
    """
    watch = Stopwatch(steps, time.process_time)
    with tempfile.TemporaryDirectory() as directory:
        arguments = GRPOConfig(
            output_dir=directory,
            max_steps=watch.last,
            learning_rate=1e-7,  # keeps the policy, and so the lengths, equal on both sides
            shuffle_dataset=False,
            gradient_checkpointing=False,
            use_cpu=True,
            dataloader_pin_memory=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_steps=1,
            **settings,
        )
        trainer = build(
            model=policy[0],
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=policy[1],
            callbacks=[Timed(watch)],
            **others,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return watch.build_block()


def build_sizes(completions: int, at_once: int, group: int, tokens: int) -> dict[str, Any]:
    """Build the fields for a step of so many completions, `at_once` in a micro-batch."""
    return {
        "per_device_train_batch_size": at_once,
        "gradient_accumulation_steps": completions // at_once,
        "num_generations": group,
        "max_completion_length": tokens,
    }


def run_block(build: Callable[..., GRPOTrainer], steps: int, seed: int, at_once: int) -> Block:
    """Time steps of the embedded policy; `seed` is that of the prompts and the samples."""
    problems = draw_code_problems("train", PROMPTS * (steps + 1), seed)
    settings = {
        **build_sizes(PROMPTS * GROUP, at_once, GROUP, TOKENS),
        "seed": seed,
        "bf16": False,
        "multi_objective_aggregation": "normalize_then_sum",
    }
    prompts = [problem.prompt for problem in problems]
    policy = load_policy("embedded")
    return train_timed(build, policy, prompts, steps, settings, reward_funcs=REWARDS)


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


def run_policy(
    policy: str,
    is_ours: bool,
    bfloat16: bool,
    steps: int,
    prompt: int,
    tokens: int,
    group: int,
    completions: int,
    at_once: int,
) -> dict[str, float]:
    """Train adapters for a few steps, after one that is not measured; options as of `measure`."""
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    model, tokenizer = load_policy(policy, torch.bfloat16 if bfloat16 else torch.float32)
    chance = random.Random(0)
    words = [f"{letter}{vowel}t" for letter in "bcdfghlmnprst" for vowel in "aeiou"]
    prompts: list[str] = []
    for _ in range(completions // group * (steps + 1)):
        text = " ".join(chance.choices(words, k=prompt))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][:prompt]
        prompts.append(tokenizer.decode(ids))
    part = (not is_ours and at_once) or completions
    block = train_timed(
        OURS if is_ours else GRPOTrainer,
        (model, tokenizer),
        prompts,
        steps,
        {**build_sizes(completions, part, group, tokens), "bf16": bfloat16},
        reward_funcs=[count_vowels],
        peft_config=build_adapter_config(model, ModelSettings(lora_rank=16), policy),
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"cpu_seconds": round(block.seconds, 2), "peak_gib": round(peak, 2)}


class MeasuredError(Exception):
    """All counted steps are done."""


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
        adapter = build_adapter_config(model, config.model, config.policy)
        # TRL merges an adapter into the weights that it sends, so its engine has no place for one.
        whole = replace(config, model=config.model.replace(lora_rank=0))
        with vllm_engine.prepare_engine(whole, model, arguments) if uses_vllm else nullcontext():
            trainer = GRPOTrainer(
                model=model,
                reward_funcs=REWARDS,
                args=arguments,
                train_dataset=Dataset.from_dict(
                    {"prompt": [cache.prompts.render(problems[row].prompt) for row in order]}
                ),
                processing_class=cache.tokenizer,
                peft_config=adapter,
                callbacks=[Timed(watch)],
            )
        if uses_vllm:  # as TRL calls it, in the thread of the trainer
            trainer.vllm_generation.llm = trainer.vllm_generation.llm.llm
            if not torch.cuda.is_available():
                # Its own ends in an error on a CPU: vLLM computes with rearranged copies there.
                trainer.vllm_generation.sync_weights = lambda: None
        trainer.remove_callback(PrinterCallback)
        trainer.train()


class CountingWatch:
    """CPU seconds, and tokens that the policy of a trainer reads, of the same steps."""

    def __init__(self, steps: int) -> None:
        self._read = 0
        self.cpu = Stopwatch(steps, time.process_time)
        self.tokens = Stopwatch(steps, lambda: self._read)
        self.last = self.cpu.last

    def end_step(self, step: int, mean_length: float) -> None:
        """Record a step, as `Stopwatch` does."""
        self.cpu.end_step(step, mean_length)
        self.tokens.end_step(step, mean_length)

    def note_read(self, module, inputs) -> None:
        """Count the tokens of a forward pass, before its embedding; vLLM has one of its own."""
        if isinstance(module, torch.nn.Embedding):
            self._read += inputs[0].numel()


def run_with_vllm(plan: Plan, side: str) -> dict[str, float]:
    """Train a few steps with vLLM: `ours`, `ours_twice` or `trl`."""
    transformers_logging.disable_progress_bar()
    watch = CountingWatch(plan.steps)
    if side == "ours_twice":
        MicroBatchTrainer._weights_samples = False
    hook = torch.nn.modules.module.register_module_forward_pre_hook(watch.note_read)
    with tempfile.TemporaryDirectory() as directory, hook:
        config = plan.build_config(0, Path(directory))
        (train_plain if side == "trl" else train_ours)(config, watch)
    block = watch.cpu.build_block()
    return {
        "cpu_seconds": round(block.seconds, 2),
        "tokens_read": round(watch.tokens.build_block().seconds),
        "mean_length": round(statistics.fmean(block.lengths), 1),
    }


def measure_with_vllm(
    policy: str, precision: str, steps: int, group: int, completions: int, tokens: int
):
    """Measure both trainers with vLLM, each in a process of its own."""
    model = ModelSettings(lora_rank=16, dtype=precision)
    plan = Plan(policy, "vllm", completions // group, group, tokens, steps, 1, 1, model)
    found: dict[str, dict[str, float]] = {}
    for side in ("ours", "ours_twice", "trl"):
        found[side] = call_apart(run_with_vllm, plan, side)
        print(f"{side}: {found[side]}", flush=True)
    ratio = found["ours"]["cpu_seconds"] / found["trl"]["cpu_seconds"]
    return {"precision": precision, **found, "ratio": round(ratio, 3)}


def count_vowels(completions, **_):
    """Score texts, so that groups have advantages."""
    return [float(sum(c in "aeiou" for c in text)) for text in completions]


def measure_policy(policy: str, precisions: list[str], steps: int, **sizes: int):
    """Measure both trainers in each precision."""
    found: dict[str, dict[str, float]] = {}
    for is_ours, precision in product((True, False), precisions):
        name = f"{'ours' if is_ours else 'trl'}_{precision}"
        options = (is_ours, precision == "bfloat16", steps, *sizes.values())
        found[name] = call_apart(run_policy, policy, *options)
        print(f"{name}: {found[name]}", flush=True)
    best = [
        min(row["cpu_seconds"] for name, row in found.items() if name.startswith(side))
        for side in ("ours", "trl")
    ]
    return {**sizes, **found, "ratio": round(best[0] / best[1], 3)}


def measure(
    blocks: int = 8,
    steps: int = 12,
    policy: str = "",
    prompt: int = 104,
    tokens: int = 40,
    group: int = 8,
    completions: int = 32,
    at_once: int = 0,
    precisions: list[str] = ["float32", "bfloat16"],
    engine: str = "transformers",
):
    """Measure both trainers in turns, the floor, and both trainers in micro-batches."""
    if engine == "vllm":
        rows = [
            measure_with_vllm(policy or "embedded", precision, steps, group, completions, tokens)
            for precision in precisions
        ]
        return {"tokens": tokens, "group": group, "completions": completions, "rows": rows}
    if policy:
        sizes = {"prompt": prompt, "tokens": tokens, "group": group}
        sizes |= {"completions": completions, "at_once": at_once}
        return measure_policy(policy, precisions, min(steps, 3), **sizes)

    def take_turns(ours, plain, at_once):
        def run(is_ours, seed):  # ours gets whole steps and divides them itself
            size = PROMPTS * GROUP if is_ours else at_once
            return run_block(ours if is_ours else plain, steps, seed, size)

        return alternate(run, blocks, 3 * blocks)

    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    pair = take_turns(OURS, GRPOTrainer, PROMPTS * GROUP)
    whole = pair.build_figures("cpu_seconds")
    parts = take_turns(BY_LENGTH, SHUFFLED, MICRO_BATCH).build_figures("cpu_seconds")
    floor = round(measure_floor(steps, compute_length(pair.plain)), 4)
    print_table(("", *whole), ("whole", *whole.values()), ("micro-batches", *parts.values()))
    return {**whole, "floor_cpu_seconds": floor, "steps_per_block": steps, "micro_batches": parts}


if __name__ == "__main__":
    run(measure, {"blocks": 1, "steps": 2})
