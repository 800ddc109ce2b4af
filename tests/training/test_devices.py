"""What a trial asks of its GPU, what it tells of it, and what it does not inherit, without one."""

import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gdpo_tune.core import engines
from gdpo_tune.core.errors import ResourcesError
from gdpo_tune.core.gpu_memory import GIB
from gdpo_tune.core.settings import ModelSettings
from gdpo_tune.core.system import RENDEZVOUS, clear_rendezvous
from gdpo_tune.training import devices, distributed, rollout, training_state, trl_arguments
from gdpo_tune.training.devices import read_gpu_metrics
from gdpo_tune.training.trl_arguments import choose_weights_dtype, uses_bfloat16
from tests.support.training import build_trial_config


@pytest.fixture
def cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return monkeypatch


def configure(policy, **model):
    return replace(build_trial_config(policy, Path()), model=ModelSettings(**model))


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


def test_a_cpu_computes_in_bfloat16_where_it_is_faster_and_the_policy_is_large(policy, monkeypatch):
    for faster in (True, False):
        monkeypatch.setattr(trl_arguments, "multiplies_bfloat16_faster", lambda f=faster: f)
        assert uses_bfloat16(configure("org/policy")) is faster
        assert choose_weights_dtype(configure("org/policy")) is torch.float32, "it is trained"
        for small in ("embedded", policy):
            assert not uses_bfloat16(configure(small))
    monkeypatch.setattr(trl_arguments, "multiplies_bfloat16_faster", lambda: True)
    monkeypatch.setattr(trl_arguments, "MOST_PARAMETERS", 1)
    assert uses_bfloat16(configure(policy))
    assert choose_weights_dtype(configure(policy, lora_rank=4)) is torch.bfloat16


def test_a_cpu_is_asked_for_its_instructions():
    """Linux names them in /proc/cpuinfo. A measured time would differ from process to process."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if "flags" not in flags:
        pytest.skip("no flags to compare with")
    native = "avx512_bf16" in flags or "amx_bf16" in flags
    assert trl_arguments.multiplies_bfloat16_faster() is native


def test_the_cpu_sampler_is_not_chosen_where_a_gpu_trains(loaded_model, tmp_path, monkeypatch):
    config = build_trial_config("embedded", tmp_path)
    monkeypatch.setattr(rollout, "find_vllm", lambda: None)
    monkeypatch.setattr(rollout, "uses_bfloat16", lambda _: False)
    for has_gpu, engine in ((False, "fast_cpu"), (True, "transformers")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda found=has_gpu: found)
        assert rollout.choose_engine(config, loaded_model) == engine
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(rollout, "uses_bfloat16", lambda _: True)  # it computes in float32
    assert rollout.choose_engine(config, loaded_model) == "transformers"


@pytest.mark.parametrize(("processes", "expected"), [(1, torch.Tensor), (4, list)])
def test_a_process_keeps_the_state_of_its_gpu_as_transformers_reads_it(cuda, processes, expected):
    state = torch.tensor([1, 7], dtype=torch.uint8)
    cuda.setattr(torch.cuda.random, "get_rng_state", lambda: state)
    cuda.setattr(torch.cuda.random, "get_rng_state_all", lambda: [state, state])
    cuda.setattr(distributed, "count_processes", lambda: processes)
    assert isinstance(training_state.read_random_state()["cuda"], expected)


@pytest.mark.parametrize("written", [1, 4])
def test_another_number_of_processes_is_refused(tmp_path, monkeypatch, written):
    states = [training_state.read_random_state()] * written
    training_state.save_random_states(states, tmp_path)
    monkeypatch.setattr(distributed, "count_processes", lambda: written)
    training_state.check_process_count(tmp_path)
    monkeypatch.setattr(distributed, "count_processes", lambda: 2)
    message = rf"workers = 2: .*states of {written}(.|\n)*--set resources.workers={written}"
    with pytest.raises(ResourcesError, match=message):
        training_state.check_process_count(tmp_path)


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


@pytest.mark.parametrize(
    "error",
    [
        AssertionError("Torch not compiled with CUDA enabled"),
        RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease"),
    ],
)
def test_a_trial_with_a_gpu_does_not_train_on_the_cpu_silently(monkeypatch, error):
    # Source: the messages of torch 2.11 for a CPU's build, and for a driver that is too old.
    def fail():
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


class Library:
    """NVIDIA's library, with two GPUs: a percentage and bytes."""

    class NVMLError(Exception):
        pass

    gpus = {"GPU-a": (40, 3 * GIB), "GPU-b": (80, 9 * GIB)}

    def nvmlDeviceGetHandleByUUID(self, name):
        if name not in self.gpus:
            raise self.NVMLError("Not Found")
        return self.gpus[name]

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=handle[0])

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(used=handle[1])


@pytest.mark.parametrize(
    ("gpus", "load", "expected"),
    [
        (["GPU-a"], Library, {"train/gpu_utilisation": 0.4, "train/gpu_memory_gib": 3.0}),
        (["GPU-a", "GPU-b"], Library, {"train/gpu_utilisation": 0.6, "train/gpu_memory_gib": 9.0}),
        (["GPU-c"], Library, {}),
        (["GPU-a"], lambda: None, {}),
    ],
)
def test_metrics_are_those_of_the_gpus_of_the_process(monkeypatch, gpus, load, expected):
    monkeypatch.setattr(devices, "list_gpus", lambda: gpus)
    monkeypatch.setattr(devices, "load_nvml", load)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 5 * GIB)
    assert read_gpu_metrics() == pytest.approx({"train/gpu_peak_gib": 5.0, **expected})


def test_without_gpus_the_library_is_not_loaded(monkeypatch):
    monkeypatch.setattr(devices, "load_nvml", lambda: pytest.fail("loaded"))
    assert devices.list_gpus() == []
    assert read_gpu_metrics() == {}


def test_there_may_be_no_library_or_no_driver(monkeypatch):
    def no_driver():
        raise Library.NVMLError("NVML Shared Library Not Found")

    def missing(_):
        raise ModuleNotFoundError("No module named 'pynvml'")

    library = SimpleNamespace(NVMLError=Library.NVMLError, nvmlInit=no_driver)
    load = devices.load_nvml.__wrapped__
    monkeypatch.setattr(devices.importlib, "import_module", lambda _: library)
    assert load() is None
    library.nvmlInit = lambda: None
    assert load() is library
    monkeypatch.setattr(devices.importlib, "import_module", missing)
    assert load() is None


def test_gpus_have_the_names_that_the_library_knows(cuda):
    cuda.setattr(torch.cuda, "is_initialized", lambda: True)
    cuda.setattr(torch.cuda, "device_count", lambda: 1)
    properties = SimpleNamespace(uuid="1b2c")
    cuda.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert devices.list_gpus() == ["GPU-1b2c"]
