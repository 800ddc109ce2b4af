"""Processes of one trial: what they exchange, and one policy that they share by FSDP2.

The launcher describes several processes in the environment variables that `torch.distributed`
reads (`RANK`, `WORLD_SIZE`, ...); a single process needs none. Every process calls the functions
here at the same points of the trial.

Each process holds a shard of every parameter, gradient and optimizer moment. A layer's parameters
are gathered while it computes, in bfloat16 where the trial computes in it. What leaves the trainer
is whole: the policy and the optimizer's state of a checkpoint are as those of a single process.

Source: Zhao et al. 2023, PyTorch FSDP, arXiv 2304.11277; `torch.distributed.fsdp.fully_shard`.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from gdpo_tune.core.system import clear_rendezvous

T = TypeVar("T")
PATIENCE = 3600
"""Seconds that a process waits for the others: one may be writing a large checkpoint."""


def join_process_group() -> None:
    """Join the other processes of this trial, if the environment names any."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        clear_rendezvous()
        return
    # Torch's own limit for GPUs is ten minutes, and TRL's comes too late.
    patience = timedelta(seconds=PATIENCE)
    PartialState(cpu=not torch.cuda.is_available(), timeout=patience)
    # Accelerate numbers the CPU, and torch loads no file onto a "cpu:0". Every trial of a process
    # registers the same two functions: torch sorts what is registered, and cannot order others.
    torch.serialization.register_package(100, _ignore_storage, _keep_on_cpu)


def _ignore_storage(_: Any) -> None: ...


def _keep_on_cpu(storage: Any, location: str) -> Any:
    return storage if location.startswith("cpu:") else None


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


def _is_distributed() -> bool:
    # vLLM leaves a group of one process, whose collectives would take time for nothing.
    is_ready = distributed.is_available() and distributed.is_initialized()
    return is_ready and distributed.get_world_size() > 1


def build_sharding_arguments() -> dict[str, Any]:
    """Build TRL's arguments for a policy that its processes share."""
    return {
        "fsdp": True,
        "fsdp_config": {"version": 2, "reshard_after_forward": True},
        # Otherwise each process would keep whole gradients until the last micro-batch.
        "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
    }


def set_precision(arguments: Any) -> None:
    """Let a sharded trainer of bfloat16 sum gradients in float32; `arguments` are TRL's.

    Accelerate would sum them in bfloat16, with an error that grows with the number of processes.
    """
    if arguments.fsdp_plugin_args is not None and arguments.bf16:
        arguments.fsdp_plugin_args["mixed_precision_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )


@contextmanager
def prepare_sharding() -> Generator[None]:
    """Divide the reference policy of a trainer that the block builds layer by layer.

    TRL would divide it as one layer, which is gathered at once. The next trainer in this process is
    free to be another kind.
    """

    def shard_reference(model: Any, accelerator: Any) -> nn.Module:
        plugin: Any = accelerator.state.fsdp_plugin
        options: dict[str, Any] = {
            "mp_policy": plugin.mixed_precision_policy or MixedPrecisionPolicy(),
            "reshard_after_forward": True,
        }
        layers: set[str] = {*(getattr(model, "_no_split_modules", None) or ())}
        for module in list(model.modules()):
            if type(module).__name__ in layers:
                fully_shard(module, **options)
        fully_shard(model, **options)
        return model.eval()

    trl_trainer: Any = import_module("trl.trainer.grpo_trainer")
    plain = trl_trainer.prepare_fsdp
    trl_trainer.prepare_fsdp = shard_reference
    try:
        yield
    finally:
        trl_trainer.prepare_fsdp = plain
        os.environ.pop("ACCELERATE_USE_FSDP", None)


def is_sharded(model: nn.Module) -> bool:
    """Return whether the processes of this trial share the weights of a model."""
    return isinstance(model, FSDPModule)


@contextmanager
def gather_weights(model: nn.Module) -> Generator[None]:
    """Let every process have all weights of a sharded model within the block, without gradient.

    They are in the precision of the computation, and the processes need not keep pace. A model
    that is not sharded has all its weights anyway.
    """
    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            # The root, which comes first, needs its weights again at once, in the backward pass.
            part.set_reshard_after_forward(part is not parts[0], recurse=False)
            part.reshard()


def gather_tensor(tensor: Tensor) -> Tensor:
    """Return a whole tensor, in every process."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather_on_first(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Gather tensors one by one into the memory of the first process; the others get nothing.

    Tied weights, which are one parameter of several names, stay one tensor.
    """
    whole: dict[str, Tensor] = {}
    names: dict[int, str] = {}  # only of parameters, which outlive the loop
    for name, tensor in tensors:
        first = names.get(id(tensor))
        if first is None:
            gathered = gather_tensor(tensor.detach())
            if is_first():
                whole[name] = gathered.cpu()
        elif is_first():
            whole[name] = whole[first]
        if isinstance(tensor, nn.Parameter):
            names.setdefault(id(tensor), name)
    return whole
