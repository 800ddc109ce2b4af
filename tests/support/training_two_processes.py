"""Script of `tests/training/test_processes.py`, which runs it as one process and as two.

Every process scores its part of one generation batch, in which a group straddles the processes, and
rank 0 writes everyone's advantages for each mode.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import torch
from datasets import Dataset
from trl import GRPOConfig

from gdpo_tune.core.registry import NORMALIZATIONS
from gdpo_tune.policies.load_policy import load_policy
from gdpo_tune.training.trainer import GDPOTrainer

ROWS, GROUP = 24, 8


def draw_column(seed: int, missing: int):
    values = (6 * torch.rand(ROWS, generator=torch.Generator().manual_seed(seed)) - 3).tolist()
    values[GROUP : 2 * GROUP] = [0.7] * GROUP  # the group in the middle is dead in this reward
    return [None if row == missing else value for row, value in enumerate(values)]


TABLE = {"one": draw_column(1, missing=3), "two": draw_column(2, missing=21)}
TABLE["two"][9] = 1.9


def build_reward(name: str):
    def look_up(row, **_):
        return [TABLE[name][index] for index in row]

    look_up.__name__ = name
    return look_up


def build_trainer(mode: str, directory: str) -> GDPOTrainer:
    model, tokenizer = load_policy("embedded")
    arguments = GRPOConfig(
        output_dir=directory,
        per_device_train_batch_size=ROWS // PROCESSES,
        num_generations=GROUP,
        reward_weights=[1.0, 0.3],
        max_completion_length=2,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    return GDPOTrainer(
        normalization=mode,
        reward_funcs=[build_reward("one"), build_reward("two")],
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["f"] * ROWS}),
        processing_class=tokenizer,
    )


def main(processes: int, directory: str) -> None:
    """Write `advantages-<processes>.json`: mode -> 24 advantages."""
    result = {}
    for mode in NORMALIZATIONS:
        trainer = build_trainer(mode, directory)
        trainer.model.train()
        count = ROWS // processes
        first = trainer.accelerator.process_index * count
        rows = [{"prompt": "f", "row": row} for row in range(first, first + count)]
        part = trainer._generate_and_score_completions(rows)["advantages"]
        assert trainer.accelerator.num_processes == processes
        result[mode] = trainer.accelerator.gather(part).tolist()
        assert all(math.isfinite(value) for value in result[mode])
    if trainer.accelerator.is_main_process:
        Path(directory, f"advantages-{processes}.json").write_text(json.dumps(result))
    trainer.accelerator.wait_for_everyone()
    # Ends the process group, whose threads sometimes abort at the interpreter's exit.
    trainer.accelerator.end_training()


if __name__ == "__main__":
    PROCESSES = int(sys.argv[1])
    main(PROCESSES, sys.argv[2])
