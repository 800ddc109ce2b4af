"""Out of memory: one failure whose message names the settings to change.

A GPU on which others hold more than their share is another error, after which the trial is tried
again.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager

import torch

from gdpo_tune.core.engines import Engine
from gdpo_tune.core.errors import CrowdedGpuError, TrialFailure
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.training import gpu, ranks
from gdpo_tune.training.rollout import select_engine_here
from gdpo_tune.training.trl_arguments import recomputes_activations

_CPU_SIGNS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)
"""Parts of the messages of torch on a CPU."""
_GPU_SIGNS = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "No available memory for the cache blocks",
    "Free memory on device",
    "Error in memory profiling",
)
"""Parts of the messages of CUDA, Triton and vLLM, whose errors have no type of their own."""
_REQUEST = re.compile(r"Tried to allocate ([\d.]+) (bytes|[KMG]iB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@contextmanager
def explain_out_of_memory(config: TrialConfig, trials: int = 1) -> Generator[None]:
    """Turn every out-of-memory error of torch, Python or vLLM into one of ours.

    `trials` share the process.

    Raises:
        TrialFailure: the trial itself needs more memory than it may take.
        CrowdedGpuError: other processes hold what belongs to the trial's share of the GPU.
    """
    try:
        yield
    except (MemoryError, RuntimeError, ValueError, AssertionError) as error:
        if not is_out_of_memory(error):
            raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        first = lines[0].rstrip(".")
        if _is_of_gpu(error) and gpu.is_crowded(config.gpu_share, _read_request(error)):
            raise CrowdedGpuError(
                f"other processes hold memory of the trial's share of its GPU ({first})"
            ) from error
        raise TrialFailure(f"out of memory: {list_remedies(config, trials)} ({first})") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out, on a CPU or a GPU."""
    on_cpu = isinstance(error, MemoryError) or any(sign in str(error) for sign in _CPU_SIGNS)
    return on_cpu or _is_of_gpu(error)


def _is_of_gpu(error: BaseException) -> bool:
    typed = isinstance(error, torch.OutOfMemoryError)
    return typed or any(sign in str(error) for sign in _GPU_SIGNS)


def _read_request(error: BaseException) -> int:
    """Return the bytes that torch was asked for in vain; 0 if the error does not tell."""
    # vLLM wraps torch's error where it warms up.
    found = _REQUEST.search(f"{error} {error.__cause__}")
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0


def list_remedies(config: TrialConfig, trials: int = 1) -> str:
    """List the settings that save most memory, with their present values."""
    training, engine = config.training, select_engine_here(config)
    settings = [f"lower resources.pack ({trials})"] if trials > 1 else []
    settings += _list_remedies_of_training(config, engine) if config.train else []
    settings.append(f"lower training.max_completion_length ({training.max_completion_length})")
    if engine == "vllm" and config.rollout.vllm_mode == "colocate":
        settings.append(f"change rollout.vllm_memory_share ({config.rollout.vllm_memory_share:g})")
    elif not config.train:  # completions are sampled in chunks, so a single one did not fit
        settings.append(f"lower data.max_prompt_length ({config.data.max_prompt_length})")
    else:
        settings.append(_choose_remedy_of_model(config))
    return ", or ".join(settings)


def _list_remedies_of_training(config: TrialConfig, engine: Engine) -> list[str]:
    """List the sizes of batches that save memory."""
    training = config.training
    update = training.mini_batch_size or training.completions_per_step
    at_once = training.micro_batch_size or update // ranks.count_processes()
    settings: list[str] = []
    if at_once > 1:
        settings.append(f"set training.micro_batch_size below {at_once}")
    if engine != "vllm":
        fewer = f"lower training.completions_per_step ({training.completions_per_step})"
        settings.append(f"{fewer}, all of which are sampled at once")
    return settings


def _choose_remedy_of_model(config: TrialConfig) -> str:
    """Return the setting of `model:` that can still save most memory."""
    if not recomputes_activations(config.model):
        return "set model.gradient_checkpointing: on"
    if not config.model.lora_rank:
        return "set model.lora_rank: 16, which trains only adapters"
    return f"lower model.lora_rank ({config.model.lora_rank})"
