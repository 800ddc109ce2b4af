"""vLLM as the engine of a trial: its arguments, its start beside the trainer, its weights.

TRL drives vLLM. This module adds what TRL lacks. Engines on one GPU start one after the other, in
the trial's share of the memory and in the precision of the training. The trial keeps its seed.
Engines on a CPU get new weights too, and every engine samples for held-out evaluation.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from accelerate.utils import set_seed
from transformers import PreTrainedModel

from gdpo_tune.core.rendezvous import RENDEZVOUS
from gdpo_tune.core.trials import TrialConfig
from gdpo_tune.training.gpu import lock_gpu
from gdpo_tune.training.rollout import Decoding

CPU_CACHE = 2**30
"""Bytes of the key-value cache of an engine on a CPU, where no share of a device bounds it."""


def build_engine_arguments(config: TrialConfig, model: PreTrainedModel) -> dict[str, Any]:
    """Build TRL's arguments for sampling with vLLM.

    The importance sampling correction weighs each completion by the ratio of its probabilities in
    trainer and engine, which differ by rounding.
    """
    settings = config.rollout
    common = {
        "use_vllm": True,
        "vllm_mode": settings.vllm_mode,
        "vllm_importance_sampling_correction": True,
    }
    if settings.vllm_mode == "server":
        return {**common, "vllm_server_base_url": settings.vllm_server}
    policy: Any = model.config
    longest = config.data.max_prompt_length + config.training.max_completion_length
    return {
        **common,
        # vLLM takes a share of the whole device, not of the trial's share.
        "vllm_gpu_memory_utilization": config.gpu_share * settings.vllm_memory_share,
        "vllm_max_model_length": min(longest, policy.max_position_embeddings),
    }


@contextmanager
def prepare_engine(config: TrialConfig, model: PreTrainedModel, arguments: Any) -> Generator[None]:
    """Prepare for a trainer that the block builds and that starts an engine in this process.

    `model` is the policy, on a CPU or GPU; `arguments` are TRL's.
    """
    trl_vllm: Any = import_module("trl.generation.vllm_generation")
    plain, environment = trl_vllm.LLM, {name: os.environ.get(name) for name in RENDEZVOUS}
    precision = "bfloat16" if arguments.bf16 else str(model.dtype).removeprefix("torch.")
    options: dict[str, Any] = {"dtype": precision, "revision": config.model.revision or None}
    if not torch.cuda.is_available():
        # Compiling takes minutes on a CPU, and the cache would take a share of its memory.
        options |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_CACHE}
    # TRL has no argument for any of these.
    trl_vllm.LLM = functools.partial(plain, **options)
    try:
        with lock_gpu():
            yield
    finally:
        trl_vllm.LLM = plain
        # TRL sets these for the engine. With them, the next trainer in this process would expect
        # several processes.
        for name, value in environment.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
    # An engine seeds the process with 0; all trials would sample the same.
    set_seed(config.seed, device_specific=True)


class ColocatedEngine:
    """Engine that TRL started in this process ("colocate"), for held-out evaluation."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        if not torch.cuda.is_available():
            trainer.vllm_generation.sync_weights = self._reload_weights

    def generate(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Sequence[int]],
        decoding: Decoding,
        generator: torch.Generator,
    ) -> list[list[int]]:
        """Sample with the trainer's present weights; see `rollout.Generate`."""
        vllm: Any = import_module("vllm")
        step = self._trainer.state.global_step
        if self._trainer._last_loaded_step != step:  # TRL and evaluations send weights once a step
            self._trainer.vllm_generation.sync_weights()
            self._trainer._last_loaded_step = step
        seeds = torch.randint(2**31, (len(prompts),), generator=generator).tolist()
        settings = [
            vllm.SamplingParams(
                temperature=decoding.temperature or 0.0,
                max_tokens=decoding.max_new_tokens,
                stop_token_ids=list(decoding.end_tokens),
                seed=seed,
            )
            for seed in seeds
        ]
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self._trainer.vllm_generation.llm.generate(inputs, settings, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def _reload_weights(self) -> None:
        """Send the weights on a CPU, where vLLM computes with rearranged copies of them."""
        generation = self._trainer.vllm_generation
        # Copies, because adapters are merged into the weights only while they are iterated over.
        weights = [(name, value.clone()) for name, value in generation._iter_named_params()]
        generation.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        generation.llm.apply_model(_renew_output_heads)
        generation.llm.reset_prefix_cache()


def _renew_output_heads(model: Any) -> None:
    """Renew the copies of heads tied to the embedding, which a reload by name skips."""
    layers: Any = import_module("vllm.model_executor.layers.vocab_parallel_embedding")
    for layer in model.modules():
        if isinstance(layer, layers.ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)
