"""vLLM as the engine of a trial: its arguments, its start beside the trainer, its weights.

TRL drives vLLM. This module adds what TRL lacks. The process keeps its engine for the next trial.
Engines on one GPU start one after the other, in the trial's share of the memory and in the
precision of the training. The trial keeps its seed, and each completion has its own. Adapters are
handed over as they are, engines on a CPU get new weights too, and every engine samples for held-out
evaluation.
"""

from __future__ import annotations

import copy
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
from gdpo_tune.core.errors import EngineDiedError, EngineError, GdpoTuneError
from gdpo_tune.core.rendezvous import RENDEZVOUS, find_free_port
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.training import ranks
from gdpo_tune.training.engine_memory import divide_gpu
from gdpo_tune.training.gpu import lock_gpu, wait_for_memory
from gdpo_tune.training.live_engine import (
    OF_PROCESS,
    EngineSource,
    SampleRequest,
    TrialEngine,
    fall_asleep,
    wake_up,
)
from gdpo_tune.training.lora import write_adapter_to_memory
from gdpo_tune.training.out_of_memory import is_out_of_memory
from gdpo_tune.training.rollout import Decoding

CPU_CACHE = 2**30
"""Bytes of the key-value cache of an engine on a CPU, where no share of a device bounds it."""
ADAPTER = "policy"
"""Beginning of an adapter's name in vLLM; its number follows."""


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
    source: EngineSource = OF_PROCESS,
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
    facts = policy, model.name_or_path, options, *of_trl, config.threads, ranks.get_rank()
    key = repr(facts) if config.rollout.reuse_engine else None
    if not source.has(key):
        source.close()

    def open_engine(**arguments: Any) -> TrialEngine:
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
    config: TrialConfig, model: PreTrainedModel, source: EngineSource, *, bfloat16: bool
) -> tuple[dict[str, Any], float]:
    """Choose vLLM's options for which TRL has no argument, and the bytes that a start needs."""
    precision = "bfloat16" if bfloat16 else str(model.dtype).removeprefix("torch.")
    options: dict[str, Any] = {"dtype": precision, "revision": config.model.revision or None}
    needed, rank = 0.0, source.largest_rank or config.model.lora_rank
    if source.slots > 1:
        options["max_num_seqs"] = source.slots * config.training.completions_per_step
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
            trials=source.slots,
            rank=rank,
        )
    else:
        # Compiling takes minutes on a CPU, and the cache would take a share of its memory.
        options |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_CACHE}
    if rank:
        options |= {"enable_lora": True, "max_loras": source.slots}
        options["max_lora_rank"] = round_up_rank(rank)
    return options, needed


def name_engine_failures(trainer: Any) -> None:
    """Let errors of a trainer's engine, colocated or a server, be raised as `EngineDiedError`."""
    generation = trainer.vllm_generation
    for name in ("generate", "sync_weights"):
        setattr(generation, name, _name_failures(getattr(generation, name), trainer))


class ColocatedEngine:
    """Engine that TRL opened in this process ("colocate"), as one trial uses it."""

    def __init__(self, trainer: Any, *, sleeps: bool = False) -> None:
        """Sample for this trainer; `sleeps`: the engine has no memory while a step is computed."""
        self._trainer = trainer
        generation = trainer.vllm_generation
        self._live: TrialEngine = generation.llm
        self._adapter: Any = None
        if hasattr(generation.model, "peft_config"):
            self._adapter = self._build_adapter_request("loaded by every sync")
            synchronize = self._send_adapter
        elif torch.cuda.is_available():
            synchronize = generation.sync_weights
        else:
            synchronize = self._reload_weights
        generation.sync_weights = functools.partial(self._live.run, self._wake_and, synchronize)
        generation.llm = _StepSampler(self._live, self._adapter, trainer, sleeps=sleeps)
        self._sample = _name_failures(self._live.generate, trainer)
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
        requests = [
            SampleRequest(
                prompt,
                vllm.SamplingParams(
                    temperature=decoding.temperature or 0.0,
                    max_tokens=decoding.max_new_tokens,
                    stop_token_ids=list(decoding.end_tokens),
                    seed=seed,
                ),
                self._adapter,
            )
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        outputs = self._sample(requests)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def _wake_and(self, synchronize: Callable[[], None]) -> None:
        wake_up(self._live.llm)
        synchronize()

    def _send_adapter(self) -> None:
        """Replace the engine's adapter by the trainer's; no weight below it is written or read.

        TRL would merge the adapter into the weights: in bfloat16 small updates are rounded away,
        and the weights drift.
        """
        with write_adapter_to_memory(self._trainer.vllm_generation.model) as directory:
            # Loaded once: later requests for it would load it again.
            self._live.llm_engine.add_lora(
                self._build_adapter_request(str(directory), load_inplace=True)
            )
        self._live.reset_prefix_cache()

    def _build_adapter_request(self, path: str, *, load_inplace: bool = False) -> Any:
        """Build vLLM's request for the adapter, from a directory if it is to be loaded."""
        vllm_lora: Any = import_module("vllm.lora.request")
        number = self._live.adapter
        return vllm_lora.LoRARequest(f"{ADAPTER}-{number}", number, path, load_inplace=load_inplace)

    def _reload_weights(self) -> None:
        """Send the weights on a CPU, where vLLM computes with rearranged copies of them."""
        llm = self._live.llm
        weights = self._trainer.vllm_generation._iter_named_params()  # gathered one by one
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        llm.apply_model(_renew_output_heads)
        self._live.reset_prefix_cache()


class _StepSampler:
    """The engine as TRL calls it for the completions of a step."""

    def __init__(self, engine: TrialEngine, adapter: Any, trainer: Any, *, sleeps: bool) -> None:
        self._sleeps = sleeps
        self.engine, self._adapter, self._trainer = engine, adapter, trainer
        self._tokenizer = (
            _copy_tokenizer(trainer.processing_class) if trainer.judges_early else None
        )

    @property
    def llm_engine(self) -> Any:
        return self.engine.llm_engine

    def reset_prefix_cache(self) -> None:
        self.engine.reset_prefix_cache()

    def generate(
        self, prompts: Sequence[Any], *, sampling_params: Any, use_tqdm: bool
    ) -> list[Any]:
        """Sample one completion for each prompt, by a seed drawn from the global generator.

        So completions depend neither on what was sampled before nor beside them.
        """
        del use_tqdm
        seeds = torch.randint(2**31, (len(prompts),)).tolist()
        requests = [
            SampleRequest(
                prompt["prompt_token_ids"], _set_seed(sampling_params, seed), self._adapter
            )
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]

        outputs = self.engine.generate(requests, self._note if self._tokenizer else None)
        if self._sleeps:
            self.engine.run(fall_asleep, self.engine.llm)
        return outputs

    def _note(self, row: int, output: Any) -> None:
        tokens = [list(output.outputs[0].token_ids)]
        assert self._tokenizer is not None, "the trainer does not judge early"
        (text,) = self._tokenizer.batch_decode(tokens, skip_special_tokens=True)
        self._trainer.note_sampled(row, text)


@functools.lru_cache(maxsize=1)
def _copy_tokenizer(tokenizer: Any) -> Any:
    """Copy a tokenizer for the engine's thread: no two threads may use one at a time."""
    return copy.deepcopy(tokenizer)


def _set_seed(sampling_params: Any, seed: int) -> Any:
    seeded = copy.copy(sampling_params)
    seeded.seed = seed
    return seeded


def _count_positions(config: TrialConfig, model: PreTrainedModel) -> int:
    """Return the tokens of the longest prompt with its completion."""
    policy: Any = model.config
    longest = config.data.max_prompt_length + config.training.max_completion_length
    return min(longest, policy.max_position_embeddings)


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


def _draw_from_seeds_alone(worker: Any) -> None:
    """Let a CPU's sampler leave the global generator alone, as that of a GPU does.

    Its own draws numbers there too, which it drops where a request has a seed. They would change
    what a trial draws that trains at this moment.
    """
    sampler = worker.model_runner.sampler.topk_topp_sampler
    sampler.forward = sampler.forward_native


def _renew_output_heads(model: Any) -> None:
    """Renew the copies of heads tied to the embedding, which a reload by name skips."""
    layers: Any = import_module("vllm.model_executor.layers.vocab_parallel_embedding")
    for layer in model.modules():
        if isinstance(layer, layers.ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)
