"""Resources of the local machine, checked before a sweep starts, without importing torch."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from gdpo_tune.core.engines import (
    check_adapter_precision,
    check_compiler,
    check_trl_version,
    find_vllm,
    select_engine,
)
from gdpo_tune.core.errors import ResourcesError
from gdpo_tune.core.settings import SandboxSettings
from gdpo_tune.core.system import (
    SHARE_FOR_CANDIDATES,
    count_parallel_candidates,
    read_machine_memory,
)
from gdpo_tune.spec.model import SweepSpec
from gdpo_tune.spec.training_section import Resources

DEVICES = Path("/dev")
GIB = 2**30
CONTEXT = GIB // 2
"""Bytes that CUDA takes for a process."""
ENGINE = GIB
"""Bytes of an engine besides the weights: its graphs, its workspace and a cache."""
NUMBERS = {"auto": 2, "bfloat16": 2, "float32": 4}
"""`model.dtype` on a GPU -> bytes of a parameter that is not trained."""
TRAINED = 16
"""Bytes of a trained parameter: weight, gradient and the optimizer's two averages, in 32 bits."""


def check_resources(
    spec: SweepSpec, environment: Mapping[str, str] = os.environ, devices: Path = DEVICES
) -> None:
    """Refuse a trial that does not fit on this machine, unless `RAY_ADDRESS` names a cluster.

    Raises:
        ResourcesError: a trial asks for more CPUs, GPUs or memory than there are.
        EngineError: trials need vLLM, TRL or a C compiler, which is not available here, or of a
            version that was not tested.
    """
    check_trl_version()
    if environment.get("RAY_ADDRESS"):
        return
    gpus, cpus = count_visible_gpus(environment, devices), count_local_cpus()
    trial, remedy = spec.resources, "or set RAY_ADDRESS to a cluster that has them"
    for kind, share, present in (("GPUs", trial.gpus, gpus), ("CPUs", trial.cpus, cpus)):
        if share > present:
            key = f"resources.{kind.lower()}"
            raise ResourcesError(
                f"{key} = {share:g}: this machine has {present} {kind} that may be used\n"
                f"    fix: --set {key}={present}, {remedy}"
            )
    fit = count_fitting_workers(trial, cpus, gpus)
    if trial.workers > fit:
        raise ResourcesError(
            f"resources.workers = {trial.workers}: each takes {trial.cpus:g} CPUs and "
            f"{trial.gpus:g} GPUs, and this machine has {cpus} and {gpus}\n"
            f"    fix: --set resources.workers={fit}, {remedy}"
        )
    if trial.gpus:
        check_compiler()
    rank, on_gpu = spec.model.lora_rank, trial.gpus > 0
    engine = select_engine(spec.rollout, gpu=on_gpu, lean=False, vllm=find_vllm(), lora_rank=rank)
    in_bfloat16 = spec.model.dtype != "float32"
    check_adapter_precision(engine, gpu=on_gpu, lora_rank=rank, bfloat16=in_bfloat16)
    for reason in find_lacking_memory(spec, environment):
        raise ResourcesError(f"{reason}, {remedy}")


def count_fitting_workers(trial: Resources, cpus: int, gpus: int) -> int:
    """Return how many workers fit beside each other."""
    by_cpu = int(cpus / trial.cpus + 1e-9)
    return min(by_cpu, int(gpus / trial.gpus)) if trial.gpus else by_cpu


def count_local_cpus() -> int:
    """Return the CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS


def count_visible_gpus(environment: Mapping[str, str], devices: Path = DEVICES) -> int:
    """Return the number of device files of GPUs (NVIDIA, AMD, WSL) that are not hidden.

    `CUDA_VISIBLE_DEVICES` hides devices.
    """
    present = sum(1 for file in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", file.name))
    if not present and (devices / "kfd").exists():
        present = sum(1 for _ in devices.glob("dri/renderD*"))
    elif not present:
        present = int((devices / "dxg").exists())
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return present
    names = [part.strip() for part in listed.split(",")]
    # CUDA stops reading at the first invalid entry.
    end = next((i for i, name in enumerate(names) if not name or name[0] == "-"), len(names))
    return min(end, present)


def list_sandbox_warnings(
    spec: SweepSpec, environment: Mapping[str, str] = os.environ
) -> Iterator[str]:
    """Yield warnings about missing isolation, and about workers that memory forces to wait."""
    settings = spec.sandbox
    if settings.type == "unsafe_no_isolation":
        yield (
            "sandbox.type = unsafe_no_isolation: code that the policy writes runs with all the "
            "rights of your user: it can read and delete files, reach the network and leave "
            "processes behind. Write local, or external with the url of a service."
        )
    memory, needed = _get_sandbox_memory(settings, environment), settings.memory_mb << 20
    if memory is None or needed > memory:
        return
    parallel = count_parallel_candidates(memory, needed)
    if settings.workers > parallel:
        yield (
            f"sandbox.workers = {settings.workers}: {parallel} at a time will run, because each "
            f"may use {settings.memory_mb} MiB and candidates get {SHARE_FOR_CANDIDATES:.0%} of "
            f"the {memory >> 20} MiB that this machine has. Write workers: {parallel}, or lower "
            "sandbox.memory_mb."
        )


def find_lacking_memory(
    spec: SweepSpec, environment: Mapping[str, str] = os.environ
) -> Iterator[str]:
    """Yield reason and fix if this machine has too little memory to run code of the policy."""
    memory = _get_sandbox_memory(spec.sandbox, environment)
    if memory is not None and spec.sandbox.memory_mb << 20 > memory:
        yield (
            f"sandbox.memory_mb = {spec.sandbox.memory_mb}: this machine has {memory >> 20} MiB\n"
            f"    fix: --set sandbox.memory_mb={memory >> 21}"
        )


def _get_sandbox_memory(settings: SandboxSettings, environment: Mapping[str, str]) -> int | None:
    """Return the bytes that candidates share; None if they run on another machine."""
    if settings.type == "external" or environment.get("RAY_ADDRESS"):
        return None
    return read_machine_memory()


def check_gpu_share(
    spec: SweepSpec,
    parameters: int | None,
    device: int | None,
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Raise `ResourcesError` for a share of a GPU in which the policy could not be trained.

    Unknown `parameters` (a count), an unknown `device` (bytes of the smallest GPU) and trials on a
    cluster (`RAY_ADDRESS`) pass.
    """
    gpus = spec.resources.gpus
    if not gpus or parameters is None or device is None or environment.get("RAY_ADDRESS"):
        return
    least = compute_least_share(spec, parameters, device)
    if min(gpus, 1.0) >= least:
        return
    enough = -(-least * 100 // 1) / 100
    remedy = f"--set resources.gpus={enough:g}" if enough <= 1 else "a GPU with more memory"
    raise ResourcesError(
        f"resources.gpus = {gpus:g}: to train {parameters / 1e6:,.1f} million parameters takes at "
        f"least {enough:g} of a GPU of {device / GIB:.0f} GiB, without activations\n"
        f"    fix: {remedy}, or train adapters: --set model.lora_rank=16"
    )


def compute_least_share(spec: SweepSpec, parameters: int, device: int) -> float:
    """Return the share of a GPU below which no trial can run; above 1 if none can at all.

    A lower bound for a policy of `parameters` and a GPU of `device` bytes, without activations.
    vLLM gets `rollout.vllm_memory_share` of a trial's GPU share, and the trainer the rest.
    """
    width, rollout = NUMBERS[spec.model.dtype], spec.rollout
    trainer = CONTEXT + (width if spec.model.lora_rank else TRAINED) * parameters
    by_default = rollout.engine == "auto" and find_vllm() is not None
    if rollout.vllm_mode != "colocate" or not (rollout.engine == "vllm" or by_default):
        return trainer / device
    share, engine = rollout.vllm_memory_share, ENGINE + width * parameters
    return max(trainer / (1 - share), engine / share) / device


def read_device_memory() -> int | None:
    """Return the bytes of the smallest GPU here; None without NVIDIA's tool or without a GPU."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    amounts = [int(line) << 20 for line in answer.stdout.splitlines() if line.strip().isdigit()]
    return min(amounts, default=None)
