"""State of a training that its checkpoints hold besides the policy: optimizer and random states.

The files are those of Transformers' Trainer, which also reads them. The first process writes them
for all, because others may be on machines whose disks no later run reads. The state of a divided
optimizer is whole; 8-bit moments (torchao) are in float32 there, and rounded anew when they are
divided again.

Source: Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from gdpo_tune.core.errors import ResourcesError
from gdpo_tune.training import distributed

ADAM_8BIT = "adamw_torch_8bit"
"""Name in Transformers of AdamW with 8-bit moments."""
_MOMENTS = ("exp_avg", "exp_avg_sq")

RandomState = dict[str, Any]
"""States of the random generators of one process: `python`, `numpy`, `cpu`, and where there is a
GPU `cuda`: its state, or of several processes a list of one for each GPU that the process sees."""


def gather_optimizer(optimizer: Any) -> dict[str, Any]:
    """Return the state of an optimizer; of a sharded one a whole one, in the first process."""
    state: dict[str, Any] = optimizer.state_dict()
    whole: dict[int, dict[str, Any]] = {}
    # One weight at a time, because all of them may not fit on a GPU.
    for number, entries in state["state"].items():
        whole[number] = {key: _gather_on_first(value) for key, value in entries.items()}
    return {**state, "state": whole}


def _gather_on_first(value: Any) -> Any:
    """Return a divided tensor, whole and in float32 in the first process; others as they are."""
    if not isinstance(value, DTensor):
        return value
    local: Any = value.to_local()
    if hasattr(local, "codes"):  # of 8 bits; small moments stay in float32
        value = DTensor.from_local(
            local.dequantize(),
            value.device_mesh,
            value.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )
    gathered = distributed.gather_tensor(value)
    return gathered.cpu() if distributed.is_first() else None


def load_sharded_optimizer(optimizer: Any, whole: Mapping[str, Any]) -> None:
    """Give each process its part of a whole state, as its optimizer holds it."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for number, entries in whole["state"].items():
        weight, state[number] = weights[number], dict(entries)
        if not isinstance(weight, DTensor):
            continue
        for key in _MOMENTS:
            # Every process has read the same file, so nothing is sent.
            part = distribute_tensor(
                entries[key].to(weight.device),
                weight.device_mesh,
                weight.placements,
                src_data_rank=None,
            )
            if is_8bit(optimizer):
                inner: Any = getattr(optimizer, "optimizer", optimizer)
                reduced = inner._new_buffer(weight, key == "exp_avg")
                reduced.to_local().copy_(part.to_local())
                part = reduced
            state[number][key] = part
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


def read_random_state() -> RandomState:
    """Return the states of all generators of this process."""
    states: RandomState = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        generators = torch.cuda.random
        is_alone = distributed.count_processes() == 1
        states["cuda"] = generators.get_rng_state() if is_alone else generators.get_rng_state_all()
    return states


def save_random_states(states: Sequence[RandomState], checkpoint: Path) -> None:
    """Write the state of each process, in the order of their ranks."""
    for rank, state in enumerate(states):
        name = "rng_state.pth" if len(states) == 1 else f"rng_state_{rank}.pth"
        torch.save(state, checkpoint / name)


def check_process_count(checkpoint: Path) -> None:
    """Raise `ResourcesError` for a checkpoint that another number of processes has written.

    There is no random state for these, so they would draw what was drawn before.
    """
    written, processes = len(list(checkpoint.glob("rng_state*.pth"))), distributed.count_processes()
    if written != processes:
        raise ResourcesError(
            f"resources.workers = {processes}: {checkpoint} has the random states of {written}, "
            f"and a trial resumes on as many\n    fix: --set resources.workers={written}"
        )
