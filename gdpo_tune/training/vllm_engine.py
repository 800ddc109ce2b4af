"""vLLM as the engine of a trial: its arguments, and its start beside the trainer.

TRL starts vLLM. This module adds what TRL lacks. The process keeps its engine for the next trial.
Engines on one GPU start one after the other, in the trial's share of the memory and in the
precision of the training. The trial keeps its seed.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from accelerate.utils import set_seed
from transformers import PreTrainedModel

from gdpo_tune.core.engines import round_up_rank
from gdpo_tune.core.errors import EngineError
from gdpo_tune.core.policy_shapes import find_position_limit
from gdpo_tune.core.system import RENDEZVOUS, find_free_port
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.training import distributed
from gdpo_tune.training.engine import OF_PROCESS, EnginePool, Seat
from gdpo_tune.training.engine_memory import divide_gpu
from gdpo_tune.training.memory import lock_gpu, wait_for_memory

CPU_CACHE = 2**30
"""Bytes of the key-value cache of an engine on a CPU, where no share of a device bounds it."""


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
def prepare_engine(
    config: TrialConfig,
    model: PreTrainedModel,
    arguments: Any,
    policy: str = "",
    source: EnginePool = OF_PROCESS,
) -> Generator[None]:
    """Prepare for a trainer that the block builds and that opens an engine in this process.

    That is the engine of an earlier trial if nothing differs on which it depends.

    Args:
        config: the trial.
        model: the policy, on a CPU or GPU.
        arguments: TRL's.
        policy: digest of the policy.
        source: where the engine comes from.

    Raises:
        ResourcesError: the policy does not fit into the engine's part of the GPU.
        CrowdedGpuError: other processes hold the memory that belongs to the trial's share.
        EngineMemoryError: an engine of an earlier trial was closed, and holds memory.
    """
    trl_vllm: Any = import_module("trl.generation.vllm_generation")
    plain, environment = trl_vllm.LLM, {name: os.environ.get(name) for name in RENDEZVOUS}
    options, needed = _choose_options(config, model, source, bfloat16=arguments.bf16)
    # From these TRL takes its own arguments of an engine.
    of_trl = build_engine_arguments(config, model), config.training.completions_per_step
    facts = policy, model.name_or_path, options, *of_trl, config.threads, distributed.get_rank()
    key = repr(facts) if config.rollout.reuse_engine else None
    if not source.has(key):
        source.close()

    def open_engine(**arguments: Any) -> Seat:
        def start() -> Any:
            llm = plain(**{**arguments, **options})
            if not torch.cuda.is_available():
                llm.collective_rpc(_draw_from_seeds_alone)
            return llm

        return source.open(key, start, config.threads)

    # TRL tries the same few ports in every process; trials that start together would collide.
    os.environ.setdefault("MASTER_PORT", str(find_free_port()))
    trl_vllm.LLM = open_engine
    try:
        with lock_gpu():
            if not source.has(key):
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


def _choose_options(
    config: TrialConfig, model: PreTrainedModel, source: EnginePool, *, bfloat16: bool
) -> tuple[dict[str, Any], float]:
    """Choose vLLM's options for which TRL has no argument, and the bytes that a start needs."""
    precision = "bfloat16" if bfloat16 else str(model.dtype).removeprefix("torch.")
    options: dict[str, Any] = {"dtype": precision, "revision": config.model.revision or None}
    needed, rank = 0.0, source.largest_rank or config.model.lora_rank
    if source.seats > 1:
        options["max_num_seqs"] = source.seats * config.training.completions_per_step
    if config.rollout.sleep:
        if not torch.cuda.is_available():
            raise EngineError(
                "rollout.sleep = true: vLLM on a CPU has no sleep mode\n"
                "    fix: --set rollout.sleep=false, or train on a GPU"
            )
        options["enable_sleep_mode"] = True
    if torch.cuda.is_available():
        options["kv_cache_memory_bytes"], needed = divide_gpu(
            config,
            model,
            device=torch.cuda.mem_get_info()[1],
            length=_count_positions(config, model),
            number=2 if precision == "bfloat16" else 4,
            trials=source.seats,
            rank=rank,
        )
    else:
        # Compiling takes minutes on a CPU, and the cache would take a share of its memory.
        options |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_CACHE}
    if rank:
        options |= {"enable_lora": True, "max_loras": source.seats}
        options["max_lora_rank"] = round_up_rank(rank)
    return options, needed


def _count_positions(config: TrialConfig, model: PreTrainedModel) -> int:
    """Return the tokens of the longest prompt with its completion."""
    longest = config.data.max_prompt_length + config.training.max_completion_length
    return min(longest, find_position_limit(model.config.to_dict()) or longest)


def _draw_from_seeds_alone(worker: Any) -> None:
    """Let a CPU's sampler leave the global generator alone, as that of a GPU does.

    Its own draws numbers there too, which it drops where a request has a seed. They would change
    what a trial draws that trains at this moment.
    """
    sampler = worker.model_runner.sampler.topk_topp_sampler
    sampler.forward = sampler.forward_native
