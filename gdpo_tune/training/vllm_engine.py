"""vLLM as the engine of a trial: its arguments, its start beside the trainer, and its use.

TRL starts vLLM. This module adds what TRL lacks. The process keeps its engine for the next trial.
Engines on one GPU start one after the other, in the trial's share of the memory and in the
precision of the training. The trial keeps its seed.
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

from gdpo_tune.core.engines import V2_RUNNER, find_vllm, round_up_rank
from gdpo_tune.core.errors import (
    EngineDiedError,
    EngineError,
    GdpoTuneError,
    ResourcesError,
    TrialFailure,
)
from gdpo_tune.core.files import list_causes
from gdpo_tune.core.gpu_memory import CUDA_CONTEXT_BYTES, GIB, MOST_SEQUENCES
from gdpo_tune.core.policy_shapes import find_position_limit
from gdpo_tune.core.system import RENDEZVOUS, find_free_port
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.training import distributed
from gdpo_tune.training.decoding import Decoding
from gdpo_tune.training.engine import PROCESS_ENGINE, Engine, SampleRequest, forget_prompts, wake_up
from gdpo_tune.training.lora import write_adapter_to_memory
from gdpo_tune.training.memory import estimate_memory, is_out_of_memory, lock_gpu, wait_for_memory

CPU_CACHE = 2**30
"""Bytes of the cache of an engine on a CPU, where no share of a device bounds it."""


def build_engine_arguments(config: TrialConfig, model: PreTrainedModel) -> dict[str, Any]:
    """Build TRL's arguments for sampling with vLLM.

    The importance sampling correction weighs each completion or token by the ratio of its
    probabilities in trainer and engine, which differ by rounding.
    """
    settings = config.rollout
    corrects = settings.importance_sampling != "off"
    ends: Any = getattr(model.generation_config, "eos_token_id", None)
    arguments: dict[str, Any] = {
        "use_vllm": True,
        "vllm_mode": settings.vllm_mode,
        "vllm_importance_sampling_correction": corrects,
        # By itself, vLLM knows those of the policy's files alone.
        "generation_kwargs": {"stop_token_ids": ends if isinstance(ends, list) else [ends]},
    }
    if corrects:
        arguments["vllm_importance_sampling_mode"] = settings.importance_sampling
        arguments["vllm_importance_sampling_clip_max"] = settings.importance_sampling_cap
    if settings.vllm_mode == "server":
        return {**arguments, "vllm_server_base_url": settings.vllm_server}
    longest = config.data.max_prompt_length + config.training.max_completion_length
    limit = find_position_limit(model.config.to_dict()) or longest
    return {
        **arguments,
        # vLLM takes a share of the whole device, not of the trial's share.
        "vllm_gpu_memory_utilization": config.gpu_share * settings.vllm_memory_share,
        "vllm_max_model_length": min(longest, limit),
    }


@contextmanager
def prepare_engine(
    config: TrialConfig, model: PreTrainedModel, arguments: Any, policy: str = ""
) -> Generator[None]:
    """Prepare for a trainer that the block builds and that opens an engine.

    That is the engine of an earlier trial if nothing differs on which it depends: `model`, TRL's
    `arguments`, and `policy`, the digest of the weights.

    Raises:
        ResourcesError: the engine's part of the GPU has no room for the policy and a completion.
        CrowdedGpuError: other processes hold the memory that belongs to the trial's share.
        EngineMemoryError: an engine of an earlier trial was closed, and holds memory.
    """
    trl_vllm: Any = import_module("trl.generation.vllm_generation")
    plain, environment = trl_vllm.LLM, {name: os.environ.get(name) for name in RENDEZVOUS}
    options, needed = _choose_options(config, model, bfloat16=arguments.bf16)
    # From these TRL takes its own arguments of an engine.
    of_trl = build_engine_arguments(config, model), config.training.completions_per_step
    facts = policy, model.name_or_path, options, *of_trl, config.threads, distributed.get_rank()
    key = repr(facts) if config.rollout.reuse_engine else None
    if not PROCESS_ENGINE.has(key):
        PROCESS_ENGINE.close()

    def open_engine(**arguments: Any) -> Engine:
        def start() -> Any:
            llm = plain(**{**arguments, **options})
            if not torch.cuda.is_available():
                llm.collective_rpc(_draw_from_seeds_alone)
            return llm

        return PROCESS_ENGINE.open(key, start, config.threads)

    # TRL tries the same few ports in every process; trials that start together would collide.
    os.environ.setdefault("MASTER_PORT", str(find_free_port()))
    if torch.cuda.is_available() and (number := torch.cuda.current_device()):
        # What vLLM compiles is of one device of a process, and its cache tells ranks apart alone.
        root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        os.environ.setdefault("VLLM_CACHE_ROOT", f"{root}/vllm/device-{number}")
    trl_vllm.LLM = open_engine
    try:
        with lock_gpu():
            if not PROCESS_ENGINE.has(key):
                wait_for_memory(needed)
            yield
    finally:
        trl_vllm.LLM = plain
        # TRL sets these for the engine; the next trainer in this process would expect several.
        for name, value in environment.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
    # An engine seeds the process with 0; all trials would sample the same.
    set_seed(config.seed, device_specific=True)


def _choose_options(
    config: TrialConfig, model: PreTrainedModel, *, bfloat16: bool
) -> tuple[dict[str, Any], float]:
    """Choose vLLM's options for which TRL has no argument, and the bytes that a start needs."""
    precision = "bfloat16" if bfloat16 else str(model.dtype).removeprefix("torch.")
    options: dict[str, Any] = {"dtype": precision, "revision": config.model.revision or None}
    needed, rank = 0.0, config.largest_rank
    options["max_num_seqs"] = min(
        config.training.completions_per_step // distributed.count_processes(), MOST_SEQUENCES
    )
    if config.rollout.sleep:
        if not torch.cuda.is_available():
            raise EngineError(
                "rollout.sleep = true: vLLM on a CPU has no sleep mode\n"
                "    fix: --set rollout.sleep=false, or train on a GPU"
            )
        options["enable_sleep_mode"] = True
    if torch.cuda.is_available():
        vllm = find_vllm()
        if vllm is not None and vllm.needs_v2_variable and model.config.model_type == "qwen2":
            os.environ.setdefault(V2_RUNNER, "1")  # it stays, because vLLM reads it again later
        options["kv_cache_memory_bytes"], needed = _divide_gpu(config, model)
    else:
        # Compiling takes minutes on a CPU, and the cache would take a share of its memory.
        options |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_CACHE}
    if rank:
        options |= {"enable_lora": True, "max_loras": 1}
        options["max_lora_rank"] = round_up_rank(rank)
    return options, needed


def _divide_gpu(config: TrialConfig, model: PreTrainedModel) -> tuple[int, float]:
    """Return the bytes of the engine's cache, and those that must be free before it starts.

    Left alone, vLLM measures the whole device while it starts, and takes what a neighbour allocates
    meanwhile for its own. Neighbours that keep to their shares leave the trial its own, less the
    contexts of CUDA. The trainer moves its weights to the GPU before the engine starts: those that
    are still in the machine's memory, or of a divided policy the part of this process.
    """
    memory, device = estimate_memory(config, model), torch.cuda.mem_get_info()[1]
    engine, share = memory.engine, config.rollout.vllm_memory_share
    part = int(config.gpu_share * share * device)
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
    moved = sum(w.nbytes for w in model.parameters() if w.device.type == "cpu")
    if config.sharded:
        moved //= distributed.count_processes()
    return cache, min(part + moved, config.gpu_share * device - 2 * CUDA_CONTEXT_BYTES)


def _draw_from_seeds_alone(worker: Any) -> None:
    """Let a CPU's sampler leave the global generator alone, as that of a GPU does.

    Its own draws there too, and drops the draws where a request has a seed. They would change what
    a trial draws that trains at this moment.
    """
    sampler = worker.model_runner.sampler.topk_topp_sampler
    sampler.forward = sampler.forward_native


def name_engine_failures(trainer: Any) -> None:
    """Let errors of a trainer's engine, colocated or a server, be raised as `EngineDiedError`."""
    generation = trainer.vllm_generation
    for name in ("generate", "sync_weights"):
        setattr(generation, name, _name_failures(getattr(generation, name), trainer))


class ColocatedEngine:
    """Engine that TRL opened in the trainer's process ("colocate"), as one trial uses it.

    Each completion has its own seed. Adapters are handed over as they are, engines on a CPU get new
    weights too, and the engine also samples for held-out evaluation.
    """

    def __init__(self, trainer: Any, *, sleeps: bool = False) -> None:
        """Sample for this trainer; `sleeps`: the engine has no memory while a step is computed."""
        self._trainer = trainer
        generation = trainer.vllm_generation
        self._engine: Engine = generation.llm
        self._syncs = 0
        if hasattr(generation.model, "peft_config"):
            synchronize = self._send_adapter
        elif torch.cuda.is_available():
            synchronize = generation.sync_weights
        else:
            synchronize = self._reload_weights

        def wake_and_synchronize() -> None:
            wake_up(self._engine.llm)
            synchronize()

        generation.sync_weights = functools.partial(self._engine.run, wake_and_synchronize)
        generation.llm = self._steps = _StepSampler(self._engine, trainer, sleeps=sleeps)
        self._sample = _name_failures(self._engine.generate, trainer)
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
                    detokenize=False,
                ),
                self._steps.adapter,
            )
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        return [list(output.outputs[0].token_ids) for output in self._sample(requests)]

    def _send_adapter(self) -> None:
        """Replace the engine's adapter by the trainer's; no weight below it is written or read.

        TRL would merge the adapter into the weights: in bfloat16 small updates are rounded away,
        and the weights drift.
        """
        llm = self._engine.llm
        vllm_lora: Any = import_module("vllm.lora.request")
        self._syncs += 1
        name = f"policy-{self._syncs}"  # part of the key of a cached prompt
        with write_adapter_to_memory(self._trainer.vllm_generation.model) as directory:
            path = str(directory)
            request = vllm_lora.LoRARequest(name, 1, path, load_inplace=True)
            if llm.llm_engine.add_lora(request) is not True:
                raise TrialFailure(
                    "vLLM has refused the adapter, and would sample without it\n"
                    "    fix: --set rollout.engine=transformers, or --set model.lora_rank=0"
                )
        # It is loaded: these requests would load it again, and its directory is gone.
        self._steps.adapter = vllm_lora.LoRARequest(name, 1, path, load_inplace=False)
        forget_prompts(llm)

    def _reload_weights(self) -> None:
        """Send the weights on a CPU, where vLLM computes with rearranged copies of them."""
        llm = self._engine.llm
        weights = self._trainer.vllm_generation._iter_named_params()  # gathered one by one
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        llm.apply_model(_renew_output_heads)
        forget_prompts(llm)


def _renew_output_heads(model: Any) -> None:
    """Renew the copies of heads tied to the embedding, which a reload by name skips."""
    layers: Any = import_module("vllm.model_executor.layers.vocab_parallel_embedding")
    for layer in model.modules():
        if isinstance(layer, layers.ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)


class _StepSampler:
    """The engine as TRL calls it for the completions of a step."""

    def __init__(self, engine: Engine, trainer: Any, *, sleeps: bool) -> None:
        self._sleeps = sleeps
        self.engine, self._trainer = engine, trainer
        self.adapter: Any = None
        """vLLM's request of the adapter that the latest sync has loaded, if any."""
        self._tokenizer: Any = None
        if trainer.judges_early:
            self._tokenizer = _copy_tokenizer(trainer.processing_class)

    @property
    def llm_engine(self) -> Any:
        return self.engine.llm.llm_engine

    def reset_prefix_cache(self) -> None:
        self.engine.run(forget_prompts, self.engine.llm)

    def generate(
        self, prompts: Sequence[Any], *, sampling_params: Any, use_tqdm: bool
    ) -> list[Any]:
        """Sample one completion for each prompt, by a seed drawn from the global generator.

        So completions depend neither on what was sampled before nor beside them.
        """
        del use_tqdm
        requests: list[SampleRequest] = []
        seeds = torch.randint(2**31, (len(prompts),)).tolist()
        for prompt, seed in zip(prompts, seeds, strict=True):
            seeded = copy.copy(sampling_params)
            seeded.seed, seeded.detokenize = seed, False
            requests.append(SampleRequest(prompt["prompt_token_ids"], seeded, self.adapter))

        def note_sampled(row: int, output: Any) -> None:
            tokens = [list(output.outputs[0].token_ids)]
            (text,) = self._tokenizer.batch_decode(tokens, skip_special_tokens=True)
            self._trainer.note_sampled(row, text)

        outputs = self.engine.generate(requests, note_sampled if self._tokenizer else None)
        if self._sleeps:
            self.engine.run(self.engine.llm.sleep, level=1)  # weights go to the machine's memory
        return outputs


@functools.lru_cache(maxsize=1)
def _copy_tokenizer(tokenizer: Any) -> Any:
    """Copy a tokenizer for the engine's thread: no two threads may use one at a time."""
    return copy.deepcopy(tokenizer)


def _name_failures(function: Callable[..., Any], trainer: Any) -> Callable[..., Any]:
    """Wrap a call of the engine to raise `EngineDiedError` with the engine's last words."""

    @functools.wraps(function)
    def call_engine(*arguments: Any, **keywords: Any) -> Any:
        try:
            return function(*arguments, **keywords)
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, GdpoTuneError):
                raise
            *_, first = list_causes(error)
            lines = str(first).strip().splitlines()
            words = f"{type(first).__name__}: {lines[0]}" if lines else type(first).__name__
            step = trainer.state.global_step
            raise EngineDiedError(f"vLLM died after {step} optimizer steps: {words}") from error

    return call_engine
