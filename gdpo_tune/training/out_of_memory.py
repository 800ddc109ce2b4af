"""Out of memory: one failure whose message names the settings to change."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

from gdpo_tune.core.engines import find_vllm, select_engine
from gdpo_tune.core.errors import TrialFailure
from gdpo_tune.core.trials import TrialConfig
from gdpo_tune.training import ranks
from gdpo_tune.training.trl_arguments import recomputes_activations

_SIGNS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "No available memory for the cache blocks",
    "Free memory on device",
)
"""Parts of the messages of torch (on a CPU) and of vLLM (on a GPU with too little left)."""


@contextmanager
def explain_out_of_memory(config: TrialConfig) -> Generator[None]:
    """Turn every out-of-memory error of torch, Python or vLLM into a `TrialFailure`.

    Raises:
        TrialFailure: memory ran out in the block.
    """
    try:
        yield
    except (MemoryError, RuntimeError, ValueError) as error:
        typed = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not typed and not any(sign in str(error) for sign in _SIGNS):
            raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        first = lines[0].rstrip(".")
        raise TrialFailure(f"out of memory: {list_remedies(config)} ({first})") from error


def list_remedies(config: TrialConfig) -> str:
    """List the settings that save most memory, with their present values."""
    training, model = config.training, config.model
    gpu = torch.cuda.is_available()
    engine = select_engine(config.rollout, gpu=gpu, lean=False, vllm=find_vllm())
    at_once = training.micro_batch_size or training.completions_per_step // ranks.count_processes()
    fewer = f"lower training.completions_per_step ({training.completions_per_step})"
    settings = [f"set training.micro_batch_size below {at_once}"] if at_once > 1 else [fewer]
    if at_once > 1 and engine != "vllm":
        settings.append(f"{fewer}, all of which are sampled at once")
    settings.append(f"lower training.max_completion_length ({training.max_completion_length})")
    if engine == "vllm":
        settings.append(f"change rollout.vllm_memory_share ({config.rollout.vllm_memory_share:g})")
    elif not recomputes_activations(model):
        settings.append("set model.gradient_checkpointing: on")
    elif not model.lora_rank:
        settings.append("set model.lora_rank: 16, which trains only adapters")
    else:
        settings.append(f"lower model.lora_rank ({model.lora_rank})")
    return ", or ".join(settings)
