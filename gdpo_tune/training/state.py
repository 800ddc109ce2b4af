"""What a trainer needs to go on bitwise equal, in the files that Transformers resumes from."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gdpo_tune.training.trainer import GDPOTrainer


def save_state(trainer: GDPOTrainer, folder: Path) -> None:
    """Write policy, tokenizer, optimizer, schedule, random states and counters into `folder`.

    The names are those that `Trainer.train(resume_from_checkpoint=...)` looks for.
    """
    trained: Any = trainer  # TRL declares as optional what exists once training has begun
    trained.accelerator.unwrap_model(trained.model).save_pretrained(folder)
    trained.processing_class.save_pretrained(folder)
    torch.save(trained.optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(trained.lr_scheduler.state_dict(), folder / "scheduler.pt")
    torch.save(_random_states(), folder / "rng_state.pth")
    trainer.state.save_to_json(str(folder / "trainer_state.json"))


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.random.get_rng_state()
    return states
