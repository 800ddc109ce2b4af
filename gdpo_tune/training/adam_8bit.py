"""AdamW whose two averages take 8 bits a number (torchao), and how checkpoints hold them.

A checkpoint holds them in float32, as those of the usual AdamW, with the scale that each block of
256 numbers shares. So it does not depend on the number of processes, and resumes bit by bit.

Source: Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from gdpo_tune.training import distributed

NAME = "adamw_torch_8bit"
"""Name in Transformers."""
_AVERAGES = ("exp_avg", "exp_avg_sq")
_SCALE = "_scale"
"""End of the key of an average's scales in a checkpoint."""


def compute_eagerly(optimizer: Any) -> None:
    """Compute the steps of an optimizer on a CPU as they are; compiling takes minutes there."""

    def compile_nothing(*_: Any) -> None:
        torch.compiler.set_stance("force_eager")

    def compile_again(*_: Any) -> None:
        torch.compiler.set_stance("default")

    optimizer.register_step_pre_hook(compile_nothing)
    optimizer.register_step_post_hook(compile_again)


def is_8bit(optimizer: Any) -> bool:
    """Return whether averages of an optimizer, or of accelerate's wrapper of it, take 8 bits."""
    return hasattr(getattr(optimizer, "optimizer", optimizer), "_new_buffer")


def restore_precision(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of one weight with its averages in float32, and their whole scales.

    With the scales, the codes of an average are found again exactly: its largest number does not
    always have the code of 1. They are left out where some process keeps its part in float32.
    """
    restored = dict(entries)
    for key in _AVERAGES:
        local = _get_local(entries[key])
        scale = local.scale.cpu() if _is_coded(local) else None
        if not local.numel():  # a process may have no rows of a small weight
            scale = torch.empty(0)
        scales = distributed.gather(scale) if isinstance(entries[key], DTensor) else [scale]
        present = [part for part in scales if part is not None]
        if len(present) == len(scales):
            restored[f"{key}{_SCALE}"] = torch.cat(present)
        if _is_coded(local):
            restored[key] = _wrap_like(local.dequantize(), entries[key])
    return restored


def reduce_precision(optimizer: Any, weight: Tensor, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of one weight as the optimizer holds it."""
    inner = getattr(optimizer, "optimizer", optimizer)
    reduced = {key: value for key, value in entries.items() if not key.endswith(_SCALE)}
    for key in _AVERAGES:
        part = _get_local(reduced[key])
        reduced[key] = inner._new_buffer(weight, key == "exp_avg")
        local = _get_local(reduced[key])
        scale = entries.get(f"{key}{_SCALE}")
        if scale is None or not _is_coded(local):
            local.copy_(part)
            continue
        first = _find_first_number(weight) // local.block_size
        local.scale.copy_(scale[first : first + len(local.scale)])
        scaled = part.to(local.device).view(len(local.scale), -1) / local.scale[:, None]
        quantization: Any = import_module("torchao.optim.quant_utils")
        codes = quantization.quantize_8bit_with_qmap(scaled, local.qmap)
        local.codes.copy_(codes.view(local.codes.shape))
    return reduced


def _is_coded(value: Any) -> bool:
    """Return whether a tensor has 8-bit codes; small ones stay in float32."""
    return hasattr(value, "codes")


def _get_local(value: Any) -> Any:
    """Return this process's part of a sharded tensor, and any other as it is."""
    return value.to_local() if isinstance(value, DTensor) else value


def _wrap_like(local: Tensor, value: Tensor) -> Tensor:
    """Return the part of a sharded tensor, or a tensor that is not sharded, like `value`."""
    if not isinstance(value, DTensor):
        return local
    return DTensor.from_local(
        local,
        value.device_mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )


def _find_first_number(weight: Tensor) -> int:
    """Return the place of this process's first number in a whole weight, whose rows are divided."""
    if not isinstance(weight, DTensor):
        return 0
    rows = weight.shape[0]
    start = min(rows, -(-rows // distributed.count_processes()) * distributed.get_rank())
    return start * (weight.numel() // rows)
