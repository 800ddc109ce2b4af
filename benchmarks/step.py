"""One training step of ours against plain `trl.GRPOTrainer`, in CPU seconds on one thread.

Both train the embedded policy on the same prompts, 8 a step with 8 completions of at most 64
tokens, in float32 without checkpointing; TRL samples with Transformers. Rewards are looked up on
both sides. Blocks of steps alternate, so that a noisy machine hits both. The floor is the forward
and backward pass of TRL's padded batch alone. The last line is one JSON object.

    python benchmarks/step.py [--small]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from alternation import Block, Stopwatch, alternate
from datasets import Dataset
from step_parts import REWARDS, Timed
from transformers import PrinterCallback
from transformers.utils import logging as transformers_logging
from trl import GRPOConfig, GRPOTrainer

from gdpo_tune.policies.load import load_policy
from gdpo_tune.tasks.code_problems import generate
from gdpo_tune.training.rollout import rollout
from gdpo_tune.training.trainer import GDPOTrainer

PROMPTS, GROUP, TOKENS = 8, 8, 64


def block(ours: bool, steps: int, seed: int) -> Block:
    """Train a fresh trainer for a few steps and measure all but the first."""
    watch = Stopwatch(steps, time.process_time)
    model, tokenizer = load_policy("embedded")
    problems = generate("train", PROMPTS * watch.last, seed)
    data = Dataset.from_dict({"prompt": [problem.prompt for problem in problems]})
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder,
            seed=seed,
            max_steps=watch.last,
            per_device_train_batch_size=PROMPTS * GROUP,
            num_generations=GROUP,
            max_completion_length=TOKENS,
            learning_rate=1e-7,  # so that both sides keep the same policy, hence the same lengths
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
        common = {
            "model": model,
            "reward_funcs": REWARDS,
            "args": arguments,
            "train_dataset": data,
            "processing_class": tokenizer,
            "callbacks": [Timed(watch)],
        }
        if ours:
            trainer = GDPOTrainer(normalization="gdpo", rollout_func=rollout, **common)
        else:
            trainer = GRPOTrainer(**common)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return watch.block()


def floor(steps: int, length: float) -> float:
    """CPU seconds of the forward and backward pass alone, padded as TRL pads."""
    model, tokenizer = load_policy("embedded")
    problems = generate("train", PROMPTS, 0)
    prompts = [problem.prompt for problem in problems for _ in range(GROUP)]
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    # A batch is as wide as its longest completion, which nearly always is one that was cut.
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


def measure(blocks: int, steps: int) -> dict[str, object]:
    """Both trainers in turns, and the floor."""
    pair = alternate(lambda ours, seed: block(ours, steps, seed), blocks, 3 * blocks)
    return {
        **pair.figures("cpu_seconds"),
        "floor_cpu_seconds": round(floor(steps, pair.plain.length()), 4),
        "steps_per_block": steps,
    }


def main() -> None:
    """Measure, print a line of text and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="seconds instead of minutes")
    small = parser.parse_args().small
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    result = measure(blocks=2, steps=4) if small else measure(blocks=8, steps=12)
    print(
        f"ours {result['ours_cpu_seconds']} s, TRL {result['trl_cpu_seconds']} s, "
        f"floor {result['floor_cpu_seconds']} s a step: ratio {result['ratio']}"
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
