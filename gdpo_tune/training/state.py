"""What a trainer needs to go on bitwise equal, in the files that Transformers resumes from."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gdpo_tune.training.lora import has_adapter, save_merged
from gdpo_tune.training.trainer import GDPOTrainer

RandomState = dict[str, Any]
"""Where the generators of chance of one process stand."""


def save_state(
    trainer: GDPOTrainer,
    random_states: Sequence[RandomState],
    folder: Path,
    *,
    last: bool = False,
) -> None:
    """Write policy, tokenizer, optimizer, schedule, random states and counters into `folder`.

    The names are those that `Trainer.train(resume_from_checkpoint=...)` looks for. Of a policy with
    an adapter the adapter alone is written, and `last` has it merged.

    Args:
        trainer: in the middle of training.
        random_states: one a process of the trial, in the order of their ranks.
        folder: exists and is empty.
        last: whether training is at its end.
    """
    trained: Any = trainer  # TRL declares as optional what exists once training has begun
    model = trainer.policy
    if last and has_adapter(model):
        save_merged(model, folder)
    else:
        model.save_pretrained(folder)
    trained.processing_class.save_pretrained(folder)
    torch.save(trained.optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(trained.lr_scheduler.state_dict(), folder / "scheduler.pt")
    for rank, state in enumerate(random_states):
        name = "rng_state.pth" if len(random_states) == 1 else f"rng_state_{rank}.pth"
        torch.save(state, folder / name)
    trainer.state.save_to_json(str(folder / "trainer_state.json"))


def random_state() -> RandomState:
    """The state of this process."""
    states: RandomState = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.random.get_rng_state()
    return states
