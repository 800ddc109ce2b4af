"""The processes of one trial: how many there are, and what they tell one another.

Whoever launches several says so in the environment that `torch.distributed` reads (`RANK`,
`WORLD_SIZE`, ...); one alone needs nothing. Every process calls the functions here at the same
points of the trial.
"""

from __future__ import annotations

import os
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from torch import distributed

T = TypeVar("T")


def join() -> None:
    """Meet the other processes of this trial, if the environment speaks of any."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    PartialState(cpu=not torch.cuda.is_available())
    # On CPUs accelerate numbers the device, and torch would load nothing onto a "cpu:0", such as
    # the optimizer's state of a trial that goes on.
    torch.serialization.register_package(100, _no_tag, _on_numbered_cpu)


def count() -> int:
    """Processes of this trial."""
    return distributed.get_world_size() if _several() else 1


def rank() -> int:
    """Which of them this is, from 0."""
    return distributed.get_rank() if _several() else 0


def is_first() -> bool:
    """Whether this is the process that writes."""
    return rank() == 0


def gather(value: T) -> list[T]:
    """What each process gave, in the order of their ranks, for all of them."""
    if not _several():
        return [value]
    values: list[Any] = [None] * count()
    distributed.all_gather_object(values, value)
    return values


def from_first(value: T) -> T:
    """What the first process gave, for all of them; the others wait until it has it."""
    if not _several():
        return value
    values: list[Any] = [value if is_first() else None]
    distributed.broadcast_object_list(values)
    return values[0]


def _no_tag(storage: Any) -> None:
    """Leave naming the place of a storage to torch."""
    del storage


def _on_numbered_cpu(storage: Any, location: str) -> Any:
    """A storage that is to lie on a CPU as it is; None for other places."""
    return storage if location.startswith("cpu:") else None


def _several() -> bool:
    return distributed.is_available() and distributed.is_initialized()
