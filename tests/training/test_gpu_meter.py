"""GPU metrics with a library that is made up; without GPUs there are none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gdpo_tune.training import gpu_meter
from gdpo_tune.training.gpu_meter import GIB, GpuMeter


class Library:
    """NVIDIA's, with two GPUs."""

    class NVMLError(Exception):
        pass

    gpus = {"GPU-a": (40, 3 * GIB), "GPU-b": (80, 9 * GIB)}

    def nvmlDeviceGetHandleByUUID(self, name: str) -> tuple[int, int]:
        if name not in self.gpus:
            raise self.NVMLError("Not Found")
        return self.gpus[name]

    def nvmlDeviceGetUtilizationRates(self, gpu: tuple[int, int]) -> SimpleNamespace:
        return SimpleNamespace(gpu=gpu[0])

    def nvmlDeviceGetMemoryInfo(self, gpu: tuple[int, int]) -> SimpleNamespace:
        return SimpleNamespace(used=gpu[1])


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (["GPU-a"], {"train/gpu_utilisation": 0.4, "train/gpu_memory_gib": 3.0}),
        (["GPU-a", "GPU-b"], {"train/gpu_utilisation": 0.6, "train/gpu_memory_gib": 9.0}),
        (["GPU-c"], {}),
        ([], {}),
    ],
)
def test_what_the_gpus_of_a_process_do(gpus, expected):
    assert GpuMeter(lambda: gpus, Library).read() == pytest.approx(expected)


def test_without_gpus_nobody_is_asked():
    def refuse() -> None:
        raise AssertionError("asked")

    assert GpuMeter(list, refuse).read() == {}
    assert gpu_meter.visible_gpus() == []


def test_without_the_library_or_its_driver_there_is_nothing(monkeypatch):
    assert GpuMeter(lambda: ["GPU-a"], lambda: None).read() == {}
    library = SimpleNamespace(NVMLError=Library.NVMLError)

    def no_driver() -> None:
        raise Library.NVMLError("NVML Shared Library Not Found")

    library.nvmlInit = no_driver
    monkeypatch.setattr(gpu_meter.importlib, "import_module", lambda _: library)
    assert gpu_meter.nvml.__wrapped__() is None
    library.nvmlInit = lambda: None
    assert gpu_meter.nvml.__wrapped__() is library

    def missing(_: str) -> None:
        raise ModuleNotFoundError("No module named 'pynvml'")

    monkeypatch.setattr(gpu_meter.importlib, "import_module", missing)
    assert gpu_meter.nvml.__wrapped__() is None


def test_the_properties_of_a_gpu_have_the_name_that_is_asked_for(monkeypatch):
    monkeypatch.setattr(gpu_meter.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_meter.torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(gpu_meter.torch.cuda, "device_count", lambda: 1)
    properties = SimpleNamespace(uuid="1b2c")
    monkeypatch.setattr(gpu_meter.torch.cuda, "get_device_properties", lambda _: properties)
    assert gpu_meter.visible_gpus() == ["GPU-1b2c"]
