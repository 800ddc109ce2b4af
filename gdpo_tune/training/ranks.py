"""Processes of one trial: how many there are, and what they exchange.

The launcher describes several processes in the environment variables that `torch.distributed`
reads (`RANK`, `WORLD_SIZE`, ...); a single process needs none. Every process calls the functions
here at the same points of the trial.
"""

from __future__ import annotations

import os
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from torch import distributed

from gdpo_tune.core.system import clear_rendezvous

T = TypeVar("T")


def join_process_group() -> None:
    """Join the other processes of this trial, if the environment names any."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        clear_rendezvous()
        return
    PartialState(cpu=not torch.cuda.is_available())
    # Accelerate numbers the CPU, and torch loads no file onto a "cpu:0". Both functions have names,
    # because torch sorts what is registered and cannot order different lambdas.
    torch.serialization.register_package(100, _ignore_storage, _keep_on_cpu)


def count_processes() -> int:
    """Return the number of processes of this trial."""
    return distributed.get_world_size() if _is_distributed() else 1


def get_rank() -> int:
    """Return the number of this process, from 0."""
    return distributed.get_rank() if _is_distributed() else 0


def is_first() -> bool:
    """Return whether this is the process that writes."""
    return get_rank() == 0


def gather(value: T) -> list[T]:
    """Return the `value` of every process, in the order of their ranks, to all of them."""
    if not _is_distributed():
        return [value]
    values: list[Any] = [None] * count_processes()
    distributed.all_gather_object(values, value)
    return values


def broadcast_from_first(value: T) -> T:
    """Return the `value` of the first process to all of them; the others wait for it."""
    if not _is_distributed():
        return value
    values: list[Any] = [value if is_first() else None]
    distributed.broadcast_object_list(values)
    return values[0]


def _ignore_storage(storage: Any) -> None:
    del storage


def _keep_on_cpu(storage: Any, location: str) -> Any:
    return storage if location.startswith("cpu:") else None


def _is_distributed() -> bool:
    return distributed.is_available() and distributed.is_initialized()
