"""Random states of a trial's processes, in the files of a checkpoint."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed
from torch import Tensor
from transformers.trainer_pt_utils import safe_globals

from gdpo_tune.training import distributed

RandomState = dict[str, Any]
"""States of the random generators of one process: `python`, `numpy`, `cpu`, and where there is a
GPU `cuda`, a list of one state for each GPU that the process sees."""


def read_random_state() -> RandomState:
    """Return the states of all generators of this process."""
    states: RandomState = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.random.get_rng_state_all()
    return states


def save_random_states(states: Sequence[RandomState], checkpoint: Path) -> None:
    """Write the state of each process, in the order of their ranks."""
    for rank, state in enumerate(states):
        torch.save(state, checkpoint / _name_file(rank, len(states)))


def load_random_state(checkpoint: Path, seed: int) -> None:
    """Restore the state of this process.

    A training with another number of processes has no state of its own there. Trial's seed,
    checkpoint and rank then decide the state, so that no draws of earlier steps come again.
    """
    rank, processes = distributed.get_rank(), distributed.count_processes()
    if len(list(checkpoint.glob(_name_file(None, processes)))) != processes:
        text = f"{seed}/{checkpoint.name}/{rank}/{processes}"
        set_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big"))
        return
    file = checkpoint / _name_file(rank, processes)
    with safe_globals():  # NumPy's state holds an array
        states: RandomState = torch.load(file, weights_only=True)
    restore_random_state(states)


def restore_random_state(states: RandomState) -> None:
    """Make these the states of the generators of this process."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.random.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        saved = states["cuda"]
        if isinstance(saved, Tensor):  # an earlier version saved the current GPU alone
            torch.cuda.random.set_rng_state(saved)
            return
        for device, state in zip(range(torch.cuda.device_count()), saved, strict=False):
            torch.cuda.random.set_rng_state(state, device)


def _name_file(rank: int | None, processes: int) -> str:
    """Return the name of a process's file; of no rank a pattern of the names of all."""
    return "rng_state.pth" if processes == 1 else f"rng_state_{'*' if rank is None else rank}.pth"
