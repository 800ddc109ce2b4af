"""Processes of one trial: what they exchange, and one policy that they share by FSDP2.

The launcher describes several processes in the environment variables that `torch.distributed`
reads (`RANK`, `WORLD_SIZE`, ...); a single process needs none. Every process calls the functions
here at the same points of the trial.

Each process holds a shard of every parameter, gradient and optimizer moment. A layer's parameters
are gathered while it computes, in bfloat16 where the trial computes in it. What leaves the trainer
is whole: a checkpoint has the same files whatever the number of processes, and resumes on any.

Source: Zhao et al. 2023, PyTorch FSDP, arXiv 2304.11277; `torch.distributed.fsdp.fully_shard`.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, TypeVar, cast

import torch
from accelerate import PartialState
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from gdpo_tune.core.system import clear_rendezvous
from gdpo_tune.training import adam_8bit

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
    """Prepare for a trainer that the block builds.

    Its reference policy is divided layer by layer: TRL would divide it as one layer, which is
    gathered at once. The next trainer in this process is free to be another kind.
    """
    trl_trainer: Any = import_module("trl.trainer.grpo_trainer")
    plain = trl_trainer.prepare_fsdp
    trl_trainer.prepare_fsdp = _shard_reference
    try:
        yield
    finally:
        trl_trainer.prepare_fsdp = plain
        os.environ.pop("ACCELERATE_USE_FSDP", None)


def start_sharding(model: nn.Module) -> None:
    """Let torch read the types of a sharded model's weights, while those to train need a gradient.

    It would read them in the first forward pass. That may be the one of the reference policy, in
    which `peft` lets no weight need a gradient, and torch would round gradients to bfloat16.
    """
    root: Any = model
    root._get_fsdp_state()._lazy_init()


def is_sharded(model: nn.Module) -> bool:
    """Return whether the processes of this trial share the weights of a model."""
    return isinstance(model, FSDPModule)


@contextmanager
def gather_weights(model: nn.Module) -> Generator[None]:
    """Let every process have all weights of a sharded model within the block, without gradient.

    They are in the precision of the computation. Within the block the processes need not keep
    pace. A model that is not sharded has all its weights anyway.
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


def gather_optimizer(optimizer: Any) -> dict[str, Any]:
    """Return the state of an optimizer; of a sharded one a whole one, in the first process.

    The whole state is that of an optimizer in one process.
    """
    state: dict[str, Any] = optimizer.state_dict()
    whole: dict[int, dict[str, Any]] = {}
    for number, entries in state["state"].items():
        if adam_8bit.is_8bit(optimizer):
            # one weight at a time, because all of them may not fit in 32 bits
            whole[number] = _gather_entries(adam_8bit.restore_precision(entries), on_cpu=True)
        else:
            whole[number] = _gather_entries(entries)
    return {**state, "state": whole}


def load_optimizer(optimizer: Any, whole: Mapping[str, Any]) -> None:
    """Give each process its part of a whole state, as its optimizer holds it."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    state = {
        number: {key: _divide_like(value, weights[number]) for key, value in entries.items()}
        for number, entries in whole["state"].items()
    }
    if adam_8bit.is_8bit(optimizer):
        state = {
            number: adam_8bit.reduce_precision(optimizer, weights[number], entries)
            for number, entries in state.items()
        }
    optimizer.load_state_dict({**whole, "state": state})


def _gather_entries(entries: Mapping[str, Any], *, on_cpu: bool = False) -> dict[str, Any]:
    """Return whole entries, in the first process if they are divided; those are on a CPU."""
    gathered = {
        key: gather_tensor(value) if isinstance(value, Tensor) else value
        for key, value in entries.items()
    }
    is_divided = any(isinstance(value, DTensor) for value in entries.values())
    if is_divided and not is_first():
        return {}
    if not (is_divided or on_cpu):
        return gathered
    return {k: v.cpu() if isinstance(v, Tensor) else v for k, v in gathered.items()}


def _divide_like(value: Any, weight: Tensor) -> Any:
    """Return this process's part of a value of a weight's shape; others stay whole."""
    if not isinstance(weight, DTensor) or not isinstance(value, Tensor):
        return value
    if value.shape != weight.shape:
        return value
    # Every process has read the same file, so nothing is sent.
    return distribute_tensor(
        value.to(weight.device), weight.device_mesh, weight.placements, src_data_rank=None
    )


def _shard_reference(model: Any, accelerator: Any) -> nn.Module:
    """Divide a reference policy layer by layer, as accelerate divides the policy."""
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
    return cast("nn.Module", model.eval())
