"""Memory of a colocated engine on a GPU: how large its key-value cache may be.

Left alone, vLLM measures the whole device while it starts, and takes what a neighbour allocates
meanwhile for its own. So the size of its cache is computed here from the trial's share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from gdpo_tune.core.engines import round_up_rank
from gdpo_tune.core.errors import ResourcesError
from gdpo_tune.core.trials import TrialConfig
from gdpo_tune.training.lora import count_adapter_numbers

GIB = 2**30
GRAPHS = GIB // 2
"""Bytes of the compiled graphs."""
BATCHED_TOKENS = 4096
"""Tokens that an engine of TRL computes at once."""
LOGIT_COPIES = 4
"""Arrays of 32-bit numbers, vocabulary x sequences, that exist at once while tokens are drawn."""
BLOCK = 16
"""Tokens in a block of the cache."""


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of an engine's part of a GPU and of what is in it."""

    part: int
    """The engine's part: its share of the trial's share of the device."""
    weights: int
    """The policy's weights, and the slot of an adapter."""
    workspace: int
    """Activations, probabilities of the next tokens and graphs: an estimate."""
    longest: int
    """Cache of one sequence of the greatest length."""

    @property
    def cache(self) -> int:
        """Bytes of the cache: what is left, and at least one sequence."""
        return max(self.part - self.weights - self.workspace, self.longest)

    @property
    def least(self) -> int:
        """Bytes without which no engine starts."""
        return self.weights + self.longest


def measure_engine_memory(
    config: TrialConfig, model: PreTrainedModel, *, device: int, length: int, width: int
) -> EngineMemory:
    """Compute the memory of an engine from the shape of its policy.

    Args:
        config: the trial, which samples all completions of a step at once.
        model: the policy, without adapters.
        device: bytes of the GPU.
        length: tokens of the longest prompt with its completion.
        width: bytes of a number.

    Raises:
        ResourcesError: the part is too small for the weights and a single sequence.
    """
    shape: Any = model.config.get_text_config()
    rank = config.model.lora_rank
    adapter = count_adapter_numbers(model, round_up_rank(rank)) if rank else 0
    intermediate: int = getattr(shape, "intermediate_size", None) or 4 * shape.hidden_size
    activations = BATCHED_TOKENS * (4 * shape.hidden_size + 3 * intermediate) * width
    sequences = config.training.completions_per_step
    probabilities = sequences * shape.vocab_size * 4 * LOGIT_COPIES
    blocks = -(-length // BLOCK) + 2  # vLLM keeps one block empty
    memory = EngineMemory(
        part=int(config.gpu_share * config.rollout.vllm_memory_share * device),
        weights=(model.num_parameters() + adapter) * width,
        workspace=activations + probabilities + GRAPHS,
        longest=blocks * BLOCK * _count_cached_numbers(shape) * width,
    )
    if memory.part < memory.least:
        share = config.rollout.vllm_memory_share
        raise ResourcesError(
            f"rollout.vllm_memory_share = {share:g}: vLLM's part of this GPU of "
            f"{device / GIB:.0f} GiB is {memory.part / GIB:.2f} GiB, and the policy's weights take "
            f"{memory.weights / GIB:.2f} GiB and the cache of one completion "
            f"{memory.longest / GIB:.2f} GiB\n"
            "    fix: raise rollout.vllm_memory_share or resources.gpus, or lower "
            "data.max_prompt_length or training.max_completion_length"
        )
    return memory


def _count_cached_numbers(shape: Any) -> int:
    """Return the numbers in the cache of one token: keys and values of every layer."""
    heads: int = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    width: int = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    return 2 * shape.num_hidden_layers * heads * width
