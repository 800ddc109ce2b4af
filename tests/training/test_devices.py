"""What a trial asks of its GPU, and what it does not inherit, without one."""

from __future__ import annotations

import os
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gdpo_tune.core import engines
from gdpo_tune.core.errors import ResourcesError
from gdpo_tune.core.settings import ModelSettings
from gdpo_tune.core.system import RENDEZVOUS, clear_rendezvous
from gdpo_tune.policies.load_policy import load_policy
from gdpo_tune.training import devices, distributed, rollout, trl_arguments
from gdpo_tune.training.training_state import (
    load_random_state,
    read_random_state,
    save_random_states,
)
from gdpo_tune.training.trl_arguments import choose_weights_dtype, uses_bfloat16
from tests.support.training import build_trial_config, write_policy


@pytest.fixture
def cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return monkeypatch


# Precision


@pytest.mark.parametrize("supported", [True, False])
def test_auto_is_bfloat16_only_where_the_gpu_computes_in_it(cuda, supported):
    asked = []

    def is_supported(including_emulation=True):
        asked.append(including_emulation)
        return supported or including_emulation  # such as T4 and V100

    cuda.setattr(torch.cuda, "is_bf16_supported", is_supported)
    assert uses_bfloat16(configure("embedded")) is supported
    frozen = torch.bfloat16 if supported else torch.float32
    assert choose_weights_dtype(configure("embedded", lora_rank=4)) is frozen
    assert asked == [False, False]
    assert uses_bfloat16(configure("embedded", dtype="bfloat16"))
    assert not uses_bfloat16(configure("embedded", dtype="float32"))


def configure(policy, **model):
    return replace(build_trial_config(policy, Path()), model=ModelSettings(**model))


def test_a_cpu_computes_in_bfloat16_where_it_is_faster_and_the_policy_is_large(
    tmp_path, monkeypatch
):
    small = str(write_policy(tmp_path / "policy"))
    for faster in (True, False):
        monkeypatch.setattr(trl_arguments, "multiplies_bfloat16_faster", lambda f=faster: f)
        assert uses_bfloat16(configure("org/policy")) is faster
        assert choose_weights_dtype(configure("org/policy")) is torch.float32, "it is trained"
        for policy in ("embedded", small):
            assert not uses_bfloat16(configure(policy))
    monkeypatch.setattr(trl_arguments, "multiplies_bfloat16_faster", lambda: True)
    monkeypatch.setattr(trl_arguments, "MOST_PARAMETERS", 1)
    assert uses_bfloat16(configure(small))
    assert choose_weights_dtype(configure(small, lora_rank=4)) is torch.bfloat16


def test_a_cpu_is_asked_for_its_instructions():
    """Linux names them in /proc/cpuinfo. A measured time would differ from process to process."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if "flags" not in flags:
        pytest.skip("no flags to compare with")
    native = "avx512_bf16" in flags or "amx_bf16" in flags
    assert trl_arguments.multiplies_bfloat16_faster() is native


# Engine


def test_the_cpu_sampler_is_not_chosen_where_a_gpu_trains(tmp_path, monkeypatch):
    model = load_policy(write_policy(tmp_path / "policy"))[0]  # before the trainer moves it
    config = build_trial_config("embedded", tmp_path)
    monkeypatch.setattr(rollout, "find_vllm", lambda: None)
    monkeypatch.setattr(rollout, "uses_bfloat16", lambda _: False)
    assert rollout.choose_engine(config, model) == "fast_cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert rollout.choose_engine(config, model) == "transformers"


# Random states


@pytest.fixture
def two_gpus(cuda):
    """Two pretended GPUs: device -> state."""
    states = {device: torch.tensor([device, 7], dtype=torch.uint8) for device in range(2)}

    def set_state(state, device=0):
        states[device] = state

    cuda.setattr(torch.cuda, "device_count", lambda: 2)
    cuda.setattr(torch.cuda.random, "get_rng_state_all", lambda: list(states.values()))
    cuda.setattr(torch.cuda.random, "set_rng_state", set_state)
    return states


def test_the_state_of_every_gpu_is_saved_and_restored(two_gpus, tmp_path):
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    saved = dict(two_gpus)
    save_random_states([read_random_state()], tmp_path)
    expected = random.random(), np.random.random(), torch.rand(1).item()
    for device in two_gpus:
        two_gpus[device] = torch.zeros(2, dtype=torch.uint8)
    load_random_state(tmp_path, 0)
    assert all(torch.equal(two_gpus[device], saved[device]) for device in saved)
    assert (random.random(), np.random.random(), torch.rand(1).item()) == expected


def test_each_process_has_its_own_state(tmp_path, monkeypatch):
    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        states.append(read_random_state())
    save_random_states(states, tmp_path)
    monkeypatch.setattr(distributed, "count_processes", lambda: 2)
    monkeypatch.setattr(distributed, "get_rank", lambda: 1)
    load_random_state(tmp_path, 0)
    assert torch.equal(torch.random.get_rng_state(), states[1]["cpu"])
    monkeypatch.setattr(distributed, "count_processes", lambda: 1)


def test_another_number_of_processes_draws_anew(tmp_path, monkeypatch):
    save_random_states([read_random_state()] * 4, tmp_path)
    drawn = []
    for processes, rank, seed in ((1, 0, 0), (2, 0, 0), (2, 1, 0), (2, 1, 1), (2, 1, 1)):
        monkeypatch.setattr(distributed, "count_processes", lambda count=processes: count)
        monkeypatch.setattr(distributed, "get_rank", lambda number=rank: number)
        load_random_state(tmp_path, seed)
        drawn.append((torch.rand(1).item(), np.random.random(), random.random()))
    assert len(set(drawn)) == 4
    assert drawn[-1] == drawn[-2], "the same after each restart"


# Rendezvous


def test_processes_wait_for_each_other_as_long_under_every_launcher(monkeypatch):
    """Torch's limit for NCCL is ten minutes (`ProcessGroupNCCL`): too short for a checkpoint."""
    seen = {}
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(distributed, "PartialState", lambda **options: seen.update(options))
    monkeypatch.setattr(torch.serialization, "register_package", lambda *_: None)
    distributed.join_process_group()
    assert seen["timeout"].total_seconds() == distributed.PATIENCE == 3600


def test_a_trial_of_one_process_inherits_no_rendezvous(monkeypatch):
    for name in RENDEZVOUS:
        monkeypatch.setenv(name, "1")
    distributed.join_process_group()  # a launcher of one process
    assert not set(RENDEZVOUS) & set(os.environ)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_PORT", "29500")
    # accelerate.utils.environment.get_cpu_distributed_information reads these in the same way
    ours = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "MPI_LOCALNRANKS")
    for name in ours:
        monkeypatch.setenv(name, "4")
    clear_rendezvous()
    assert not {*RENDEZVOUS, *ours} & set(os.environ)


def test_a_group_of_one_process_exchanges_nothing(monkeypatch):
    """Source: vLLM's `init_distributed_environment` starts such a group and leaves it."""
    group = torch.distributed
    group.init_process_group("gloo", store=group.HashStore(), rank=0, world_size=1)
    try:
        for name in ("all_gather_object", "broadcast_object_list"):
            monkeypatch.setattr(group, name, lambda *_, name=name: pytest.fail(f"calls {name}"))
        value = object()
        assert distributed.gather(value) == [value]
        assert distributed.broadcast_from_first(value) is value
        assert (distributed.count_processes(), distributed.get_rank()) == (1, 0)
        assert distributed.is_first()
    finally:
        group.destroy_process_group()


# A GPU that CUDA cannot use


def test_a_trial_with_a_gpu_does_not_train_on_the_cpu_silently(monkeypatch):
    # Source: the messages of torch 2.11 for a CPU's build, and for a driver that is too old.
    for error in (
        AssertionError("Torch not compiled with CUDA enabled"),
        RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease"),
    ):

        def fail(error=error):
            raise error

        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "init", fail)
        reason = re.escape(str(error).splitlines()[0])
        with pytest.raises(ResourcesError, match=rf"cannot use a GPU on .* \({reason}\)"):
            devices.require_gpu()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    devices.require_gpu()


def test_the_driver_is_read_where_there_is_one(monkeypatch, tmp_path):
    # Source: /proc/driver/nvidia/version of a data centre's and of an open kernel module.
    file = tmp_path / "version"
    monkeypatch.setattr(engines, "DRIVER_FILE", file)
    assert "driver" not in engines.list_versions()
    for text, driver in (
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23", "570.86.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Rel", "580.159.03"),
    ):
        file.write_text(text)
        assert engines.list_versions()["driver"] == driver
