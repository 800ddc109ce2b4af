"""State that the libraries keep once a process, of which each trial of a pack has its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accelerate.state import GradientState

from gdpo_tune.training.checkpoints import RandomState, read_random_state, restore_random_state


@dataclass(frozen=True)
class GlobalState:
    """Global state of one trial, as torch and accelerate keep it."""

    random: RandomState
    gradients: dict[str, Any]
    """Place in the accumulation of gradients, which all trainers of a process share."""


def read_global_state() -> GlobalState:
    """Return the present state."""
    return GlobalState(read_random_state(), dict(vars(GradientState())))


def restore_global_state(state: GlobalState) -> None:
    """Make a state the present one."""
    restore_random_state(state.random)
    shared = vars(GradientState())  # one dictionary, which every trainer's accelerator has
    shared.clear()
    shared.update(state.gradients)
