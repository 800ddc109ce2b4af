"""Peak of the disk that the checkpoints of a sweep need, and whether a disk can hold it.

A running trial has its two newest checkpoints, and one that is being written; of up to two others,
at which it was evaluated, it keeps the weights. The last checkpoint of a trial has no optimizer
state. A trial that has ended keeps one at most, because it may join the front until the sweep ends.
The budgets of checkpoints and merges limit how many policies stay besides.
"""

from __future__ import annotations

import math
import os
import shutil
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gdpo_tune.core.errors import ResourcesError
from gdpo_tune.core.files import is_directory
from gdpo_tune.core.gpu_memory import NUMBER_BYTES
from gdpo_tune.core.policy_shapes import PolicyShapes
from gdpo_tune.core.system import count_local_cpus
from gdpo_tune.spec.gpu import RANK
from gdpo_tune.spec.machine import count_fitting_workers, count_visible_gpus
from gdpo_tune.spec.model import AshaSettings, Checkpoints, Merges, PbtSettings, SweepSpec
from gdpo_tune.spec.text import format_bytes

KEPT = 2
"""Complete checkpoints of a running trial."""
MOST_KEPT = 2
"""Evaluated checkpoints before its end that a trial keeps."""
WEIGHT = 4
"""Bytes of a trained weight: 32 bits."""
OPTIMIZER = 8
"""Bytes of the optimizer's two averages of a trained number."""


@dataclass(frozen=True)
class SweepDisk:
    """Bytes of the checkpoints of a sweep, at most."""

    running: int
    """One checkpoint of a trial that will continue: trained weights and optimizer."""
    last: int
    """The last checkpoint of a trial: the policy alone."""
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

    @property
    def training(self) -> int:
        """Bytes of one trial while it trains."""
        return KEPT * self.running + self.evaluated + max(self.running, self.last)

    @property
    def peak(self) -> int:
        """Bytes when the last trials train and all others have ended."""
        side_by_side = min(self.slots, self.trials)
        ended = (self.trials - side_by_side) * self.ended
        return side_by_side * self.training + ended + self.candidates


def measure_disk(spec: SweepSpec, size: PolicyShapes, slots: int) -> SweepDisk:
    """Compute the disk of a sweep from the size of its policy."""
    model, numbers = spec.model, size.parameters
    rank = model.lora_rank
    trained = size.count_adapter_numbers(rank, model.lora_targets) if rank else numbers
    on_gpu = spec.resources.gpus > 0
    frozen = NUMBER_BYTES[model.dtype] if on_gpu or model.dtype != "auto" else WEIGHT
    running = (WEIGHT + OPTIMIZER) * trained
    # The last one of LoRA is the merged policy, and the adapter beside it.
    last = frozen * numbers + WEIGHT * trained if rank else WEIGHT * numbers
    return SweepDisk(
        running=running,
        last=last,
        ended=_count_ended(spec, running, last),
        slots=slots,
        trials=count_trainings(spec),
        evaluated=len(list_evaluated_steps(spec)) * WEIGHT * trained,
        candidates=_count_candidates(spec, WEIGHT * trained, last),
    )


def list_evaluated_steps(spec: SweepSpec) -> list[int]:
    """Return the steps before its end at which a search trial keeps a checkpoint to choose from.

    They are the last `MOST_KEPT` at which it is evaluated: earlier ones are seldom on the front.
    """
    scheduler, steps = spec.search.scheduler, spec.training.steps
    if not spec.has_candidates or not spec.search.checkpoints.budget:
        return []
    if isinstance(scheduler, PbtSettings):  # a member may take over another training
        return []
    rungs = scheduler.list_rungs(steps) if isinstance(scheduler, AshaSettings) else ()
    every = spec.training.evaluate_every
    return sorted({*range(every, steps, every), *rungs})[-MOST_KEPT:]


def _count_candidates(spec: SweepSpec, trained: int, last: int) -> int:
    if not spec.has_candidates:
        return 0
    search = spec.search
    checkpoints = search.checkpoints.budget if list_evaluated_steps(spec) else 0
    merges = search.most_merges + (search.replicates.max_trainings if search.most_merges else 0)
    return merges * last + checkpoints * trained


def _count_ended(spec: SweepSpec, running: int, last: int) -> int:
    scheduler = spec.search.scheduler
    ended = 0 if spec.keep == "none" else last
    if spec.keep == "all":  # a trial that was stopped early keeps its newest checkpoint
        ended = max(last, running)
    waits = isinstance(scheduler, PbtSettings) or (
        isinstance(scheduler, AshaSettings) and scheduler.variant == "promote"
    )
    return max(ended, KEPT * running) if waits else ended


def count_trainings(spec: SweepSpec) -> int:
    """Return how many policies a sweep trains: configurations, replicates and the baseline."""
    search = spec.search
    planned = search.trials + search.replicates.max_trainings + 1
    return min(planned, search.budget.trials or planned)


def count_local_slots(spec: SweepSpec, environment: Mapping[str, str] = os.environ) -> int | None:
    """Return how many trials train side by side here; None on a cluster, whose nodes are unknown.

    Resources that this machine lacks count as one slot: the file may be for another machine.
    """
    if environment.get("RAY_ADDRESS"):
        return None
    cpus, gpus = count_local_cpus(), count_visible_gpus(environment)
    fit = count_fitting_workers(spec.resources, cpus, gpus) // spec.resources.workers
    if spec.rollout.vllm_mode == "server":
        return 1
    return max(1, fit) * spec.resources.trials_per_process


def check_disk(
    spec: SweepSpec,
    size: PolicyShapes | None,
    source: str = "",
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Refuse a local disk that cannot hold the checkpoints of a sweep; `source` names its file.

    What the sweep has on it already counts as room. An unknown `size` and an object store pass. On
    a cluster, one trial at a time is counted: the number of its slots is not known yet.

    Raises:
        ResourcesError: the message names the peak, the room and what lowers the peak.
    """
    if size is None or spec.address:
        return
    disk = measure_disk(spec, size, count_local_slots(spec, environment) or 1)
    present = find_present(spec.directory.absolute())
    free = shutil.disk_usage(present).free
    room = free + count_present_bytes(spec.directory)
    if disk.peak <= room:
        return
    where = f"{source}: " if source else ""
    raise ResourcesError(
        f"{where}storage = {spec.storage}: the checkpoints of this sweep need up to "
        f"{format_bytes(disk.peak)} ({describe_disk(disk)}), and {present} has room for "
        f"{format_bytes(room)}\n    fix: {', or '.join(list_remedies(spec, size, disk, room))}"
    )


def check_merge_room(
    spec: SweepSpec, size: PolicyShapes | None, directory: Path, count: int
) -> None:
    """Refuse a disk that cannot hold `count` merges of policies; an unknown `size` passes.

    Raises:
        ResourcesError: the message names what they need and the room.
    """
    if size is None:
        return
    needed, present = count * measure_disk(spec, size, 1).last, find_present(directory)
    free = shutil.disk_usage(present).free
    if needed > free:
        raise ResourcesError(
            f"merges of these policies need up to {format_bytes(needed)}, and {present} has room "
            f"for {format_bytes(free)}\n    fix: --out DIRECTORY, on a larger disk"
        )


def list_remedies(spec: SweepSpec, size: PolicyShapes, disk: SweepDisk, room: int) -> list[str]:
    """Return changes of which each suffices, the first of them without a change of the search."""
    remedies = ["--set storage=DIRECTORY, on a larger disk"]
    adapters = spec.replace(model=spec.model.replace(lora_rank=RANK))
    if not spec.model.lora_rank and measure_disk(adapters, size, disk.slots).peak <= room:
        remedies.append(f"train adapters: --set model.lora_rank={RANK}")
    unkept = spec.replace(keep="none")
    if measure_disk(unkept, size, disk.slots).peak <= room:
        remedies.append("keep no policy: --set keep=none")
    alone = {"merges": Merges(budget=0), "checkpoints": Checkpoints(budget=0)}
    ends = spec.replace(search=spec.search.replace(**alone))
    if measure_disk(ends, size, disk.slots).peak <= room:
        remedies.append(
            "only the ends of trainings: --set search.merges.budget=0 "
            "--set search.checkpoints.budget=0"
        )
    others = disk.trials - spec.search.trials
    spent = disk.slots * disk.training + disk.candidates
    fits = math.floor((room - spent) / disk.ended) if disk.ended else 0
    if fits + disk.slots > others:
        remedies.append(f"fewer trials: --set search.trials={fits + disk.slots - others}")
    return remedies


def describe_disk(disk: SweepDisk) -> str:
    """Return how the peak is made up."""
    side_by_side = min(disk.slots, disk.trials)
    parts = [
        f"{KEPT + 1} checkpoints of {side_by_side} that train: {format_bytes(disk.training)} each"
    ]
    rest = disk.trials - side_by_side
    if rest:
        kept = f"{format_bytes(disk.ended)} each" if disk.ended else "nothing"
        parts.append(f"{rest} others: {kept}")
    if disk.candidates:
        parts.append(f"merges and earlier checkpoints: {format_bytes(disk.candidates)}")
    return "; ".join(parts)


def find_present(directory: Path) -> Path:
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
