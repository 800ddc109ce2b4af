"""Memory of a trial on a GPU, computed from the size of its policy; docs/gpus.md states it.

Source: docs/policies.md for what a layer keeps for the backward pass.
"""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace

from gdpo_tune.core.engines import find_vllm
from gdpo_tune.core.errors import ResourcesError
from gdpo_tune.core.policy_size import PolicySize
from gdpo_tune.core.vllm_memory import CONTEXT, GIB, EngineMemory, estimate_engine
from gdpo_tune.spec.model import SweepSpec

NUMBERS = {"auto": 2, "bfloat16": 2, "float32": 4}
"""`model.dtype` on a GPU -> bytes of a parameter that is not trained."""
TRAINED = 16
"""Bytes of a trained parameter: weight, gradient and the optimizer's two averages, in 32 bits."""
REFERENCE = 4
"""Bytes of a parameter of the reference policy: TRL loads a second copy in 32 bits."""
LOGITS = 300 * 10**6
"""Bytes of the logits that TRL computes at a time."""
RANK = 16
"""Rank of the adapters that messages propose."""


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes of the process that trains, without its engine."""

    weights: int
    """Weights, and of those that are trained gradients and averages too."""
    rounded: int
    """Copies of trained weights in bfloat16, with which a step computes."""
    reference: int
    """The untrained policy, where beta can be above 0 and every weight is trained."""
    head: int
    """Gradient of the output head, and the logits of a tile."""
    activations: int
    """Hidden states that the backward pass of a micro-batch needs, with full-length completions."""

    @property
    def least(self) -> int:
        """Bytes without which no step can be computed, however short the completions are."""
        return CONTEXT + self.weights + self.rounded + self.reference

    @property
    def total(self) -> int:
        """Bytes with full-length completions."""
        return self.least + self.head + self.activations


def has_reference(spec: SweepSpec) -> bool:
    """Return whether some trial keeps a second copy of the policy, for the KL.

    With adapters, the policy without them is the reference.
    """
    betas = spec.space.list_reachable("beta")
    return not spec.model.lora_rank and (betas is None or any(float(beta) > 0 for beta in betas))


def uses_engine(spec: SweepSpec) -> bool:
    """Return whether vLLM samples in the trainer's process, as far as it is installed."""
    rollout = spec.rollout
    by_default = rollout.engine == "auto" and find_vllm() is not None
    return rollout.vllm_mode == "colocate" and (rollout.engine == "vllm" or by_default)


def measure_trainer(spec: SweepSpec, size: PolicySize) -> TrainerMemory:
    """Compute the memory of a trial's process without its engine."""
    model, training, width = spec.model, spec.training, NUMBERS[spec.model.dtype]
    rank, numbers = model.lora_rank, size.parameters
    adapters = size.count_adapter_numbers(rank, model.lora_targets) if rank else 0
    hidden = width if rank else 4
    # Autograd keeps one hidden state a layer, and everything of the layer that is recomputed.
    layer = 2 * width * (4 * size.inner_width + 8 * size.width)
    kept = size.layers if model.gradient_checkpointing == "off" else 1
    token = hidden * size.layers * size.width + kept * layer
    update = training.mini_batch_size or training.completions_per_step
    share = update // spec.resources.workers
    at_once = training.micro_batch_size or share
    return TrainerMemory(
        weights=width * numbers + TRAINED * adapters if rank else TRAINED * numbers,
        rounded=width * numbers if not rank and width < 4 else 0,
        reference=REFERENCE * numbers if has_reference(spec) else 0,
        head=(0 if rank else 4 * size.vocabulary * size.width) + LOGITS,
        activations=at_once * get_longest(spec) * token,
    )


def measure_engine(spec: SweepSpec, size: PolicySize) -> EngineMemory:
    """Compute the memory without which vLLM does not start, from the shape of the policy."""
    rank = spec.model.lora_rank
    adapters = size.count_adapter_numbers(rank, spec.model.lora_targets) if rank else 0
    return estimate_engine(
        parameters=size.parameters + adapters,
        width=size.width,
        inner_width=size.inner_width,
        vocabulary=size.vocabulary,
        cached=size.cached,
        completions=spec.training.completions_per_step,
        length=get_longest(spec),
        number=NUMBERS[spec.model.dtype],
    )


def get_longest(spec: SweepSpec) -> int:
    """Return the most tokens of a prompt and its completion together."""
    return spec.data.max_prompt_length + spec.training.max_completion_length


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
    raise ResourcesError(
        f"resources.gpus = {gpus:g}: to train {size.parameters / 1e6:,.1f} million parameters "
        f"takes at least {_round_up(least):g} of a GPU of {device / GIB:.0f} GiB, without "
        f"activations ({describe_least(spec, size)})\n"
        f"    fix: {', or '.join(list_remedies(spec, size, device))}"
    )


def list_remedies(spec: SweepSpec, size: PolicySize, device: int) -> list[str]:
    """Return changes of which each suffices: a larger share or GPU, then what asks for less."""
    gpus, enough = spec.resources.gpus, _round_up(compute_least_share(spec, size, device))
    remedies = [f"--set resources.gpus={enough:g}" if enough <= 1 else "a GPU with more memory"]
    trainer, engine = measure_trainer(spec, size).least, measure_engine(spec, size).least
    share = _round_up(engine / (trainer + engine))
    divided = spec.model_copy(update={"rollout": replace(spec.rollout, vllm_memory_share=share)})
    if uses_engine(spec) and gpus >= compute_least_share(divided, size, device):
        remedies.append(f"divide it otherwise: --set rollout.vllm_memory_share={share:g}")
    if has_reference(spec) and gpus >= compute_least_share(spec, size, device, reference=False):
        remedies.append("do without the reference policy: --set space.beta=0")
    adapters = spec.model_copy(update={"model": replace(spec.model, lora_rank=RANK)})
    if not spec.model.lora_rank and gpus >= compute_least_share(adapters, size, device):
        remedies.append(f"train adapters: --set model.lora_rank={RANK}")
    return remedies


def compute_least_share(
    spec: SweepSpec, size: PolicySize, device: int, *, reference: bool = True
) -> float:
    """Return the share of a GPU below which no trial can run; above 1 if none can at all.

    A lower bound for a GPU of `device` bytes, without activations, and on request without the
    `reference` policy. vLLM gets `rollout.vllm_memory_share` of a trial's GPU share, and the
    trainer the rest.
    """
    parts = measure_trainer(spec, size)
    trainer = parts.least - (0 if reference else parts.reference)
    if not uses_engine(spec):
        return trainer / device
    share = spec.rollout.vllm_memory_share
    return max(trainer / (1 - share), measure_engine(spec, size).least / share) / device


def _round_up(share: float) -> float:
    return math.ceil(share * 100) / 100


def describe_least(spec: SweepSpec, size: PolicySize) -> str:
    """Return the parts of the memory without which no trial runs."""
    trainer = measure_trainer(spec, size)
    parts = [("weights, gradients and averages", trainer.weights)]
    parts += [("their bfloat16 copies", trainer.rounded), ("the reference", trainer.reference)]
    text = ", ".join(f"{format_bytes(count)} for {name}" for name, count in parts if count)
    engine = measure_engine(spec, size).least
    return f"{text}, and {format_bytes(engine)} for vLLM" if uses_engine(spec) else text


def format_bytes(count: float) -> str:
    """Return a number of bytes with two or three digits, in decimal units."""
    for unit, power in (("TB", 12), ("GB", 9), ("MB", 6)):
        if count >= 10**power:
            amount = count / 10**power
            return f"{amount:.1f} {unit}" if amount < 100 else f"{amount:,.0f} {unit}"
    return f"{count / 1000:.1f} kB"


def read_device_memory() -> int | None:
    """Return the bytes of the smallest GPU here; None without NVIDIA's tool or without a GPU."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    amounts = [int(line) << 20 for line in answer.stdout.splitlines() if line.strip().isdigit()]
    return min(amounts, default=None)
