"""vLLM in the trainer's process ("colocate"), as TRL and held-out evaluation sample with it.

Each completion has its own seed. Adapters are handed over as they are, engines on a CPU get new
weights too, and every engine samples for held-out evaluation.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from transformers import PreTrainedModel

from gdpo_tune.core.errors import EngineDiedError, GdpoTuneError
from gdpo_tune.training.engine import SampleRequest, Seat, fall_asleep, wake_up
from gdpo_tune.training.lora import write_adapter_to_memory
from gdpo_tune.training.memory import is_out_of_memory
from gdpo_tune.training.rollout import Decoding

ADAPTER = "policy"
"""Beginning of an adapter's name in vLLM; its number follows."""


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
        self._seat: Seat = generation.llm
        self._adapter: Any = None
        if hasattr(generation.model, "peft_config"):
            self._adapter = self._build_adapter_request("loaded by every sync")
            synchronize = self._send_adapter
        elif torch.cuda.is_available():
            synchronize = generation.sync_weights
        else:
            synchronize = self._reload_weights
        generation.sync_weights = functools.partial(
            self._seat.engine.run, self._wake_and, synchronize
        )
        generation.llm = _StepSampler(self._seat, self._adapter, trainer, sleeps=sleeps)
        self._sample = _name_failures(self._seat.generate, trainer)
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
        wake_up(self._seat.engine.llm)
        synchronize()

    def _send_adapter(self) -> None:
        """Replace the engine's adapter by the trainer's; no weight below it is written or read.

        TRL would merge the adapter into the weights: in bfloat16 small updates are rounded away,
        and the weights drift.
        """
        with write_adapter_to_memory(self._trainer.vllm_generation.model) as directory:
            # Loaded once: later requests for it would load it again.
            self._seat.engine.llm.llm_engine.add_lora(
                self._build_adapter_request(str(directory), load_inplace=True)
            )
        self._seat.engine.run(self._seat.engine.llm.reset_prefix_cache)

    def _build_adapter_request(self, path: str, *, load_inplace: bool = False) -> Any:
        """Build vLLM's request for the adapter, from a directory if it is to be loaded."""
        vllm_lora: Any = import_module("vllm.lora.request")
        number = self._seat.adapter
        return vllm_lora.LoRARequest(f"{ADAPTER}-{number}", number, path, load_inplace=load_inplace)

    def _reload_weights(self) -> None:
        """Send the weights on a CPU, where vLLM computes with rearranged copies of them."""
        llm = self._seat.engine.llm
        weights = self._trainer.vllm_generation._iter_named_params()  # gathered one by one
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        llm.apply_model(_renew_output_heads)
        self._seat.engine.run(self._seat.engine.llm.reset_prefix_cache)


class _StepSampler:
    """The engine as TRL calls it for the completions of a step."""

    def __init__(self, seat: Seat, adapter: Any, trainer: Any, *, sleeps: bool) -> None:
        self._sleeps = sleeps
        self.seat, self._adapter, self._trainer = seat, adapter, trainer
        self._tokenizer = (
            _copy_tokenizer(trainer.processing_class) if trainer.judges_early else None
        )

    @property
    def llm_engine(self) -> Any:
        return self.seat.engine.llm.llm_engine

    def reset_prefix_cache(self) -> None:
        self.seat.engine.run(self.seat.engine.llm.reset_prefix_cache)

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

        outputs = self.seat.generate(requests, self._note if self._tokenizer else None)
        if self._sleeps:
            self.seat.engine.run(fall_asleep, self.seat.engine.llm)
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
