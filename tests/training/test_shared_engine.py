"""The engine of a pack, with a stand-in for vLLM: batches, places of adapters, and its death."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from gdpo_tune.core.compute_lock import ComputeLock
from gdpo_tune.core.errors import EngineMemoryError
from gdpo_tune.training import vllm_engine
from gdpo_tune.training.engine import EnginePool, SampleRequest
from tests.support.vllm_double import RecordingLLM

WAIT, GIB = 30.0, 2**30


class Packed:
    """A shared engine and the turns of its trials."""

    def __init__(self, slots: int) -> None:
        self.llms: list[RecordingLLM] = []
        self.shared = EnginePool(slots)
        self.turns = ComputeLock(lambda: None, lambda _: None, self.shared.start_batch)

    def start(self) -> RecordingLLM:
        llm = RecordingLLM()
        llm.llm_engine.vllm_config = SimpleNamespace(lora_config=object())
        self.llms.append(llm)
        return llm

    def open(self):
        return self.shared.open(None, self.start, 1)

    def run_trial(self, number: int, steps: int = 1) -> list[int]:
        """Open a share, sample prompts of the trial, and return tokens and the adapter's number."""
        with self.turns.hold():
            share = self.open()
            self.llms[-1].llm_engine.adapters.append(share.adapter)
            tokens = []
            for step in range(steps):
                prompt = [100 * number + step] * (1 + number)
                outputs = share.generate([SampleRequest(prompt, None, share.adapter)] * 2)
                tokens += [output.outputs[0].token_ids[0] for output in outputs]
            self.shared.release()
            return [share.adapter, *tokens]


@pytest.fixture
def packed():
    pack = Packed(3)
    yield pack
    pack.shared.close()


def test_trials_that_wait_are_served_in_one_batch_and_get_their_own(packed):
    with ThreadPoolExecutor(3) as threads:
        with packed.turns.hold():  # nobody else computes until all three ask for a turn
            runs = [threads.submit(packed.run_trial, number, 2) for number in range(3)]
            while len(packed.turns._waiting) < 3:
                pass
        results = [run.result(WAIT) for run in runs]
    (llm,) = packed.llms
    assert [len(inputs) for inputs, _ in llm.requests] == [6, 6]
    assert sorted(adapter for adapter, *_ in results) == [1, 2, 3]
    for number, (_, *tokens) in enumerate(results):
        assert tokens == [100 * number] * 2 + [100 * number + 1] * 2


def test_a_trial_that_ends_leaves_its_place_and_nothing_else(packed):
    assert packed.run_trial(1) == [1, 100, 100]
    (llm,) = packed.llms
    assert llm.llm_engine.adapters == []
    assert not llm.cache.isnan().any()
    assert llm.resets == 1
    assert packed.run_trial(2)[0] == 1, "the same place and the same engine"
    assert len(packed.llms) == 1


def test_completions_are_passed_on_as_they_end_with_numbers_of_their_trial(packed):
    ended = []
    with packed.turns.hold():
        share = packed.open()
        share.generate(
            [SampleRequest([5, 5, 5], None), SampleRequest([7], None)],
            lambda number, output: ended.append((number, output.outputs[0].token_ids[0])),
        )
    assert ended == [(1, 7), (0, 5)]


def test_a_place_is_free_only_once_its_adapter_is_gone(packed):
    with packed.turns.hold():
        share, taken = packed.open(), []
        plain = share.engine.forget

        def forget(number):
            share.engine.forget = plain
            with ThreadPoolExecutor(1) as other:  # a trial that begins at this moment
                taken.append(other.submit(packed.run_trial, 1).result(WAIT)[0])
            plain(number)

        share.engine.forget = forget
        packed.shared.release()
    assert (share.adapter, taken) == (1, [2])
    assert packed.run_trial(2)[0] == 1


def test_a_trial_that_fails_while_it_orders_samples_holds_nobody_up(packed):
    def fail():
        raise OSError("CUDA error: device-side assert triggered")

    plain = packed.turns._read
    with packed.turns.hold():
        share = packed.open()
        packed.turns._read = fail
        with pytest.raises(OSError, match="CUDA error"):
            share.generate([SampleRequest([1], None)])
        packed.turns._read = plain
    assert packed.run_trial(2)[1:] == [200, 200]


def test_an_engine_that_died_is_replaced_for_the_next_trial(packed):
    with packed.turns.hold():
        share = packed.open()
        packed.llms[0].generate = None
        with pytest.raises(TypeError):
            share.generate([SampleRequest([1], None)])
        packed.shared.release()
    assert packed.run_trial(2) == [1, 200, 200]
    assert len(packed.llms) == 2
    with packed.turns.hold(), pytest.raises(RuntimeError, match="has ended"):
        share.generate([SampleRequest([1], None)])


def test_the_sampler_of_a_cpu_draws_from_seeds_alone():
    llm = RecordingLLM()
    llm.collective_rpc(vllm_engine._draw_from_seeds_alone)
    assert llm.sampler.forward == llm.sampler.forward_native


@pytest.mark.parametrize("stays", [False, True])
def test_a_dead_engine_is_replaced_beside_the_weights_that_trials_share(packed, stays, monkeypatch):
    """The base on the GPU is not what vLLM has left there, as `memory_reserved` alone would say."""
    reserved, kept, plain = {"base": 28 * GIB}, [], packed.start

    def start():
        llm = plain()
        name = f"engine {len(packed.llms)}"
        reserved[name] = 30 * GIB
        weakref.finalize(llm, reserved.pop, name)
        packed.llms.clear()
        return llm

    packed.start = start
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: sum(reserved.values()))
    with packed.turns.hold():
        share = packed.open()
        reserved["an adapter and its moments"] = 3 * GIB
        if stays:
            kept.append(share.engine.llm)
        share.engine.is_broken = True
        packed.shared.release()
        if stays:
            with pytest.raises(EngineMemoryError, match=r"30\.0 GiB of the GPU are still in use"):
                packed.open()
        else:
            assert packed.open().engine is not share.engine
            packed.shared.release()
