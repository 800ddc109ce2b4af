"""Memory that ran out, as a reason that says what to change."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

from gdpo_tune.core.engines import choose, installed_vllm
from gdpo_tune.core.errors import TrialFailure
from gdpo_tune.core.trials import TrialConfig
from gdpo_tune.training import ranks
from gdpo_tune.training.trl_arguments import recomputes

_SIGNS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "No available memory for the cache blocks",
    "Free memory on device",
)
"""What torch says of a CPU, and vLLM of a GPU that has too little left for it."""


@contextmanager
def memory_guard(config: TrialConfig) -> Generator[None]:
    """Around all that a trial computes.

    Raises:
        TrialFailure: instead of what torch, Python or vLLM raises when memory runs out.
    """
    try:
        yield
    except (MemoryError, RuntimeError, ValueError) as error:
        if not ran_out(error):
            raise
        raise TrialFailure(f"out of memory: {advice(config)} ({_first(error)})") from error


def ran_out(error: BaseException) -> bool:
    """Whether memory was what an error is about."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return any(sign in str(error) for sign in _SIGNS)


def advice(config: TrialConfig) -> str:
    """The settings that change most, with their present values."""
    training, model = config.training, config.model
    gpu = torch.cuda.is_available()
    engine = choose(config.rollout, gpu=gpu, lean=False, vllm=installed_vllm())
    at_once = training.micro_batch_size or training.completions_per_step // ranks.count()
    fewer = f"lower training.completions_per_step ({training.completions_per_step})"
    settings = [f"set training.micro_batch_size below {at_once}"] if at_once > 1 else [fewer]
    if at_once > 1 and engine != "vllm":
        settings.append(f"{fewer}, all of which are sampled at once")
    settings.append(f"lower training.max_completion_length ({training.max_completion_length})")
    if engine == "vllm":
        settings.append(f"change rollout.vllm_memory_share ({config.rollout.vllm_memory_share:g})")
    elif not recomputes(model.gradient_checkpointing, on_gpu=gpu):
        settings.append("set model.gradient_checkpointing: on")
    elif not model.lora_rank:
        settings.append("set model.lora_rank: 16, which trains adapters alone")
    else:
        settings.append(f"lower model.lora_rank ({model.lora_rank})")
    return ", or ".join(settings)


def _first(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
