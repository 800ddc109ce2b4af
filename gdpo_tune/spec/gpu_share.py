"""Least share of a GPU in which a policy can be trained, and the refusal of a smaller one."""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Mapping
from dataclasses import replace

from gdpo_tune.core.errors import ResourcesError
from gdpo_tune.core.policy_size import PolicySize
from gdpo_tune.core.vllm_memory import GIB
from gdpo_tune.spec.gpu_memory import (
    format_bytes,
    has_reference,
    measure_engine,
    measure_trainer,
    uses_engine,
)
from gdpo_tune.spec.model import SweepSpec
from gdpo_tune.spec.problems import Problems, SourceMark
from gdpo_tune.spec.training_section import check_resources

RANK = 16
"""Rank of the adapters that messages propose."""
WORKERS = (2, 4, 8)
"""Numbers of workers that messages propose."""


def check_gpu_share(
    spec: SweepSpec,
    size: PolicySize | None,
    device: int | None,
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Raise `ResourcesError` for a share of a GPU in which the policy could not be trained.

    An unknown `size`, an unknown `device` (bytes of the smallest GPU) and trials on a cluster
    (`RAY_ADDRESS`) pass.
    """
    gpus = spec.resources.gpus
    if not gpus or size is None or device is None or environment.get("RAY_ADDRESS"):
        return
    least = compute_least_share(spec, size, device)
    if gpus >= least:
        return
    together = spec.resources.trials_per_process
    several = f" in {together} trials at a time" if together > 1 else ""
    raise ResourcesError(
        f"resources.gpus = {gpus:g}: to train {size.parameters / 1e6:,.1f} million parameters"
        f"{several} takes at least {_round_up(least):g} of a GPU of {device / GIB:.0f} GiB, "
        f"without activations ({describe_least(spec, size)})\n"
        f"    fix: {', or '.join(list_remedies(spec, size, device))}"
    )


def list_remedies(spec: SweepSpec, size: PolicySize, device: int) -> list[str]:
    """Return changes of which each suffices: a larger share or GPU, then what asks for less."""
    gpus, enough = spec.resources.gpus, _round_up(compute_least_share(spec, size, device))
    remedies = [f"--set resources.gpus={enough:g}" if enough <= 1 else "a GPU with more memory"]
    fewer = _count_fitting_trials(spec, size, device)
    if fewer:
        remedies.append(f"fewer trials a process: --set resources.pack={fewer}")
    trainer, engine = measure_trainer(spec, size).least, measure_engine(spec, size).least
    share = _round_up(engine / (trainer + engine))
    divided = spec.model_copy(update={"rollout": replace(spec.rollout, vllm_memory_share=share)})
    if uses_engine(spec) and gpus >= compute_least_share(divided, size, device):
        remedies.append(f"divide it otherwise: --set rollout.vllm_memory_share={share:g}")
    asleep = spec.model_copy(update={"rollout": replace(spec.rollout, sleep=True)})
    alone = gpus >= 1 and spec.resources.trials_per_process == 1
    if uses_engine(spec) and alone and gpus >= compute_least_share(asleep, size, device):
        remedies.append("let vLLM sleep during a step: --set rollout.sleep=true")
    if has_reference(spec) and gpus >= compute_least_share(spec, size, device, reference=False):
        remedies.append("do without the reference policy: --set space.beta=0")
    adapters = spec.model_copy(update={"model": replace(spec.model, lora_rank=RANK)})
    if not spec.model.lora_rank and gpus >= compute_least_share(adapters, size, device):
        remedies.append(f"train adapters: --set model.lora_rank={RANK}")
    if workers := _count_sufficient_workers(spec, size, device):
        remedies.append(f"divide the policy: --set resources.workers={workers}, each with a GPU")
    return remedies


def _count_sufficient_workers(spec: SweepSpec, size: PolicySize, device: int) -> int:
    resources = spec.resources
    if resources.gpus < 1 or resources.sharding == "none" or resources.pack != 1:
        return 0
    for count in (count for count in WORKERS if count > resources.workers):
        several = resources.model_copy(update={"workers": count})
        problems = Problems(SourceMark(""))
        check_resources(several, spec.rollout, spec.space, spec.training, problems)
        changed = spec.model_copy(update={"resources": several})
        if not problems.records and compute_least_share(changed, size, device) <= 1:
            return count
    return 0


def _count_fitting_trials(spec: SweepSpec, size: PolicySize, device: int) -> int:
    for count in range(spec.resources.trials_per_process - 1, 0, -1):
        resources = spec.resources.model_copy(update={"pack": count})
        changed = spec.model_copy(update={"resources": resources})
        if compute_least_share(changed, size, device) <= spec.resources.gpus:
            return count
    return 0


def compute_least_share(
    spec: SweepSpec, size: PolicySize, device: int, *, reference: bool = True
) -> float:
    """Return the share of a GPU below which no trial can run; above 1 if none can at all.

    A lower bound for a GPU of `device` bytes, without activations, and on request without the
    `reference` policy. vLLM gets `rollout.vllm_memory_share` of a trial's GPU share, and the
    trainer the rest.
    """
    parts = measure_trainer(spec, size)
    parts = parts if reference else replace(parts, reference=0)
    if not uses_engine(spec):
        return parts.least / device
    share, engine = spec.rollout.vllm_memory_share, measure_engine(spec, size)
    if spec.rollout.sleep:
        sampling, step = parts.at_rest / (1 - share), parts.least + engine.workspace
        return max(sampling, step, engine.least / share) / device
    return max(parts.least / (1 - share), engine.least / share) / device


def _round_up(share: float) -> float:
    return math.ceil(share * 100) / 100


def describe_least(spec: SweepSpec, size: PolicySize) -> str:
    """Return the parts of the memory without which no trial runs."""
    trainer = measure_trainer(spec, size)
    parts = [("weights, gradients and averages", trainer.weights + trainer.gradients)]
    parts += [("their bfloat16 copies", trainer.rounded), ("the reference", trainer.reference)]
    text = ", ".join(f"{format_bytes(count)} for {name}" for name, count in parts if count)
    engine = measure_engine(spec, size).least
    return f"{text}, and {format_bytes(engine)} for vLLM" if uses_engine(spec) else text


def read_device_memory() -> int | None:
    """Return the bytes of the smallest GPU here; None without NVIDIA's tool or without a GPU."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    amounts = [int(line) << 20 for line in answer.stdout.splitlines() if line.strip().isdigit()]
    return min(amounts, default=None)
