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
import zlib
from dataclasses import dataclass, field

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from transformers.utils import logging as transformers_logging
from trl import GRPOConfig, GRPOTrainer

from gdpo_tune.policies.load import load_policy
from gdpo_tune.tasks.code_problems import generate
from gdpo_tune.training.rollout import rollout
from gdpo_tune.training.trainer import GDPOTrainer

PROMPTS, GROUP, TOKENS = 8, 8, 64
WARM_UP = 1
"""Steps of a block that are not counted."""
LENGTH_TOLERANCE = 0.02


@dataclass
class Side:
    """What was measured of one of the two trainers."""

    seconds: list[float] = field(default_factory=list)
    """CPU seconds a step, one entry a block."""
    lengths: list[float] = field(default_factory=list)
    """Mean tokens of a completion, one entry a counted step."""

    def length(self) -> float:
        """Mean tokens over all counted steps."""
        return statistics.fmean(self.lengths)


class Stopwatch(TrainerCallback):
    """CPU time and completion lengths of the steps after the first."""

    def __init__(self, side: Side) -> None:
        self.side = side

    def on_log(self, args, state, control, logs=None, **_):
        """Called once a step, and once more at the end without a loss."""
        if logs is None or "loss" not in logs:
            return
        now = time.process_time()
        if state.global_step == WARM_UP:
            self.started = now
            return
        self.side.lengths.append(logs["completions/mean_length"])
        if state.global_step == state.max_steps:
            self.side.seconds.append((now - self.started) / (state.max_steps - WARM_UP))


def lookup(name: str):
    """A reward that costs nothing: 0 or 1 from the prompt's and completion's bytes."""

    def reward(prompts, completions, **_):
        return [
            float(zlib.crc32(f"{name}{prompt}{text}".encode()) & 1)
            for prompt, text in zip(prompts, completions, strict=True)
        ]

    reward.__name__ = name
    return reward


def block(ours: bool, steps: int, seed: int, side: Side) -> None:
    """Train a fresh trainer for a few steps and measure all but the first."""
    model, tokenizer = load_policy("embedded")
    problems = generate("train", PROMPTS * (steps + WARM_UP), seed)
    data = Dataset.from_dict({"prompt": [problem.prompt for problem in problems]})
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder,
            seed=seed,
            max_steps=steps + WARM_UP,
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
            "reward_funcs": [lookup("correctness"), lookup("format"), lookup("length")],
            "args": arguments,
            "train_dataset": data,
            "processing_class": tokenizer,
            "callbacks": [Stopwatch(side)],
        }
        if ours:
            trainer = GDPOTrainer(normalization="gdpo", rollout_func=rollout, **common)
        else:
            trainer = GRPOTrainer(**common)
        trainer.remove_callback(PrinterCallback)
        trainer.train()


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
    """Alternate until both sides wrote completions of the same length."""
    ours, plain = Side(), Side()
    for seed in range(3 * blocks):
        order = [(True, ours), (False, plain)]
        for is_ours, side in order if seed % 2 else reversed(order):
            block(is_ours, steps, seed, side)
        apart = abs(ours.length() / plain.length() - 1)
        if seed + 1 >= blocks and apart <= LENGTH_TOLERANCE:
            break
    ratios = [a / b for a, b in zip(ours.seconds, plain.seconds, strict=True)]
    return {
        "ratio": round(statistics.median(ratios), 3),
        "ratio_low": round(min(ratios), 3),
        "ratio_high": round(max(ratios), 3),
        "ours_cpu_seconds": round(statistics.median(ours.seconds), 4),
        "trl_cpu_seconds": round(statistics.median(plain.seconds), 4),
        "floor_cpu_seconds": round(floor(steps, plain.length()), 4),
        "ours_mean_length": round(ours.length(), 2),
        "trl_mean_length": round(plain.length(), 2),
        "lengths_apart": round(apart, 4),
        "blocks": len(ratios),
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
