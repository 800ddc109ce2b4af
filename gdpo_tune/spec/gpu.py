"""What a trial takes of a GPU at least: figures for the moment before a sweep starts."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

from gdpo_tune.core.engines import installed_vllm
from gdpo_tune.core.errors import ResourcesError
from gdpo_tune.spec.model import SweepSpec

GIB = 2**30
CONTEXT = GIB // 2
"""Bytes that CUDA takes for a process."""
ENGINE = GIB
"""Bytes of an engine besides the weights: its graphs, its workspace and a cache."""
STATES = 4
"""Numbers kept for each that is trained: weight, gradient and the optimizer's two averages."""
NUMBERS = {"auto": 2, "bfloat16": 2, "float32": 4}
"""`model.dtype` on a GPU -> bytes of a number that is computed with, but not trained."""
TRAINED = 4
"""Bytes of a number that is trained, whatever is computed in."""


def least_share(spec: SweepSpec, parameters: int, device: int) -> float:
    """Share of a GPU below which no trial of this sweep can run; above 1 if none can at all.

    A lower bound, computed and not measured: activations, which hang on the lengths, come on top.
    vLLM gets `rollout.vllm_memory_share` of what a trial has, and the trainer the rest.

    Args:
        spec: the sweep.
        parameters: of the policy.
        device: bytes of the GPU.
    """
    width = NUMBERS[spec.model.dtype]
    kept = width if spec.model.lora_rank else STATES * TRAINED
    trainer = CONTEXT + kept * parameters
    if not colocated(spec):
        return trainer / device
    share = spec.rollout.vllm_memory_share
    engine = ENGINE + width * parameters
    return max(trainer / (1 - share), engine / share) / device


def colocated(spec: SweepSpec) -> bool:
    """Whether a trial with a GPU is to have an engine beside its trainer."""
    rollout = spec.rollout
    by_default = rollout.engine == "auto" and installed_vllm() is not None
    return (rollout.engine == "vllm" or by_default) and rollout.vllm_mode == "colocate"


def check_gpu_share(
    spec: SweepSpec,
    parameters: int | None,
    device: int | None,
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Refuse a share of a GPU in which the policy could not be trained.

    Args:
        spec: the sweep.
        parameters: of the policy; None: not known, hence not judged.
        device: bytes of the smallest GPU here; None: likewise.
        environment: `RAY_ADDRESS` means that trials run elsewhere.

    Raises:
        ResourcesError: a trial could not fit.
    """
    asked = spec.resources.gpus
    if not asked or parameters is None or device is None or environment.get("RAY_ADDRESS"):
        return
    least = least_share(spec, parameters, device)
    if min(asked, 1.0) >= least:
        return
    enough = -(-least * 100 // 1) / 100
    remedy = f"--set resources.gpus={enough:g}" if enough <= 1 else "a GPU with more memory"
    raise ResourcesError(
        f"resources.gpus = {asked:g}: to train {parameters / 1e6:,.1f} million numbers takes at "
        f"least {enough:g} of a GPU of {device / GIB:.0f} GiB, activations aside\n"
        f"    fix: {remedy}, or train adapters: --set model.lora_rank=16"
    )


def device_memory() -> int | None:
    """Bytes of the smallest GPU of this machine; None without NVIDIA's tool or without a GPU."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    amounts = [int(line) << 20 for line in answer.stdout.splitlines() if line.strip().isdigit()]
    return min(amounts, default=None)
