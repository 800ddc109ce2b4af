"""Sampling of completions: the interface of every engine, and the choice among them.

TRL itself drives vLLM. Without it, `generate` samples, in training as its `rollout_func`: small
policies by the fast CPU sampler, other decoders from a cache that holds each distinct prompt once,
and the rest by Transformers.

Shapes: B completions of U distinct prompts, W positions of the longest prompt, E entries of the
vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from gdpo_tune.core.engines import EngineName, check_compiler, find_vllm, select_engine
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.policies.load_policy import takes_argument
from gdpo_tune.training.decoding import (
    Decoding,
    cut_after_end,
    draw_completions,
    keep_random_state,
    pad_left,
)
from gdpo_tune.training.distributed import gather_weights
from gdpo_tune.training.fast_cpu import LlamaDecoder, is_small_llama
from gdpo_tune.training.shared_prompts import PromptDecoder, find_obstacle
from gdpo_tune.training.trl_arguments import uses_bfloat16

Generate = Callable[
    [PreTrainedModel, Sequence[Sequence[int]], Decoding, torch.Generator], list[list[int]]
]
"""Policy, B tokenized prompts, settings, source of randomness on the CPU -> B completions.

Each completion has at least one token and ends with its end token, unless it was cut. The policy's
mode and the global random state stay as they are. Processes that share a policy call it equally
often, if need be without prompts."""


def choose_engine(config: TrialConfig, model: PreTrainedModel) -> EngineName:
    """Choose the engine that samples during training.

    Raises:
        EngineError: the configuration asks for vLLM, which is not available; or there is a GPU and
            no usable C compiler.
    """
    gpu = torch.cuda.is_available()  # where the policy goes once the trainer is built
    if gpu:
        check_compiler()
    bfloat16 = uses_bfloat16(config)
    plain = not config.model.lora_rank and not bfloat16
    fits_fast_cpu = plain and not gpu and is_small_llama(model)
    return select_engine_here(config, has_fast_cpu=fits_fast_cpu, bfloat16=bfloat16)


def select_engine_here(
    config: TrialConfig, *, has_fast_cpu: bool = False, bfloat16: bool = True
) -> EngineName:
    """Choose an engine for this process; see `select_engine`."""
    return select_engine(
        config.rollout,
        gpu=torch.cuda.is_available(),
        has_fast_cpu=has_fast_cpu,
        vllm=find_vllm(),
        lora_rank=config.model.lora_rank,
        bfloat16=bfloat16,
    )


def uses_engine_in_process(config: TrialConfig) -> bool:
    """Return whether vLLM samples during training in the trainer's process; see `select_engine`."""
    return select_engine_here(config) == "vllm" and config.rollout.vllm_mode == "colocate"


def choose_held_out_sampler(config: TrialConfig) -> Generate:
    """Choose the sampler of held-out completions without vLLM, in the training's precision."""
    return functools.partial(generate, bfloat16=uses_bfloat16(config))


def sample_for_trainer(prompts: list[str], trainer: Any, *, fast: bool = True) -> dict[str, Any]:
    """Sample a step's completions without vLLM, as TRL's `rollout_func`.

    They are drawn from the global generator, which TRL seeds and checkpoints keep. `fast` allows
    the fast CPU sampler.
    """
    tokens: list[list[int]] = trainer._tokenize_prompts(prompts)[0]
    completions = sample_turn(tokens, trainer, fast=fast)
    return {"prompt_ids": tokens, "completion_ids": completions, "logprobs": None}


def sample_turn(
    tokens: Sequence[Sequence[int]], trainer: Any, *, fast: bool = True
) -> list[list[int]]:
    """Sample a turn of a trainer's policy; see `sample_for_trainer`."""
    policy = trainer.model
    decoding = Decoding(
        trainer.max_completion_length,
        trainer.temperature,
        tuple(trainer.eos_token_ids),
        trainer._tokenizer.pad_token_id,
    )
    return generate(policy, tokens, decoding, None, bfloat16=trainer.args.bf16, fast=fast)


def generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    generator: torch.Generator | None,
    *,
    bfloat16: bool = False,
    fast: bool = True,
) -> list[list[int]]:
    """Sample from any policy in the fastest way that supports it; see `Generate`.

    Without a generator of its own, it draws from the global one. Without `fast`, Transformers
    computes the policy even where the fast CPU sampler could.
    """
    precision = torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=bfloat16)
    with gather_weights(model), precision:
        if not prompts:
            return []
        if fast and is_small_llama(model):
            decoder = LlamaDecoder(model, prompts, decoding.max_new_tokens)
            return draw_completions(decoder, decoding, generator)
        training = model.training
        model.eval()
        # However many chunks there are, the generator moves equally far.
        seed = int(torch.randint(2**62, (1,), generator=generator))
        way = sample_from_cache if keeps_simple_cache(model) else _generate_with_transformers
        own = torch.Generator().manual_seed(seed)
        draw = functools.partial(way, model, decoding=decoding, generator=own)
        completions = sample_in_chunks(draw, prompts, decoding.max_new_tokens)
        model.train(training)
        return completions


def uses_fast_cpu(trainer: Any) -> bool:
    """Return whether the fast CPU sampler draws a trainer's completions."""
    fast = getattr(trainer.rollout_func, "keywords", {}).get("fast", True)
    return trainer.rollout_func is not None and fast and is_small_llama(trainer.model)


def keeps_simple_cache(model: Any) -> bool:
    """Return whether `sample_from_cache` supports a policy: all it remembers is keys and values."""
    shares_layers = getattr(model.config.get_text_config(), "num_kv_shared_layers", 0)
    return not (find_obstacle(model) or shares_layers) and takes_argument(model, "position_ids")


@torch.no_grad()
def sample_from_cache(
    model: Any,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    generator: torch.Generator | None = None,
    scores: list[Tensor] | None = None,
) -> list[list[int]]:
    """Sample B completions of a policy in evaluation mode; see `PromptDecoder`."""
    decoder = PromptDecoder(model, prompts, decoding.pad_token)
    return draw_completions(decoder, decoding, generator, scores)


def _generate_with_transformers(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    generator: torch.Generator,
) -> list[list[int]]:
    tokens, present = pad_left(prompts, decoding.pad_token)
    width = tokens.shape[1]
    drawing: dict[str, Any] = {"do_sample": False}
    if decoding.temperature is not None:
        drawing = {"do_sample": True, "temperature": decoding.temperature, "top_k": 0, "top_p": 1.0}
    # The model's own config is neutral (`build_neutral_decoding`).
    config = GenerationConfig(
        max_new_tokens=decoding.max_new_tokens,
        eos_token_id=list(decoding.end_tokens),
        pad_token_id=decoding.pad_token,
        **drawing,
    )
    network: Any = model
    with keep_random_state(model.device):
        torch.manual_seed(int(torch.randint(2**62, (1,), generator=generator)))
        output: Tensor = network.generate(
            tokens.to(model.device),
            attention_mask=present.long().to(model.device),
            generation_config=config,
            disable_compile=True,
        )
    return [cut_after_end(row, decoding.end_tokens) for row in output[:, width:].tolist()]


TOKENS_AT_ONCE = 2**17
"""Tokens, of prompts and completions, that Transformers holds at once: 42 completions of 2,048 +
1,024 tokens. Their keys and values take 6 GB for a policy of 1.5 billion parameters."""


def sample_in_chunks(
    sample: Callable[[Sequence[Sequence[int]]], list[list[int]]],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
) -> list[list[int]]:
    """Sample B completions, at most `TOKENS_AT_ONCE` at a time.

    Where a GPU has less memory, a chunk that runs out of it is sampled again in halves, and later
    ones are as small.

    Raises:
        torch.OutOfMemoryError: a single completion does not fit.
    """
    longest = max(map(len, prompts), default=0) + max_new_tokens
    rows = max(1, TOKENS_AT_ONCE // longest)
    completions: list[list[int]] = []
    while len(completions) < len(prompts):
        chunk = prompts[len(completions) : len(completions) + rows]
        try:
            completions += sample(chunk)
            continue
        except torch.OutOfMemoryError:
            if len(chunk) == 1:
                raise
        # Only here: the error held the tensors of the chunk.
        torch.cuda.empty_cache()
        rows = len(chunk) // 2
    return completions
