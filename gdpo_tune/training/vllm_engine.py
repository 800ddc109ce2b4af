"""vLLM as the engine of a trial: its arguments, its start beside the trainer, its weights.

TRL drives vLLM. This module adds what TRL lacks. Engines on one GPU start one after the other, in
the trial's share of the memory and in the precision of the training. The trial keeps its seed.
Adapters are handed over as they are, engines on a CPU get new weights too, and every engine samples
for held-out evaluation.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from accelerate.utils import set_seed
from transformers import PreTrainedModel

from gdpo_tune.core.engines import round_up_rank
from gdpo_tune.core.errors import EngineDiedError, GdpoTuneError
from gdpo_tune.core.rendezvous import RENDEZVOUS, find_free_port
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.training.engine_memory import divide_gpu
from gdpo_tune.training.gpu import lock_gpu, wait_for_memory
from gdpo_tune.training.lora import write_adapter_to_memory
from gdpo_tune.training.out_of_memory import is_out_of_memory
from gdpo_tune.training.rollout import Decoding

CPU_CACHE = 2**30
"""Bytes of the key-value cache of an engine on a CPU, where no share of a device bounds it."""
ADAPTER = ("policy", 1)
"""Name and number of the adapter in vLLM, which holds one."""


def build_engine_arguments(config: TrialConfig, model: PreTrainedModel) -> dict[str, Any]:
    """Build TRL's arguments for sampling with vLLM.

    The importance sampling correction weighs each completion or token by the ratio of its
    probabilities in trainer and engine, which differ by rounding.
    """
    settings = config.rollout
    corrects = settings.importance_sampling != "off"
    common: dict[str, Any] = {
        "use_vllm": True,
        "vllm_mode": settings.vllm_mode,
        "vllm_importance_sampling_correction": corrects,
    }
    if corrects:
        common["vllm_importance_sampling_mode"] = settings.importance_sampling
        common["vllm_importance_sampling_clip_max"] = settings.importance_sampling_cap
    if settings.vllm_mode == "server":
        return {**common, "vllm_server_base_url": settings.vllm_server}
    return {
        **common,
        # vLLM takes a share of the whole device, not of the trial's share.
        "vllm_gpu_memory_utilization": config.gpu_share * settings.vllm_memory_share,
        "vllm_max_model_length": _count_positions(config, model),
    }


@contextmanager
def prepare_engine(config: TrialConfig, model: PreTrainedModel, arguments: Any) -> Generator[None]:
    """Prepare for a trainer that the block builds and that starts an engine in this process.

    `model` is the policy, on a CPU or GPU; `arguments` are TRL's.

    Raises:
        ResourcesError: the policy does not fit into the engine's part of the GPU.
        CrowdedGpuError: other processes hold the memory that belongs to the trial's share.
    """
    trl_vllm: Any = import_module("trl.generation.vllm_generation")
    plain, environment = trl_vllm.LLM, {name: os.environ.get(name) for name in RENDEZVOUS}
    precision = "bfloat16" if arguments.bf16 else str(model.dtype).removeprefix("torch.")
    options: dict[str, Any] = {"dtype": precision, "revision": config.model.revision or None}
    needed = 0.0
    if torch.cuda.is_available():
        options["kv_cache_memory_bytes"], needed = divide_gpu(
            config,
            model,
            device=torch.cuda.mem_get_info()[1],
            length=_count_positions(config, model),
            number=2 if precision == "bfloat16" else 4,
        )
    else:
        # Compiling takes minutes on a CPU, and the cache would take a share of its memory.
        options |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_CACHE}
    if config.model.lora_rank:
        rank = round_up_rank(config.model.lora_rank)
        options |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
    # TRL tries the same few ports in every process; trials that start together would collide.
    os.environ.setdefault("MASTER_PORT", str(find_free_port()))
    # TRL has no argument for any of these.
    trl_vllm.LLM = functools.partial(plain, **options)
    try:
        with lock_gpu():
            wait_for_memory(needed)
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


def name_engine_failures(trainer: Any) -> None:
    """Let errors of a trainer's engine, colocated or a server, be raised as `EngineDiedError`."""
    generation = trainer.vllm_generation
    for name in ("generate", "sync_weights"):
        setattr(generation, name, _name_failures(getattr(generation, name), trainer))


class ColocatedEngine:
    """Engine that TRL started in this process ("colocate"), for held-out evaluation."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        generation = trainer.vllm_generation
        if hasattr(generation.model, "peft_config"):
            request = _build_adapter_request("loaded by every sync")
            generation.llm.generate = functools.partial(
                generation.llm.generate, lora_request=request
            )
            generation.sync_weights = self._send_adapter
        elif not torch.cuda.is_available():
            generation.sync_weights = self._reload_weights
        self._sample = _name_failures(generation.llm.generate, trainer)
        name_engine_failures(trainer)

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
        outputs = self._sample(inputs, settings, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def _send_adapter(self) -> None:
        """Replace the engine's adapter by the trainer's; no weight below it is written or read.

        TRL would merge the adapter into the weights: in bfloat16 small updates are rounded away,
        and the weights drift.
        """
        generation = self._trainer.vllm_generation
        with write_adapter_to_memory(generation.model) as directory:
            # Loaded once: later requests for it would load it again.
            generation.llm.llm_engine.add_lora(
                _build_adapter_request(str(directory), load_inplace=True)
            )
        generation.llm.reset_prefix_cache()

    def _reload_weights(self) -> None:
        """Send the weights on a CPU, where vLLM computes with rearranged copies of them."""
        generation = self._trainer.vllm_generation
        weights = generation._iter_named_params()  # of a sharded policy, gathered one by one
        generation.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        generation.llm.apply_model(_renew_output_heads)
        generation.llm.reset_prefix_cache()


def _count_positions(config: TrialConfig, model: PreTrainedModel) -> int:
    """Return the tokens of the longest prompt with its completion."""
    policy: Any = model.config
    longest = config.data.max_prompt_length + config.training.max_completion_length
    return min(longest, policy.max_position_embeddings)


def _build_adapter_request(path: str, *, load_inplace: bool = False) -> Any:
    """Build vLLM's request for the adapter, from a directory if it is to be loaded."""
    vllm_lora: Any = import_module("vllm.lora.request")
    return vllm_lora.LoRARequest(*ADAPTER, path, load_inplace=load_inplace)


def _name_failures(function: Callable[..., Any], trainer: Any) -> Callable[..., Any]:
    """Wrap a call of the engine to raise `EngineDiedError` with the engine's last words."""

    @functools.wraps(function)
    def call_engine(*arguments: Any, **keywords: Any) -> Any:
        try:
            return function(*arguments, **keywords)
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, GdpoTuneError):
                raise
            step = trainer.state.global_step
            raise EngineDiedError(
                f"vLLM died after {step} optimizer steps: {_read_last_words(error)}"
            ) from error

    return call_engine


def _read_last_words(error: BaseException) -> str:
    """Return type and first line of the error that came first in a chain of errors."""
    while (earlier := error.__cause__ or error.__context__) is not None:
        error = earlier
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _renew_output_heads(model: Any) -> None:
    """Renew the copies of heads tied to the embedding, which a reload by name skips."""
    layers: Any = import_module("vllm.model_executor.layers.vocab_parallel_embedding")
    for layer in model.modules():
        if isinstance(layer, layers.ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)
