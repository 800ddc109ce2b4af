"""Memory of a trial's process and its GPUs: its share, who may take it, and what to do without it.

Running out of memory is one failure whose message names the settings to change. A GPU on which
others hold more than their share is another error, after which the trial is tried again.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import logging
import os
import re
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gdpo_tune.core.errors import CrowdedGpuError, TrialFailure, get_first_line
from gdpo_tune.core.gpu_memory import CUDA_CONTEXT_BYTES, GIB, TrialMemory
from gdpo_tune.core.http import OUTAGE_SECONDS
from gdpo_tune.core.locks import lock_file
from gdpo_tune.core.policy_shapes import PolicyShapes
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.training import distributed
from gdpo_tune.training.rollout import select_engine_here, uses_engine_in_process
from gdpo_tune.training.trl_arguments import recomputes_activations, uses_bfloat16

_LOGGER = logging.getLogger("gdpo_tune.training")
MOST_TOKENS = 2**16
"""Tokens of a micro-batch under `auto`: more of them keep a GPU no busier."""
USED = 0.8
"""Part of the free memory that activations may take by the estimate, which is not exact."""
CPU_ACTIVATIONS = 4 * GIB
"""Bytes of activations on a CPU. It is fixed, so that results do not depend on what is free."""
FOREIGN = 2 * GIB
"""Bytes above which other processes on a whole GPU are the reason for its lack of memory; less may
be what CUDA and its libraries take for the trial itself."""
SEGMENT = 32 * 2**20
"""Bytes by which torch may enlarge a request at most: it takes a GPU's memory in segments."""


class MicroBatchLimit(NamedTuple):
    """Most completions of a micro-batch, or most tokens, if a single completion has no more."""

    size: int
    counts_tokens: bool = False

    def __str__(self) -> str:
        return f"{self.size:,} {'tokens' if self.counts_tokens else 'completions'}"


def estimate_memory(config: TrialConfig, model: Any) -> TrialMemory:
    """Estimate the memory of a trial's process; `model` is without adapters."""
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
    return TrialMemory(
        config,
        PolicyShapes(shapes, model.config.to_dict()),
        bfloat16=uses_bfloat16(config),
        recomputes=recomputes_activations(config.model),
        may_have_reference=not config.supervised and float(config.params["beta"]) > 0,
        has_engine=uses_engine_in_process(config),
        workers=distributed.count_processes(),
    )


def choose_limit(config: TrialConfig, model: Any) -> MicroBatchLimit:
    """Return the limit that a trial's settings ask for; see `estimate_memory`."""
    training, room = config.training, float(CPU_ACTIVATIONS)
    if training.micro_batch_size != "auto":
        return MicroBatchLimit(training.micro_batch_size or training.completions_per_step)
    memory = estimate_memory(config, model)
    if torch.cuda.is_available():
        whole = int(config.gpu_share * torch.cuda.mem_get_info()[1])
        room = USED * (memory.get_trainer_room(whole) - memory.least - memory.head)
    tokens = min(MOST_TOKENS, int(room / max(1, memory.position_bytes)))
    return MicroBatchLimit(max(tokens, memory.tokens), counts_tokens=True)


def limit_gpu_memory(share: float) -> None:
    """Limit what torch allocates on this process's GPU to a share, to fail before neighbours do."""
    if share < 1 and torch.cuda.is_available():
        _, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(max(share - CUDA_CONTEXT_BYTES / total, 0.0))


def free_garbage() -> None:
    """Return the memory of objects that are no longer used, of the GPU and of this process.

    glibc keeps what a thread has freed: a trial of 135M parameters left 1.3 GB to the next one.
    """
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other libraries have none
    if trim is not None:
        trim(0)


@contextmanager
def lock_gpu() -> Generator[None]:
    """Wait until no other trial of this user starts an engine on this process's GPU.

    Each waits for free memory, and would take for free what another one is about to allocate.
    """
    if not torch.cuda.is_available():
        yield
        return
    properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    directory = Path(tempfile.gettempdir()) / f"gdpo-tune-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    path = directory / f"gpu-{properties.uuid}.lock"
    with path.open("a") as file:
        lock_file(file.fileno(), fcntl.LOCK_EX, path)
        yield


def wait_for_memory(needed: float, patience: float = OUTAGE_SECONDS, pause: float = 1.0) -> None:
    """Wait until `needed` bytes of this process's GPU are free, such as after a neighbour's death.

    Raises:
        CrowdedGpuError: they are not free within `patience` seconds.
    """
    if not torch.cuda.is_available():
        return
    end, has_warned = time.monotonic() + patience, False
    while True:
        free, total = torch.cuda.mem_get_info()
        if free >= needed:
            return
        lack = (
            f"an engine needs {needed / GIB:.1f} GiB of the GPU, and {free / GIB:.1f} of "
            f"{total / GIB:.0f} GiB are free"
        )
        if time.monotonic() >= end:
            raise CrowdedGpuError(f"{lack} after {patience:g} s: other processes hold the rest")
        if not has_warned:
            _LOGGER.warning("%s: waiting for other processes to release memory", lack)
            has_warned = True
        time.sleep(pause)


def is_crowded(share: float, requested: int = 0) -> bool:
    """Return whether this process finds no memory on its GPU because of other processes.

    That is so if it holds less than its `share` of the GPU, the `requested` bytes included.
    """
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return False
    free, total = torch.cuda.mem_get_info()
    own = torch.cuda.memory_reserved()
    if own + requested + SEGMENT > share * total - CUDA_CONTEXT_BYTES:
        return False
    return share < 1 or total - free - own > FOREIGN


_CPU_SIGN = re.compile("DefaultCPUAllocator: (can't allocate|not enough) memory")
"""Part of the messages of torch on a CPU."""
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
def explain_out_of_memory(config: TrialConfig) -> Generator[None]:
    """Turn every out-of-memory error of torch, Python or vLLM into one of ours.

    Raises:
        TrialFailure: the trial itself needs more memory than it may take.
        CrowdedGpuError: other processes hold what belongs to the trial's share of the GPU.
    """
    try:
        yield
    except (MemoryError, RuntimeError, ValueError, AssertionError) as error:
        if not is_out_of_memory(error):
            raise
        first = get_first_line(error).rstrip(".")
        if _is_of_gpu(error) and is_crowded(config.gpu_share, _read_request(error)):
            raise CrowdedGpuError(
                f"other processes hold memory of the trial's share of its GPU ({first})"
            ) from error
        raise TrialFailure(f"out of memory: {list_remedies(config)} ({first})") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out, on a CPU or a GPU."""
    return isinstance(error, MemoryError) or bool(_CPU_SIGN.search(str(error))) or _is_of_gpu(error)


def _is_of_gpu(error: BaseException) -> bool:
    typed = isinstance(error, torch.OutOfMemoryError)
    return typed or any(sign in str(error) for sign in _GPU_SIGNS)


def _read_request(error: BaseException) -> int:
    """Return the bytes that torch was asked for in vain; 0 if the error does not tell."""
    # vLLM wraps torch's error where it warms up.
    found = _REQUEST.search(f"{error} {error.__cause__}")
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0


def list_remedies(config: TrialConfig) -> str:
    """List the settings that save most memory, with their present values."""
    training, engine = config.training, select_engine_here(config)
    settings = list[str]()
    if config.train:
        # A single process has halved its micro-batches, down to a single completion.
        if distributed.count_processes() > 1 and training.micro_batch_size != 1:
            settings.append(
                f"set a smaller training.micro_batch_size ({training.micro_batch_size})"
            )
        if engine != "vllm":
            fewer = f"lower training.completions_per_step ({training.completions_per_step})"
            settings.append(f"{fewer}, all of which are sampled at once")
    settings.append(f"lower training.max_completion_length ({training.max_completion_length})")
    if engine == "vllm" and config.rollout.vllm_mode == "colocate":
        settings.append(f"change rollout.vllm_memory_share ({config.rollout.vllm_memory_share:g})")
    elif not config.train:  # completions are sampled in chunks, so a single one did not fit
        settings.append(f"lower data.max_prompt_length ({config.data.max_prompt_length})")
    elif not recomputes_activations(config.model):
        settings.append("set model.gradient_checkpointing: on")
    elif not config.model.lora_rank:
        settings.append("set model.lora_rank: 16, which trains only adapters")
    else:
        settings.append(f"lower model.lora_rank ({config.model.lora_rank})")
    return ", or ".join(settings)
