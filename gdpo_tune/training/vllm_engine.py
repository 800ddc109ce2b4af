"""vLLM as the engine of a trial: its start beside the trainer, its weights, and what it samples.

TRL drives vLLM. Added here is what TRL leaves open: engines of one GPU start one after the other
and within the trial's share of its memory, compute in the precision of the training, leave the
trial's seed as it was, get weights on a CPU too, and sample for held-out evaluation.
"""

from __future__ import annotations

import fcntl
import functools
import os
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from transformers import PreTrainedModel

from gdpo_tune.core.trials import TrialConfig
from gdpo_tune.training.rollout import Decoding

CONTEXT = 512 * 2**20
"""Bytes of a GPU that CUDA takes for a process beside what torch allocates and can limit."""
CPU_CACHE = 2**30
"""Bytes of the key-value cache of an engine on a CPU, where no share of a device bounds it."""

RENDEZVOUS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables by which the processes of one training find each other."""


def arguments(config: TrialConfig, model: PreTrainedModel) -> dict[str, Any]:
    """TRL's arguments for sampling with vLLM.

    The importance sampling correction weighs each completion by how much more or less likely the
    trained policy finds it than the engine did, which differ by rounding.
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
        # vLLM counts in whole devices, whoever else is on them.
        "vllm_gpu_memory_utilization": config.gpu_share * settings.vllm_memory_share,
        "vllm_max_model_length": min(longest, policy.max_position_embeddings),
    }


def limit_gpu_memory(share: float) -> None:
    """Keep what torch allocates on this process's GPU, a colocated engine included, in a share.

    So a trial that grows too large fails itself, not its neighbours.
    """
    if share < 1 and torch.cuda.is_available():
        _, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(max(share - CONTEXT / total, 0.0))


@contextmanager
def starting(config: TrialConfig, model: PreTrainedModel, arguments: Any) -> Generator[None]:
    """Around the trainer that starts an engine in this process.

    Args:
        config: of the trial.
        model: its policy, on a CPU or GPU.
        arguments: TRL's.
    """
    trl_vllm: Any = import_module("trl.generation.vllm_generation")
    plain = trl_vllm.LLM
    precision = "bfloat16" if arguments.bf16 else str(model.dtype).removeprefix("torch.")
    options: dict[str, Any] = {"dtype": precision, "revision": config.model.revision or None}
    if not torch.cuda.is_available():
        # Compiling takes minutes there, and memory would be a share of the machine's.
        options |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_CACHE}
    # TRL has no argument for any of these.
    trl_vllm.LLM = functools.partial(plain, **options)
    try:
        with gpu_lock(), _environment_kept():
            yield
    finally:
        trl_vllm.LLM = plain
    # An engine seeds the process with 0, and its samples would be the same in every trial.
    set_seed(config.seed, device_specific=True)


@contextmanager
def _environment_kept() -> Generator[None]:
    """Take back what TRL tells the engine in variables.

    Whatever reads them next, such as another trainer in this process, would take itself for one of
    several processes.
    """
    before = {name: os.environ.get(name) for name in RENDEZVOUS}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def gpu_lock() -> Generator[None]:
    """Wait until no other trial of this user starts an engine on this process's GPU.

    An engine measures how much memory is free while it starts; one that starts beside it would be
    taken for its own. Without a GPU there is nothing to measure, hence no lock.
    """
    if not torch.cuda.is_available():
        yield
        return
    properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    folder = Path(tempfile.gettempdir()) / f"gdpo-tune-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / f"gpu-{properties.uuid}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the kernel lets go of it when the file is closed
        yield


class ColocatedEngine:
    """The engine that TRL started in this process, as what samples for held-out evaluation."""

    def __init__(self, trainer: Any) -> None:
        """
        Args:
            trainer: a `GRPOTrainer` with `use_vllm` and `vllm_mode` "colocate".
        """
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
        """As `rollout.generate`, by the engine, with the trainer's weights as they are now."""
        vllm: Any = import_module("vllm")
        self._sync()
        seeds = torch.randint(2**31, (len(prompts),), generator=generator).tolist()
        wanted = [
            vllm.SamplingParams(
                temperature=decoding.temperature or 0.0,
                max_tokens=decoding.max_new_tokens,
                stop_token_ids=list(decoding.end_tokens),
                seed=seed,
            )
            for seed in seeds
        ]
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self._trainer.vllm_generation.llm.generate(inputs, wanted, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def _sync(self) -> None:
        """Give the engine the weights of this step, unless TRL or an evaluation just did."""
        step = self._trainer.state.global_step
        if self._trainer._last_loaded_step != step:
            self._trainer.vllm_generation.sync_weights()
            self._trainer._last_loaded_step = step

    def _reload_weights(self) -> None:
        """On a CPU vLLM computes with rearranged copies, which loading alone does not renew."""
        generation = self._trainer.vllm_generation
        # Copies, because adapters are merged into the weights only while they are iterated over.
        weights = [(name, value.clone()) for name, value in generation._iter_named_params()]
        generation.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        generation.llm.apply_model(_renew_output_heads)
        generation.llm.reset_prefix_cache()


def _renew_output_heads(model: Any) -> None:
    """A head that is tied to the embedding is not named among the weights, so a reload skips it."""
    layers: Any = import_module("vllm.model_executor.layers.vocab_parallel_embedding")
    for layer in model.modules():
        if isinstance(layer, layers.ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)
