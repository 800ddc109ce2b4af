"""Sampling completions: a lean sampler for small Llama policies on a CPU, else Transformers.

For a policy of half a million parameters the time of `generate` is overhead, not arithmetic. This
sampler runs each distinct prompt once, however many completions it gets, drops finished rows from
the batch and draws tokens with a cumulative sum; its greedy output equals that of `generate`.

Shapes: B completions, U distinct prompts, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

from gdpo_tune.training.fast_cpu.llama import Cache, Llama

_FAST_PARAMETERS = 50_000_000
"""Above this, arithmetic dominates and copies of the weights are no longer cheap."""
_FIXED_ROPE = ("default", "linear", "llama3")
"""Rotary embeddings whose angles do not depend on the length of the sequence."""


@dataclass(frozen=True)
class Decoding:
    """How completions are drawn."""

    max_new_tokens: int
    temperature: float | None
    """None takes the most likely token."""
    end_tokens: tuple[int, ...]
    pad_token: int


def supports(model: PreTrainedModel) -> bool:
    """Whether the lean sampler computes what this model computes, and is worth it."""
    if not isinstance(model, LlamaForCausalLM) or model.device.type != "cpu":
        return False
    if torch.is_autocast_enabled("cpu"):
        return False  # its own arithmetic follows no change of precision
    config: Any = model.config
    return (
        model.dtype == torch.float32
        and model.num_parameters() <= _FAST_PARAMETERS
        and config.hidden_act == "silu"
        and not config.attention_bias
        and not config.mlp_bias
        and not config.attention_dropout
        and config.rope_parameters["rope_type"] in _FIXED_ROPE
    )


def generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    generator: torch.Generator,
) -> list[list[int]]:
    """Completions of tokenized prompts, for any policy; the global random state stays as it is.

    Args:
        model: the policy, in any mode; its mode is kept.
        prompts: B prompts, none of them empty.
        decoding: how to draw.
        generator: a CPU generator, the only source of chance.

    Returns:
        B completions, each up to and including its end token; at least one token long.
    """
    if supports(model):
        return sample(model, prompts, decoding, generator)
    seed = int(torch.randint(2**62, (1,), generator=generator))
    devices = [model.device] if model.device.type == "cuda" else []
    training = model.training
    model.eval()
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        completions = _generate_with_transformers(model, prompts, decoding)
    model.train(training)
    return completions


def generate_in_bfloat16(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    generator: torch.Generator,
) -> list[list[int]]:
    """As `generate`, computing as a training in bfloat16 does."""
    with torch.autocast(model.device.type, dtype=torch.bfloat16):
        return generate(model, prompts, decoding, generator)


def sample(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    generator: torch.Generator | None = None,
) -> list[list[int]]:
    """Completions by the lean sampler; the model must be one that `supports` accepts.

    Args:
        model: the policy.
        prompts: B prompts; equal ones are computed once.
        decoding: how to draw.
        generator: source of chance; None is the global one.

    Returns:
        B completions, each up to and including its end token.
    """
    distinct: dict[tuple[int, ...], int] = {}
    rows = torch.tensor([distinct.setdefault(tuple(p), len(distinct)) for p in prompts])
    with torch.no_grad():
        tokens = _decode(Llama(model), list(distinct), rows, decoding, generator)
    return [_until_end(row, decoding.end_tokens) for row in tokens.tolist()]


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """TRL's `rollout_func` by the lean sampler.

    Chance is the global generator, which TRL seeds and checkpoints keep.
    """
    tokens: list[list[int]] = trainer._tokenize_prompts(prompts)[0]
    decoding = Decoding(
        max_new_tokens=trainer.max_completion_length,
        temperature=trainer.temperature,
        end_tokens=tuple(trainer.eos_token_ids),
        pad_token=trainer.processing_class.pad_token_id,
    )
    completions = sample(trainer.accelerator.unwrap_model(trainer.model), tokens, decoding)
    return {"prompt_ids": tokens, "completion_ids": completions, "logprobs": None}


def _until_end(row: list[int], end_tokens: Sequence[int]) -> list[int]:
    for position, token in enumerate(row):
        if token in end_tokens:
            return row[: position + 1]
    return row


def _decode(
    llama: Llama,
    distinct: list[tuple[int, ...]],
    rows: Tensor,
    decoding: Decoding,
    generator: torch.Generator | None,
) -> Tensor:
    """Tokens [B, max_new_tokens]; what follows an end token is padding or arbitrary."""
    width = max(len(prompt) for prompt in distinct)
    lengths = torch.tensor([len(prompt) for prompt in distinct])
    cos, sin = llama.angles(width + decoding.max_new_tokens)
    cache = Cache(llama, len(distinct), width + decoding.max_new_tokens)
    hidden = _read_prompts(llama, distinct, lengths, (cos, sin), cache)

    hidden, lengths = hidden[rows], lengths[rows]
    cache.select(rows)
    cache.used = width
    visible = torch.arange(width + decoding.max_new_tokens) >= (width - lengths)[:, None]
    tokens = torch.full((len(rows), decoding.max_new_tokens), decoding.pad_token)
    live = torch.arange(len(rows))
    ended = torch.zeros(len(rows), dtype=torch.bool)
    ends = torch.tensor(decoding.end_tokens)
    for step in range(decoding.max_new_tokens):
        drawn = _draw(llama.logits(hidden), decoding.temperature, generator)
        tokens[live, step] = drawn
        ended |= torch.isin(drawn, ends)
        finished = int(ended.sum())
        if finished == len(live) or step == decoding.max_new_tokens - 1:
            break
        # Copying the cache costs about a step, so rows leave in batches.
        if finished > len(live) // 8:
            kept = (~ended).nonzero()[:, 0]
            live, drawn, lengths, visible = live[kept], drawn[kept], lengths[kept], visible[kept]
            ended = ended[kept]
            cache.select(kept)
        cache.mask = visible[:, None, None, : cache.used + 1]
        position = (lengths + step)[:, None]
        hidden = llama.forward(drawn[:, None], (cos[position], sin[position]), cache)
        cache.used += 1
    return tokens


def _read_prompts(
    llama: Llama,
    distinct: list[tuple[int, ...]],
    lengths: Tensor,
    angles: tuple[Tensor, Tensor],
    cache: Cache,
) -> Tensor:
    """Fill the cache with the prompts; hidden states [U, D] of their last tokens."""
    width = int(lengths.max())
    tokens = torch.zeros(len(distinct), width, dtype=torch.long)
    for row, prompt in enumerate(distinct):
        tokens[row, width - len(prompt) :] = torch.tensor(prompt)
    present = torch.arange(width) >= (width - lengths)[:, None]
    position = (torch.arange(width) - (width - lengths)[:, None]).clamp(min=0)
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    # Padding attends to itself, because a row of the mask without any entry gives NaN.
    cache.mask = ((causal & present[:, None]) | torch.eye(width, dtype=torch.bool))[:, None]
    cos, sin = angles
    return llama.forward(tokens, (cos[position], sin[position]), cache)


def _draw(logits: Tensor, temperature: float | None, generator: torch.Generator | None) -> Tensor:
    """One token a row, [rows]; inverse transform sampling, far cheaper than `multinomial`."""
    if temperature is None:
        return logits.argmax(dim=-1)
    mass = torch.softmax(logits / temperature, dim=-1).cumsum(dim=-1)
    threshold = torch.rand(len(mass), 1, generator=generator) * mass[:, -1:]
    # right=True, or a draw of exactly 0 could take a token of probability 0.
    drawn = torch.searchsorted(mass, threshold, right=True)[:, 0]
    return drawn.clamp(max=mass.shape[1] - 1)


def _generate_with_transformers(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], decoding: Decoding
) -> list[list[int]]:
    from transformers import GenerationConfig

    width = max(len(prompt) for prompt in prompts)
    tokens = torch.full((len(prompts), width), decoding.pad_token)
    present = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        tokens[row, width - len(prompt) :] = torch.tensor(prompt)
        present[row, width - len(prompt) :] = 1
    chance: dict[str, Any] = {"do_sample": False}
    if decoding.temperature is not None:
        chance = {"do_sample": True, "temperature": decoding.temperature, "top_k": 0, "top_p": 1.0}
    # What is left unset would come from the policy's own generation config.
    config = GenerationConfig(
        max_new_tokens=decoding.max_new_tokens,
        eos_token_id=list(decoding.end_tokens),
        pad_token_id=decoding.pad_token,
        repetition_penalty=1.0,
        **chance,
    )
    network: Any = model
    output: Tensor = network.generate(
        tokens.to(model.device),
        attention_mask=present.to(model.device),
        generation_config=config,
        disable_compile=True,
    )
    return [_until_end(row, decoding.end_tokens) for row in output[:, width:].tolist()]
