"""A stand-in for vLLM's `LLM`, which records what is asked of it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import torch


class RecordingEngine:
    """A stand-in for vLLM's engine; a request ends after as many steps as its prompt has tokens."""

    def __init__(self) -> None:
        self.vllm_config = SimpleNamespace(lora_config=None)
        self.adapters: list[int] = []
        self.waiting: dict[int, Any] = {}
        self.was_shut_down = False
        self.is_asleep = False
        self.engine_core = SimpleNamespace(shutdown=self._shut_down)

    def step(self) -> list[Any]:
        """Advance every request by a token."""
        ended: list[Any] = []
        for name, output in list(self.waiting.items()):
            output.steps -= 1
            output.finished = output.steps == 0
            if output.finished:
                del self.waiting[name]
            ended.append(output)
        return ended

    def is_sleeping(self) -> bool:
        """Return whether the engine has no memory."""
        return self.is_asleep

    def list_loras(self) -> list[int]:
        """Return the numbers of the adapters."""
        return list(self.adapters)

    def remove_lora(self, number: int) -> None:
        self.adapters.remove(number)

    def _shut_down(self) -> None:
        self.was_shut_down = True


class RecordingLLM:
    """A stand-in for vLLM's `LLM`; a completion is the first token of its prompt."""

    def __init__(self) -> None:
        self.llm_engine = RecordingEngine()
        self.request_counter = SimpleNamespace(counter=0)
        self.cache = torch.full((4,), float("nan"))
        self.requests: list[tuple[Any, Any]] = []
        self.adapters: list[Any] = []
        self.threads = {threading.get_ident()}
        self.resets = 0
        self.resets_succeed = True
        self.naps = 0
        self.uses_v2 = True
        self.sampler = SimpleNamespace(forward="draws twice", forward_native="draws by seed")

    def generate(self, inputs: Any, settings: Any, *, lora_request: Any, use_tqdm: bool) -> Any:
        """Sample as vLLM does; completions of short prompts end first."""
        assert not use_tqdm
        assert not self.llm_engine.is_asleep
        self.threads.add(threading.get_ident())
        self.requests.append((inputs, settings))
        self.adapters += lora_request
        outputs: list[Any] = []
        for one in inputs:
            name = self.request_counter.counter
            self.request_counter.counter += 1
            tokens = one["prompt_token_ids"]
            drawn = SimpleNamespace(token_ids=(tokens[0],))
            output = SimpleNamespace(
                request_id=str(name), outputs=[drawn], steps=len(tokens), finished=False
            )
            self.llm_engine.waiting[name] = output
            outputs.append(output)
        while self.llm_engine.waiting:
            self.llm_engine.step()
        return outputs

    def sleep(self, *, level: int) -> None:
        """Give weights and cache back; the weights are kept elsewhere."""
        assert level == 1
        assert not self.llm_engine.is_asleep
        self.llm_engine.is_asleep = True
        self.naps += 1

    def wake_up(self) -> None:
        """Take memory, in which there is anything."""
        self.llm_engine.is_asleep = False
        self.cache.fill_(float("nan"))

    def reset_prefix_cache(self) -> bool:
        """Forget prompts; True if that succeeds, as vLLM says."""
        assert not self.llm_engine.is_asleep
        self.threads.add(threading.get_ident())
        self.resets += 1
        return self.resets_succeed

    def collective_rpc(self, function: Any) -> list[Any]:
        """Call a function with the worker, and return the results of all workers."""
        sampler = SimpleNamespace(topk_topp_sampler=self.sampler)
        # of a layer with attention, and of one with the states of a recurrent network
        caches = [self.cache[:2], [self.cache[2:3], self.cache[3:]]]
        runner = SimpleNamespace(kv_caches=caches, sampler=sampler)
        return [function(SimpleNamespace(model_runner=runner, use_v2_model_runner=self.uses_v2))]
