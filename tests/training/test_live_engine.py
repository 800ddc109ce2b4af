"""The engine that a process keeps for its next trial, with a stand-in for vLLM.

`tests/vllm/test_vllm_reuse.py` compares trials on a kept engine with trials on a new one.
"""

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from trl.generation import vllm_generation as trl_vllm

from gdpo_tune.core.errors import EngineMemoryError
from gdpo_tune.core.settings import DataSettings, ModelSettings, RolloutSettings
from gdpo_tune.core.trials import RUNNER
from gdpo_tune.training import trial, vllm_engine
from gdpo_tune.training.engine import PROCESS_ENGINE, SampleRequest
from tests.support.trials import build_trial, run_metrics
from tests.support.vllm_double import RecordingLLM

pytestmark = pytest.mark.usefixtures("closed_engine")


def start(key="a", llm=RecordingLLM):
    return PROCESS_ENGINE.open(key, llm, threads=1)


def test_all_work_is_done_in_one_thread_that_is_not_the_callers():
    engine = start()
    engine.generate([SampleRequest([3], None)])
    engine.run(engine.llm.reset_prefix_cache)
    assert engine.llm.threads == {engine.run(engine.run, threading.get_ident)}
    assert threading.get_ident() not in engine.llm.threads


@pytest.mark.parametrize(("uses_v2", "runner"), [(True, "V2"), (False, "V1")])
def test_the_worker_of_a_kept_engine_tells_its_model_runner(uses_v2, runner):
    # Source: `Worker.use_v2_model_runner` of vLLM 0.31, by which it makes its `model_runner`.
    llm = RecordingLLM()
    llm.uses_v2 = uses_v2
    assert PROCESS_ENGINE.runner == ""
    start(llm=lambda: llm)
    assert PROCESS_ENGINE.runner == runner
    PROCESS_ENGINE.close()
    assert PROCESS_ENGINE.runner == ""


def test_the_threads_of_the_caller_stay_as_they_were(thawed):
    def start_as_vllm():
        torch.set_num_threads = None  # vLLM on a CPU replaces it
        return RecordingLLM()

    plain = torch.set_num_threads
    start(llm=start_as_vllm)
    assert torch.set_num_threads is plain
    assert thawed == [True], "a trainer that is dropped would never be freed"


def test_completions_are_told_as_they_end_and_returned_in_order():
    engine = start()
    engine.generate([SampleRequest([1], None)])  # numbers of requests go on
    told = []

    def note(place, output):
        told.append((place, output.outputs[0].token_ids[0]))

    prompts = [[7, 7, 7], [8], [9, 9]]
    outputs = engine.generate([SampleRequest(prompt, None) for prompt in prompts], note)
    assert told == [(1, 8), (2, 9), (0, 7)]
    assert [output.outputs[0].token_ids[0] for output in outputs] == [7, 8, 9]
    engine.generate([SampleRequest([1], None)])
    assert len(told) == 3
    asked = len(engine.llm.requests)
    assert engine.generate([]) == []
    assert len(engine.llm.requests) == asked == 3, "vLLM is not asked for nothing"


def test_an_engine_with_an_equal_key_is_kept_and_forgets_its_trial():
    engine = start()
    engine.llm.llm_engine.vllm_config.lora_config = object()
    engine.llm.llm_engine.adapters = [1, 4]
    assert start() is engine
    assert engine.llm.llm_engine.adapters == []
    assert engine.llm.resets == 1
    assert torch.equal(engine.llm.cache, torch.zeros(4))
    engine.run(engine.llm.sleep, level=1)
    assert start() is engine
    assert not engine.llm.llm_engine.is_asleep, "the next trial wakes it"


@pytest.mark.parametrize("key", ["b", None])
def test_another_key_closes_the_engine_before_the_next_one_starts(key):
    llm, closed = start().llm, []

    def start_next():
        closed.append(llm.llm_engine.was_shut_down)
        return RecordingLLM()

    start(key, start_next)
    assert closed == [True]
    start(None, start_next)  # no key equals another
    assert len(closed) == 2


def test_an_engine_that_has_raised_serves_no_further_trial():
    engine = start()
    engine.llm.llm_engine.step = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.generate([SampleRequest([3], None)])
    assert not PROCESS_ENGINE.has("a")
    assert start() is not engine


def test_an_engine_that_does_not_start_leaves_none_behind():
    def fail():
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        start(llm=fail)
    assert not PROCESS_ENGINE.has("a")
    start()


def test_memory_that_does_not_come_back_asks_for_a_new_process(monkeypatch):
    engine = start()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 3 << 30)
    with pytest.raises(EngineMemoryError, match=r"3\.0 GiB of the GPU are still in use"):
        PROCESS_ENGINE.close()
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 1 << 20)
    assert not PROCESS_ENGINE.has("a")
    assert not hasattr(engine, "llm")


@pytest.fixture
def config(toy, policy, tmp_path, monkeypatch):
    Accelerator(cpu=True)
    monkeypatch.setattr(trl_vllm, "LLM", lambda **_: RecordingLLM(), raising=False)
    return build_trial(policy, tmp_path / "t", seed=7)


@pytest.fixture
def open_for(loaded_model):
    """Return the engine of a trial."""

    def open_for(config, *, bf16=False, digest="d"):
        arguments = SimpleNamespace(bf16=bf16)
        with vllm_engine.prepare_engine(config, loaded_model, arguments, digest):
            return trl_vllm.LLM(model="policy")

    return open_for


def test_trials_that_differ_in_what_is_searched_share_an_engine(config, open_for, tmp_path):
    params = {**config.params, "learning_rate": 1.0, "temperature": 0.5, "beta": 0.3}
    other = replace(config, seed=8, params=params, directory=tmp_path / "u", train=False)
    engine = open_for(config)
    assert open_for(other) is engine
    assert open_for(config) is engine


DIFFERENCES = [
    {"threads": 2},
    {"model": ModelSettings(lora_rank=8)},
    {"model": ModelSettings(revision="v2")},
    {"gpu_share": 0.5},
    {"rollout": RolloutSettings(vllm_memory_share=0.3)},
    {"rollout": RolloutSettings(reuse_engine=False)},
    {"completions_per_step": 32},
    {"data": DataSettings(max_prompt_length=30)},
    {"bf16": True},
    {"digest": "e"},
]


def test_trials_that_differ_in_what_an_engine_depends_on_do_not(config, open_for):
    for changes in DIFFERENCES:
        engine = open_for(config)
        own = {name: changes[name] for name in ("bf16", "digest") if name in changes}
        fields = {name: value for name, value in changes.items() if name not in own}
        if "completions_per_step" in fields:
            fields = {"training": config.training.replace(**fields)}
        assert open_for(replace(config, **fields), **own) is not engine, changes


def test_each_trial_gets_its_own_engine_on_request(config, open_for):
    alone = replace(config, rollout=RolloutSettings(reuse_engine=False))
    assert open_for(alone) is not open_for(alone)


def test_a_trial_records_the_model_runner_only_of_an_engine_that_has_sampled(config, monkeypatch):
    start("of an earlier trial")
    one = replace(config, training=config.training.replace(steps=1))
    assert RUNNER not in run_metrics(one)[1].environment
    monkeypatch.setattr(trial, "uses_engine_in_process", lambda _: True)
    assert run_metrics(one)[1].environment[RUNNER] == "V2"


def test_a_trial_that_does_not_train_gets_the_memory_of_the_engine(config):
    start()
    assert run_metrics(replace(config, train=False))[1].checkpoint is None
    assert not PROCESS_ENGINE.has("a")
