"""Resources and disk of the local machine, checked before a sweep starts.

A running trial has its two newest checkpoints, and one that is being written; of up to two others,
at which it was evaluated, it keeps the weights. The last checkpoint of a trial has no optimizer
state. A trial that has ended keeps one at most, because it may join the front until the sweep ends.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from gdpo_tune.core.engines import (
    check_adapter_precision,
    check_compiler,
    check_trl_version,
    find_vllm,
    select_engine,
)
from gdpo_tune.core.errors import GdpoTuneError, ResourcesError, UsageError
from gdpo_tune.core.files import is_directory
from gdpo_tune.core.gpu_memory import MOMENTS, NUMBER_BYTES
from gdpo_tune.core.gpu_memory import TRAINED_PARAMETER_BYTES as TRAINED
from gdpo_tune.core.http import find_webhook_problem
from gdpo_tune.core.object_store import SPEC
from gdpo_tune.core.policy_shapes import PolicyShapes
from gdpo_tune.core.system import (
    SHARE_FOR_CANDIDATES,
    count_local_cpus,
    count_parallel_candidates,
    read_machine_memory,
)
from gdpo_tune.core.text import format_bytes
from gdpo_tune.core.trial_files import NEWEST_KEPT, StepsReader
from gdpo_tune.spec.first_trials import count_wide, list_long_weights
from gdpo_tune.spec.gpu import RANK
from gdpo_tune.spec.model import (
    Checkpoints,
    Merges,
    Resources,
    SweepSpec,
)

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
    rank, on_gpu = spec.model.lora_rank, spec.resources.gpus > 0
    engine = select_engine(
        spec.rollout, gpu=on_gpu, has_fast_cpu=False, vllm=find_vllm(), lora_rank=rank
    )
    in_bfloat16 = spec.model.dtype != "float32"
    check_adapter_precision(engine, gpu=on_gpu, lora_rank=rank, bfloat16=in_bfloat16)


def count_fitting_workers(trial: Resources, cpus: int, gpus: int) -> int:
    """Return how many workers fit beside each other."""
    by_cpu = int(cpus / trial.cpus + 1e-9)
    return min(by_cpu, int(gpus / trial.gpus)) if trial.gpus else by_cpu


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
                    "same GPU\n    fix: wait for its end, or give each its own: taskset -c 0-3 "
                    "gdpo-tune ..., and CUDA_VISIBLE_DEVICES=0"
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


MOST_KEPT = 2
"""Evaluated checkpoints before its end that a trial keeps."""


@dataclass(frozen=True)
class SweepDisk:
    """Bytes of the checkpoints of a sweep, at most."""

    running: int
    """One checkpoint of a trial that will continue: trained weights and optimizer."""
    last: int
    """The last checkpoint of a trial: trained weights alone."""
    ended: int
    """Checkpoints of one trial that has ended, or that waits without a process."""
    slots: int
    """Trials that train side by side."""
    trials: int
    """Trainings of the sweep, baselines and replicates included."""
    evaluated: int = 0
    """Weights that a trial keeps until its end because it was evaluated with them."""
    candidates: int = 0
    """Merges, and checkpoints of trials that have ended, over the whole sweep."""
    start: int = 0
    """The policy after the supervised start."""
    whole: int = 0
    """A policy with the weights below its adapter, as commands write it."""

    @property
    def training(self) -> int:
        """Bytes of one trial while it trains."""
        return NEWEST_KEPT * self.running + self.evaluated + max(self.running, self.last)

    @property
    def peak(self) -> int:
        """Bytes when the last trials train and all others have ended."""
        side_by_side = min(self.slots, self.trials)
        ended = (self.trials - side_by_side) * self.ended
        return side_by_side * self.training + ended + self.candidates + self.start

    def __str__(self) -> str:
        parallel = min(self.slots, self.trials)
        training = format_bytes(self.training)
        parts = [f"{NEWEST_KEPT + 1} checkpoints of {parallel} that train: {training} each"]
        if others := self.trials - parallel:
            kept = f"{format_bytes(self.ended)} each" if self.ended else "nothing"
            parts.append(f"{others} others: {kept}")
        if self.start:
            parts.append(f"the start: {format_bytes(self.start)}")
        if self.candidates:
            parts.append(f"merges and earlier checkpoints: {format_bytes(self.candidates)}")
        return "; ".join(parts)


def measure_disk(spec: SweepSpec, size: PolicyShapes, slots: int) -> SweepDisk:
    """Compute the disk of a sweep from the size of its policy."""
    model, search, parameters = spec.model, spec.search, size.parameters
    rank, most_parts = model.lora_rank, search.merges.most_parts
    trained = size.count_adapter_parameters(rank, model.lora_targets) if rank else parameters
    on_gpu = spec.resources.gpus > 0
    frozen = NUMBER_BYTES[model.dtype] if on_gpu or model.dtype != "auto" else TRAINED
    running, weights = (TRAINED + MOMENTS["adamw"]) * trained, TRAINED * trained
    last = frozen * trained if rank else weights  # an adapter is rounded in the end
    whole = frozen * parameters + weights if rank else weights  # with the adapter in it
    ended = 0 if spec.keep == "none" else last
    if spec.keep == "all":  # a trial that was stopped early keeps its newest checkpoint
        ended = max(last, running)
    if search.is_divided:
        ended = max(ended, NEWEST_KEPT * running)  # it waits with what it needs to continue
    evaluated, candidates = list_evaluated_steps(spec), 0
    if spec.has_candidates:
        merges = min(spec.most_merges, search.merges.budget)
        seeds = search.replicates.max_trainings if merges else 0
        checkpoints = search.checkpoints.budget if evaluated else 0
        # a merge of adapters has the ranks of all its parts
        merged = last * (most_parts if rank else 1)
        candidates = (merges + seeds) * merged + checkpoints * weights
    every, steps = spec.training.checkpoint_every, spec.training.steps
    newest = sorted({*range(every, steps, every), *evaluated})[-NEWEST_KEPT:]
    # Configurations, replicates and the baseline.
    planned = search.replicates.max_trainings + 1
    planned += (
        count_wide(spec) + len(list_long_weights(spec)) if search.is_divided else search.trials
    )
    return SweepDisk(
        running=running,
        last=last,
        ended=ended,
        slots=slots,
        trials=min(planned, search.budget.trials or planned),
        evaluated=len({*evaluated} - {*newest}) * weights,
        candidates=candidates,
        start=whole if spec.start else 0,
        whole=whole,
    )


def list_evaluated_steps(spec: SweepSpec) -> list[int]:
    """Return the last `MOST_KEPT` steps before its end at which a search trial is evaluated.

    It keeps these checkpoints to choose from: earlier ones are seldom on the front.
    """
    steps = spec.training.steps
    if not spec.has_candidates or not spec.search.checkpoints.budget:
        return []
    rungs = [math.ceil(steps / 2), math.ceil(steps / 4)] if spec.search.is_divided else []
    every = spec.training.evaluate_every
    return sorted({*range(every, steps, every), *rungs})[-MOST_KEPT:]


def count_local_slots(spec: SweepSpec, environment: Mapping[str, str] = os.environ) -> int | None:
    """Return how many trials train side by side here, at least 1; None on a cluster."""
    if environment.get("RAY_ADDRESS"):
        return None
    cpus, gpus = count_local_cpus(), count_visible_gpus(environment)
    fit = count_fitting_workers(spec.resources, cpus, gpus) // spec.resources.workers
    if spec.rollout.vllm_mode == "server":
        return 1
    return max(1, fit)


def check_disk(spec: SweepSpec, size: PolicyShapes | None, source: str = "") -> None:
    """Refuse a local disk that cannot hold the checkpoints of a sweep; `source` names its file.

    What the sweep has on it already counts as room. An unknown `size` and an object store pass. On
    a cluster, one trial at a time is counted: the number of its slots is not known yet.

    Raises:
        ResourcesError: the disk is too small; the message has changes of which each suffices.
    """
    if size is None or spec.address:
        return
    disk = measure_disk(spec, size, count_local_slots(spec) or 1)
    present = nearest_existing(spec.directory.absolute())
    free = shutil.disk_usage(present).free
    room = free + count_present_bytes(spec.directory)
    if disk.peak <= room:
        return
    remedies = ["--set storage=DIRECTORY, on a larger disk"]
    for changed, text in (
        (
            spec.replace(model=spec.model.replace(lora_rank=spec.model.lora_rank or RANK)),
            f"train adapters: --set model.lora_rank={RANK}",
        ),
        (spec.replace(keep="none"), "keep no policy: --set keep=none"),
        (
            spec.replace(
                search=spec.search.replace(
                    merges=Merges(budget=0), checkpoints=Checkpoints(budget=0)
                )
            ),
            "only the ends of trainings: --set search.merges.budget=0 "
            "--set search.checkpoints.budget=0",
        ),
    ):
        if measure_disk(changed, size, disk.slots).peak <= room:
            remedies.append(text)
    others = disk.trials - spec.search.trials
    spent = disk.slots * disk.training + disk.candidates
    fits = math.floor((room - spent) / disk.ended) if disk.ended else 0
    if fits + disk.slots > others and not spec.search.is_divided:
        remedies.append(f"fewer trials: --set search.trials={fits + disk.slots - others}")
    where = f"{source}: " if source else ""
    raise ResourcesError(
        f"{where}storage = {spec.storage}: the checkpoints of this sweep need up to "
        f"{format_bytes(disk.peak)} ({disk}), and {present} has room for "
        f"{format_bytes(room)}\n    fix: {', or '.join(remedies)}"
    )


def nearest_existing(directory: Path) -> Path:
    """Return the closest directory above that exists."""
    return next(path for path in (directory, *directory.parents) if is_directory(path))


def count_present_bytes(directory: Path) -> int:
    """Return the bytes of a sweep's trials that are there already."""
    total = 0
    for path in (directory / "trials").rglob("*"):
        with suppress(OSError):  # a sweep that runs meanwhile trims its trials
            status = path.stat()
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total
