"""GPU metrics with a stand-in for NVIDIA's library; without GPUs there are none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gdpo_tune.core.gpu_memory import GIB
from gdpo_tune.training import devices
from gdpo_tune.training.devices import read_gpu_metrics


class Library:
    """NVIDIA's library, with two GPUs."""

    class NVMLError(Exception):
        pass

    gpus = {"GPU-a": (40, 3 * GIB), "GPU-b": (80, 9 * GIB)}

    def nvmlDeviceGetHandleByUUID(self, name: str) -> tuple[int, int]:
        if name not in self.gpus:
            raise self.NVMLError("Not Found")
        return self.gpus[name]

    def nvmlDeviceGetUtilizationRates(self, handle: tuple[int, int]) -> SimpleNamespace:
        return SimpleNamespace(gpu=handle[0])

    def nvmlDeviceGetMemoryInfo(self, handle: tuple[int, int]) -> SimpleNamespace:
        return SimpleNamespace(used=handle[1])


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (["GPU-a"], {"train/gpu_utilisation": 0.4, "train/gpu_memory_gib": 3.0}),
        (["GPU-a", "GPU-b"], {"train/gpu_utilisation": 0.6, "train/gpu_memory_gib": 9.0}),
        (["GPU-c"], {}),
    ],
)
def test_metrics_are_those_of_the_gpus_of_the_process(monkeypatch, gpus, expected):
    monkeypatch.setattr(devices, "list_gpus", lambda: gpus)
    monkeypatch.setattr(devices, "load_nvml", Library)
    monkeypatch.setattr(devices.torch.cuda, "max_memory_reserved", lambda: 5 * GIB)
    assert read_gpu_metrics() == pytest.approx({"train/gpu_peak_gib": 5.0, **expected})


def test_without_gpus_the_library_is_not_loaded(monkeypatch):
    def refuse() -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(devices, "load_nvml", refuse)
    assert devices.list_gpus() == []
    assert read_gpu_metrics() == {}


def test_without_the_library_or_its_driver_torch_tells_the_peak_alone(monkeypatch):
    library = SimpleNamespace(NVMLError=Library.NVMLError)

    def no_driver() -> None:
        raise Library.NVMLError("NVML Shared Library Not Found")

    library.nvmlInit = no_driver
    monkeypatch.setattr(devices.importlib, "import_module", lambda _: library)
    assert devices.load_nvml.__wrapped__() is None
    library.nvmlInit = lambda: None
    assert devices.load_nvml.__wrapped__() is library

    def missing(_: str) -> None:
        raise ModuleNotFoundError("No module named 'pynvml'")

    monkeypatch.setattr(devices.importlib, "import_module", missing)
    assert devices.load_nvml.__wrapped__() is None
    monkeypatch.setattr(devices, "list_gpus", lambda: ["GPU-a"])
    monkeypatch.setattr(devices, "load_nvml", lambda: None)
    monkeypatch.setattr(devices.torch.cuda, "max_memory_reserved", lambda: 5 * GIB)
    assert read_gpu_metrics() == {"train/gpu_peak_gib": 5.0}


def test_gpus_have_the_names_that_the_library_knows(monkeypatch):
    monkeypatch.setattr(devices.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(devices.torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(devices.torch.cuda, "device_count", lambda: 1)
    properties = SimpleNamespace(uuid="1b2c")
    monkeypatch.setattr(devices.torch.cuda, "get_device_properties", lambda _: properties)
    assert devices.list_gpus() == ["GPU-1b2c"]
