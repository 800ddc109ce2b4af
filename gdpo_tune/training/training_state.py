"""State of a training that its checkpoints hold besides the policy: optimizer and random states.

The optimizer's state is whole, whatever the number of processes. 8-bit moments (torchao) are
written in float32, as those of the usual AdamW, with the scale that each block of 256 values
shares, so that they resume bit by bit.

Source: Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.trainer_pt_utils import safe_globals

from gdpo_tune.training import distributed

ADAM_8BIT = "adamw_torch_8bit"
"""Name in Transformers of AdamW with 8-bit moments."""
_MOMENTS = ("exp_avg", "exp_avg_sq")
_SCALE = "_scale"
"""End of the key of a moment's scales in a checkpoint."""

RandomState = dict[str, Any]
"""States of the random generators of one process: `python`, `numpy`, `cpu`, and where there is a
GPU `cuda`, a list of one state for each GPU that the process sees."""


def gather_optimizer(optimizer: Any) -> dict[str, Any]:
    """Return the state of an optimizer; of a sharded one a whole one, in the first process."""
    state: dict[str, Any] = optimizer.state_dict()
    coded = is_8bit(optimizer)
    whole: dict[int, dict[str, Any]] = {}
    for number, entries in state["state"].items():
        # one weight at a time, because all of them may not fit in 32 bits
        entries = _restore_precision(entries) if coded else entries
        gathered = {
            key: distributed.gather_tensor(value) if isinstance(value, Tensor) else value
            for key, value in entries.items()
        }
        is_divided = any(isinstance(value, DTensor) for value in entries.values())
        if is_divided and not distributed.is_first():
            gathered = {}
        elif is_divided or coded:
            gathered = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in gathered.items()}
        whole[number] = gathered
    return {**state, "state": whole}


def load_optimizer(optimizer: Any, whole: Mapping[str, Any]) -> None:
    """Give each process its part of a whole state, as its optimizer holds it."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for number, entries in whole["state"].items():
        weight = weights[number]
        state[number] = {
            # Every process has read the same file, so nothing is sent.
            key: distribute_tensor(
                value.to(weight.device), weight.device_mesh, weight.placements, src_data_rank=None
            )
            if isinstance(weight, DTensor)
            and isinstance(value, Tensor)
            and value.shape == weight.shape
            else value
            for key, value in entries.items()
        }
        if is_8bit(optimizer):
            state[number] = _reduce_precision(optimizer, weight, state[number])
    optimizer.load_state_dict({**whole, "state": state})


def is_8bit(optimizer: Any) -> bool:
    """Return whether the moments of an optimizer, or of accelerate's wrapper of it, are 8-bit."""
    return hasattr(getattr(optimizer, "optimizer", optimizer), "_new_buffer")


def compute_eagerly(optimizer: Any) -> None:
    """Compute the steps of an optimizer on a CPU as they are; compiling takes minutes there."""

    def compile_nothing(*_: Any) -> None:
        torch.compiler.set_stance("force_eager")

    def compile_again(*_: Any) -> None:
        torch.compiler.set_stance("default")

    optimizer.register_step_pre_hook(compile_nothing)
    optimizer.register_step_post_hook(compile_again)


def _restore_precision(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of one weight with its moments in float32, and their whole scales.

    With the scales, the codes of a moment are found again exactly: its largest value does not
    always have the code of 1. They are left out where some process keeps its part in float32.
    """
    restored = dict(entries)
    for key in _MOMENTS:
        value = entries[key]
        local = _get_local(value)
        is_coded = hasattr(local, "codes")  # small moments stay in float32
        scale = local.scale.cpu() if is_coded else None
        if not local.numel():  # a process may have no rows of a small weight
            scale = torch.empty(0)
        scales = distributed.gather(scale) if isinstance(value, DTensor) else [scale]
        present = [part for part in scales if part is not None]
        if len(present) == len(scales):
            restored[f"{key}{_SCALE}"] = torch.cat(present)
        if is_coded:
            restored[key] = local.dequantize()
        if is_coded and isinstance(value, DTensor):
            restored[key] = DTensor.from_local(
                restored[key],
                value.device_mesh,
                value.placements,
                run_check=False,
                shape=value.shape,
                stride=value.stride(),
            )
    return restored


def _reduce_precision(optimizer: Any, weight: Tensor, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of one weight as the optimizer holds it."""
    inner = getattr(optimizer, "optimizer", optimizer)
    reduced = {key: value for key, value in entries.items() if not key.endswith(_SCALE)}
    for key in _MOMENTS:
        part = _get_local(reduced[key])
        reduced[key] = inner._new_buffer(weight, key == "exp_avg")
        local = _get_local(reduced[key])
        scale = entries.get(f"{key}{_SCALE}")
        if scale is None or not hasattr(local, "codes"):
            local.copy_(part)
            continue
        first = 0
        if isinstance(weight, DTensor):  # whose rows are divided among the processes
            rows = weight.shape[0]
            start = -(-rows // distributed.count_processes()) * distributed.get_rank()
            first = min(rows, start) * (weight.numel() // rows) // local.block_size
        local.scale.copy_(scale[first : first + len(local.scale)])
        scaled = part.to(local.device).view(len(local.scale), -1) / local.scale[:, None]
        quantization: Any = import_module("torchao.optim.quant_utils")
        codes = quantization.quantize_8bit_with_qmap(scaled, local.qmap)
        local.codes.copy_(codes.view(local.codes.shape))
    return reduced


def _get_local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


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
        torch.save(state, checkpoint / _name_random_file(rank, len(states)))


def load_random_state(checkpoint: Path, seed: int) -> None:
    """Restore the state of this process.

    A training with another number of processes has no state of its own there. Trial's seed,
    checkpoint and rank then decide the state, so that no draws of earlier steps come again.
    """
    rank, processes = distributed.get_rank(), distributed.count_processes()
    if len(list(checkpoint.glob(_name_random_file("*", processes)))) != processes:
        text = f"{seed}/{checkpoint.name}/{rank}/{processes}"
        set_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big"))
        return
    file = checkpoint / _name_random_file(rank, processes)
    with safe_globals():  # NumPy's state holds an array
        states: RandomState = torch.load(file, weights_only=True)
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.random.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        for device, state in zip(range(torch.cuda.device_count()), states["cuda"], strict=False):
            torch.cuda.random.set_rng_state(state, device)


def _name_random_file(rank: int | str, processes: int) -> str:
    return "rng_state.pth" if processes == 1 else f"rng_state_{rank}.pth"
