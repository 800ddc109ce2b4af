"""Division of a trial's GPU between trainer and engine: how large the engine's cache may be.

Left alone, vLLM measures the whole device while it starts, and takes what a neighbour allocates
meanwhile for its own. So the size of its key-value cache is computed here from the trial's share.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from gdpo_tune.core.engines import round_up_rank
from gdpo_tune.core.errors import ResourcesError
from gdpo_tune.core.gpu_memory import CONTEXT, GIB, EngineMemory, estimate_engine
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.training import distributed
from gdpo_tune.training.lora import count_adapter_numbers

BLOCK = 16
"""Tokens in a block of the cache."""


def divide_gpu(
    config: TrialConfig,
    model: PreTrainedModel,
    *,
    device: int,
    length: int,
    number: int,
    trials: int,
    rank: int,
) -> tuple[int, float]:
    """Return the bytes of the engine's cache, and those that must be free before it starts.

    Neighbours that keep to their shares leave the trial its own, less the contexts of CUDA.

    Args:
        config: a trial, whose process samples its completions of a step at once.
        model: the policy, without adapters.
        device: bytes of the GPU.
        length: tokens of the longest prompt with its completion.
        number: bytes of a number in the engine.
        trials: how many trials share the engine.
        rank: largest rank of their adapters; 0 without adapters.

    Raises:
        ResourcesError: the engine's part is too small for the weights and a single completion.
    """
    share = config.rollout.vllm_memory_share
    part = int(config.gpu_share * share * device)
    engine = _measure_engine(config, model, length=length, number=number, trials=trials, rank=rank)
    if part < engine.weights + engine.longest:
        raise ResourcesError(
            f"rollout.vllm_memory_share = {share:g}: vLLM's part of this GPU of "
            f"{device / GIB:.0f} GiB is {part / GIB:.2f} GiB, and the policy's weights take "
            f"{engine.weights / GIB:.2f} GiB and the cache of one completion "
            f"{engine.longest / GIB:.2f} GiB\n"
            "    fix: raise rollout.vllm_memory_share or resources.gpus, or lower "
            "data.max_prompt_length or training.max_completion_length"
        )
    cache = max(part - engine.weights - engine.workspace, engine.longest)
    trainer = model.num_parameters() * model.dtype.itemsize
    return cache, min(part + trainer, config.gpu_share * device - 2 * CONTEXT)


def _measure_engine(
    config: TrialConfig, model: PreTrainedModel, *, length: int, number: int, trials: int, rank: int
) -> EngineMemory:
    shape: Any = model.config.get_text_config()
    adapter = count_adapter_numbers(model, round_up_rank(rank)) if rank else 0
    heads: int = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    width: int = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    blocks = -(-length // BLOCK) + 2  # vLLM keeps one block empty
    return estimate_engine(
        parameters=model.num_parameters() + trials * adapter,
        hidden_size=shape.hidden_size,
        intermediate_size=getattr(shape, "intermediate_size", None) or 4 * shape.hidden_size,
        vocabulary=shape.vocab_size,
        kv_elements_per_token=2 * shape.num_hidden_layers * heads * width,
        completions=trials * config.training.completions_per_step // distributed.count_processes(),
        length=blocks * BLOCK,
        number_bytes=number,
    )
