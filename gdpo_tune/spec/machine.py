"""Resources of the local machine, checked before a sweep starts."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from gdpo_tune.core.engines import check_compiler, check_trl_version, find_vllm, select_engine
from gdpo_tune.core.errors import GdpoTuneError, ResourcesError, UsageError
from gdpo_tune.core.http import find_webhook_problem
from gdpo_tune.core.object_store import SPEC
from gdpo_tune.core.system import (
    SHARE_FOR_CANDIDATES,
    count_local_cpus,
    count_parallel_candidates,
    read_machine_memory,
)
from gdpo_tune.core.trial_files import StepsReader
from gdpo_tune.spec.model import Resources, SweepSpec

DEVICES = Path("/dev")
REMEDY = "or set RAY_ADDRESS to a cluster that has them"
"""Last words of the fix of a machine that is too small."""


def check_resources(
    spec: SweepSpec, environment: Mapping[str, str] = os.environ, devices: Path = DEVICES
) -> None:
    """Refuse a trial that does not fit on this machine, unless `RAY_ADDRESS` names a cluster.

    Raises:
        ResourcesError: too few CPUs or GPUs, too little memory, or a variable that is not set.
        EngineError: no vLLM, TRL or C compiler, or a version that was not tested.
    """
    for problem in find_machine_problems(spec, environment, devices):
        raise problem


def find_machine_problems(
    spec: SweepSpec,
    environment: Mapping[str, str] = os.environ,
    devices: Path = DEVICES,
    *,
    size: bool = True,
) -> Iterator[UsageError]:
    """Yield the errors of `check_resources`; with `size` also those of CPUs, GPUs and memory."""
    yield from _catch(check_trl_version)
    yield from _catch(lambda: spec.resources.collect_variables(environment))
    if environment.get("RAY_ADDRESS"):
        return
    if size:
        yield from _catch(lambda: _check_size(spec, environment, devices))
    yield from _catch(lambda: _check_engine(spec))
    memory = read_machine_memory()
    if size and memory is not None and spec.sandbox.memory_mb << 20 > memory:
        yield ResourcesError(
            f"sandbox.memory_mb = {spec.sandbox.memory_mb}: this machine has {memory >> 20} MiB\n"
            f"    fix: --set sandbox.memory_mb={memory >> 21}, {REMEDY}"
        )


def _catch(check: Callable[[], object]) -> Iterator[UsageError]:
    try:
        check()
    except UsageError as error:
        yield error


def _check_size(spec: SweepSpec, environment: Mapping[str, str], devices: Path) -> None:
    gpus, cpus, trial = count_visible_gpus(environment, devices), count_local_cpus(), spec.resources
    if trial.gpus and "MIG-" in environment.get("CUDA_VISIBLE_DEVICES", ""):
        raise ResourcesError(
            "CUDA_VISIBLE_DEVICES names a part of a GPU (MIG), which vLLM takes for the whole GPU\n"
            "    fix: turn MIG off, and share a whole GPU: --set resources.gpus=0.5"
        )
    for kind, share, present in (("GPUs", trial.gpus, gpus), ("CPUs", trial.cpus, cpus)):
        if share > present:
            key = f"resources.{kind.lower()}"
            raise ResourcesError(
                f"{key} = {share:g}: this machine has {present} {kind} that may be used\n"
                f"    fix: --set {key}={present}, {REMEDY}"
            )
    fit = count_fitting_workers(trial, cpus, gpus)
    if trial.workers > fit:
        raise ResourcesError(
            f"resources.workers = {trial.workers}: each takes {trial.cpus:g} CPUs and "
            f"{trial.gpus:g} GPUs, and this machine has {cpus} and {gpus}\n"
            f"    fix: --set resources.workers={trial.reduce_workers(fit)}, {REMEDY}"
        )
    if trial.gpus:
        check_compiler()


def _check_engine(spec: SweepSpec) -> None:
    select_engine(
        spec.rollout,
        gpu=spec.resources.gpus > 0,
        has_fast_cpu=False,
        vllm=find_vllm(),
        lora_rank=spec.model.lora_rank,
        bfloat16=spec.model.dtype != "float32",
    )


SLACK = 1e-9
"""Ray keeps amounts as multiples of 1/10000; sums of decimal fractions are not exact."""


def count_fitting_workers(trial: Resources, cpus: float, gpus: float) -> int:
    """Return how many workers fit beside each other; a fraction of a GPU lies on one device."""
    count = cpus / trial.cpus
    if trial.gpus >= 1:
        count = min(count, gpus / trial.gpus)
    elif trial.gpus > 0:
        count = min(count, gpus * math.floor(1 / trial.gpus + SLACK))
    return math.floor(count + SLACK)


def count_visible_gpus(environment: Mapping[str, str], devices: Path = DEVICES) -> int:
    """Return how many GPUs `CUDA_VISIBLE_DEVICES` does not hide, by their device files."""
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


RECENT = 8
"""Sweeps among which one like another is looked for, the latest."""


def list_other_sweeps() -> Iterator[str]:
    """Yield a warning for each other sweep of this user on these CPUs, found by its raylet."""
    for server in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or belongs to another user
            driver = server.parent() if server.name() == "raylet" else None
            words = " ".join(driver.cmdline()) if driver is not None else ""
            shared = {*server.cpu_affinity()} & {*psutil.Process().cpu_affinity()}
            if driver is not None and shared and re.search("gdpo[-_]tune", words):
                yield (
                    f"process {driver.pid}, another sweep of yours in {driver.cwd()}, uses "
                    f"{len(shared)} CPUs of this one: both get slower, and may lack memory on the "
                    "same GPU\n    fix: wait for its end, or give each its own: taskset -c "
                    "CPUS gdpo-tune ..., and CUDA_VISIBLE_DEVICES=GPU"
                )


def find_pace(spec: SweepSpec) -> tuple[float, str] | None:
    """Return the seconds of a unit of `Cost.work` in the last sweep like this one, and its name.

    Like it is one in the same storage with the same task, policy, lengths and resources, in which a
    trial has ended a step. None: there is no such sweep, or the storage is not on a disk.
    """
    from gdpo_tune.spec.load import load_spec  # late: it reads specs by way of this file

    def list_settings(other: SweepSpec) -> list[object]:
        training = other.training
        lengths = training.completions_per_step, training.max_completion_length
        settings = other.policy, other.model.lora_rank, other.rollout.engine, other.resources
        return [other.task, *settings, *lengths]

    files = [] if spec.address else [*Path(spec.storage).glob(f"*/{SPEC}")]
    for file in sorted(files, key=lambda path: path.stat().st_mtime, reverse=True)[:RECENT]:
        with suppress(GdpoTuneError, OSError):  # a damaged one says nothing
            other = load_spec(file, to_run=False)
            steps = [StepsReader(path).read()[-1:] for path in file.parent.glob("trials/*")]
            costs = [step.cost for last in steps for step in last]
            work = sum(cost.work for cost in costs)
            if work and list_settings(other) == list_settings(spec):
                return sum(cost.seconds for cost in costs) / work, file.parent.name
    return None


def list_sandbox_warnings(spec: SweepSpec) -> Iterator[str]:
    """Yield warnings about missing isolation, and about workers that memory forces to wait."""
    settings = spec.sandbox
    if settings.type == "unsafe_no_isolation":
        yield (
            "sandbox.type = unsafe_no_isolation: code that the policy writes runs with all the "
            "rights of your user: it can read and delete files, reach the network and leave "
            "processes behind. Write local."
        )
    memory, needed = read_machine_memory(), settings.memory_mb << 20
    if os.environ.get("RAY_ADDRESS") or memory is None or needed > memory:
        return
    parallel = count_parallel_candidates(memory, needed)
    if settings.workers > parallel:
        yield (
            f"sandbox.workers = {settings.workers}: {parallel} at a time will run, because each "
            f"may use {settings.memory_mb} MiB and candidates get {SHARE_FOR_CANDIDATES:.0%} of "
            f"the {memory >> 20} MiB that this machine has. Write workers: {parallel}, or lower "
            "sandbox.memory_mb."
        )


def find_unset_webhook(spec: SweepSpec) -> Iterator[UsageError]:
    """Yield the error of a webhook that the sweep could not notify from this machine."""
    name = spec.notify.webhook_env if spec.notify else ""
    problem = find_webhook_problem(os.environ.get(name, "")) if name else ""
    if problem:
        yield UsageError(
            f"notify.webhook_env = {name}: the environment variable is {problem}\n"
            f"    fix: export {name}=https://..., or remove notify:"
        )


def count_local_slots(spec: SweepSpec) -> int | None:
    """Return how many trials train side by side here, at least 1; None on a cluster."""
    if os.environ.get("RAY_ADDRESS"):
        return None
    if spec.rollout.vllm_mode == "server":
        return 1
    cpus, gpus = count_local_cpus(), count_visible_gpus(os.environ)
    return max(1, count_fitting_workers(spec.resources, cpus, gpus) // spec.resources.workers)
