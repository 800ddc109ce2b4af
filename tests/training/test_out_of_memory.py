"""A trial that runs out of memory fails, and its message names the settings to change."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gdpo_tune.core.engines import NEWEST, VLLM
from gdpo_tune.core.errors import CrowdedGpuError, TrialFailure
from gdpo_tune.core.settings import ModelSettings, RolloutSettings
from gdpo_tune.training import distributed, rollout, train, worker_cache
from gdpo_tune.training.memory import explain_out_of_memory, list_remedies
from gdpo_tune.training.trainer import GDPOTrainer
from tests.support.training import build_trial_config, register_toy_task, write_policy

GIB = 2**30
CPU = "[enforce fail at alloc_cpu.cpp:119] . DefaultCPUAllocator: can't allocate memory: you tried"


@pytest.fixture
def config(tmp_path):
    return build_trial_config("embedded", tmp_path)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore"),
        RuntimeError(CPU),
        MemoryError(),
        ValueError("No available memory for the cache blocks. Try increasing"),
    ],
)
def test_out_of_memory_is_a_failure_that_names_settings(config, error):
    with pytest.raises(TrialFailure) as caught, explain_out_of_memory(config):
        raise error
    message = str(caught.value)
    assert message.startswith("out of memory: set training.micro_batch_size below 16, or ")
    assert "training.completions_per_step (16), all of which are sampled at once" in message
    assert "training.max_completion_length (8)" in message
    assert "model.gradient_checkpointing: on" in message
    assert "\n" not in message
    assert caught.value.__cause__ is error


def test_trials_that_share_a_process_may_be_fewer(config):
    message = r"out of memory: lower resources\.pack \(4\), or set training\.micro_batch_size below"
    with pytest.raises(TrialFailure, match=message), explain_out_of_memory(config, 4):
        raise MemoryError()


@pytest.fixture
def crowd(monkeypatch):
    """A stand-in for a GPU of 80 GiB; returns a setter of its free and the trial's own bytes."""

    def set_memory(free, own):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free * GIB, 80 * GIB))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: own * GIB)

    return set_memory


@pytest.mark.parametrize(
    ("share", "free", "own", "error"),
    [
        # A neighbour holds 59 GiB: more than its half.
        (0.5, 1, 20, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")),
        (0.5, 1, 3, ValueError("Free memory on device cuda:0 (1.0/80.0 GiB) on startup is less")),
        (0.5, 9, 3, ValueError("No available memory for the cache blocks. Try increasing")),
        (0.5, 9, 3, AssertionError("Error in memory profiling. Initial free memory 9 GiB")),
        (0.5, 0, 3, RuntimeError("CUDA error: out of memory")),
        (0.5, 0, 3, RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling")),
        # Another user's process, on a GPU that the trial has for itself.
        (1.0, 1, 20, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")),
    ],
)
def test_memory_that_others_hold_is_no_failure_of_the_trial(config, crowd, share, free, own, error):
    crowd(free, own)
    config = dataclasses.replace(config, gpu_share=share)
    expected = pytest.raises(CrowdedGpuError, match="trial's share of its GPU")
    with expected, explain_out_of_memory(config):
        raise error


@pytest.mark.parametrize(
    ("share", "free", "own", "tried"),
    [
        (0.5, 30, 38, "2.00 GiB"),
        (0.5, 30, 39, "600.00 MiB"),
        (0.5, 30, 39.49, "2.00 MiB"),  # torch takes a segment of 20 MiB for it
        (1.0, 1, 78, "4.00 GiB"),
    ],
)
def test_memory_above_the_trials_share_is_its_own_failure(config, crowd, share, free, own, tried):
    crowd(free, own)
    config = dataclasses.replace(config, gpu_share=share)
    with pytest.raises(TrialFailure, match="out of memory"), explain_out_of_memory(config):
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {tried}.")


def test_a_warm_up_of_vllm_above_the_trials_share_is_its_own_failure(config, crowd):
    crowd(30, 38)
    config = dataclasses.replace(config, gpu_share=0.5)
    inner = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    error = RuntimeError("CUDA out of memory occurred when warming up sampler")
    with pytest.raises(TrialFailure, match="out of memory"), explain_out_of_memory(config):
        raise error from inner


@pytest.mark.parametrize("error", [RuntimeError(CPU), MemoryError()])
def test_memory_of_the_machine_is_not_taken_for_that_of_a_gpu(config, crowd, error):
    crowd(1, 3)
    config = dataclasses.replace(config, gpu_share=0.5)
    with pytest.raises(TrialFailure, match="out of memory"), explain_out_of_memory(config):
        raise error


@pytest.mark.parametrize("error", [RuntimeError("shapes do not match"), ValueError("no")])
def test_another_error_passes(config, error):
    with pytest.raises(type(error), match=str(error)), explain_out_of_memory(config):
        raise error


@pytest.mark.parametrize(
    ("model", "third"),
    [
        (ModelSettings(), "model.gradient_checkpointing: on"),
        (ModelSettings(gradient_checkpointing="on"), "model.lora_rank: 16"),
        (ModelSettings(gradient_checkpointing="on", lora_rank=32), "lower model.lora_rank (32)"),
    ],
)
def test_the_last_setting_is_one_that_can_still_save_memory(config, model, third):
    assert third in list_remedies(dataclasses.replace(config, model=model))


@pytest.mark.parametrize(
    ("size", "first"),
    [
        (0, "set training.micro_batch_size below 16, or "),
        (4, "set training.micro_batch_size below 4, or "),
        (1, "lower training.completions_per_step (16), all of which are sampled at once, or "),
    ],
)
def test_the_first_setting_is_the_micro_batch_unless_it_is_one(config, size, first):
    training = config.training.replace(micro_batch_size=size)
    message = list_remedies(dataclasses.replace(config, training=training))
    assert message.startswith(first)
    assert message.count("completions_per_step") == 1


def test_with_vllm_its_share_is_named_and_not_the_batch_that_is_sampled(config, monkeypatch):
    monkeypatch.setattr("gdpo_tune.training.rollout.select_engine", lambda *_, **__: "vllm")
    settings = RolloutSettings(engine="vllm", vllm_memory_share=0.3)
    message = list_remedies(dataclasses.replace(config, rollout=settings))
    assert "vllm_memory_share (0.3)" in message
    assert "completions_per_step" not in message


def test_each_of_several_processes_has_an_engine_and_its_part_of_the_step(config, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(rollout, "find_vllm", lambda: VLLM(NEWEST, on_cpu=False))
    assert "vllm_memory_share" in list_remedies(config)
    monkeypatch.setattr(distributed, "count_processes", lambda: 2)
    message = list_remedies(config)
    assert "vllm_memory_share" in message
    assert message.startswith("set training.micro_batch_size below 8")


def test_a_trial_that_runs_out_of_memory_fails_and_closes_its_cache(tmp_path, monkeypatch):
    register_toy_task(monkeypatch)
    policy = write_policy(tmp_path / "policy")

    def exhausted(self, *_, **__):
        raise RuntimeError(CPU)

    monkeypatch.setattr(GDPOTrainer, "compute_loss", exhausted)
    with pytest.raises(TrialFailure, match=r"out of memory: set training\.micro_batch_size below"):
        train(build_trial_config(policy, tmp_path / "trial"), resume=None, report=lambda *_: None)
    assert worker_cache._cache is None
