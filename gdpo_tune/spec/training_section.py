"""`training:` and `resources:`: CPUs, GPUs, workers, and their parts of a step."""

from __future__ import annotations

import importlib.util
import math
from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import BeforeValidator

from gdpo_tune.core.settings import RolloutSettings, Sharding, TrainingSettings
from gdpo_tune.core.text import format_count
from gdpo_tune.spec import environment
from gdpo_tune.spec.problems import Problems, join_names, show
from gdpo_tune.spec.sections import Section, build_refusal
from gdpo_tune.spec.space import Space, Uniform

TOTAL = "training.completions_per_step"
LEAST_RESOURCE = 0.0001
"""Smallest share of a resource that Ray can count."""


MOST_PACKED = 1024
"""Largest `resources.pack`."""


def read_pack(value: object) -> object:
    """Return a number of trials, or `auto`."""
    if value == "auto" or (type(value) is int and 1 <= value <= MOST_PACKED):
        return value
    reason = f"neither auto nor a whole number from 1 to {MOST_PACKED}"
    raise build_refusal(reason, "write pack: auto, or a number such as 4")


class Resources(Section):
    """Resources of one process of a trial. As many trials run side by side as fit."""

    cpus: Annotated[float, Ge(LEAST_RESOURCE), Le(100_000)] = 1.0
    """CPU cores; also the threads of torch, rounded down to at least 1."""
    gpus: Annotated[float, Ge(0), Le(100_000)] = 0.0
    """GPUs: 1, a fraction below 1 to share one, or 0. A training process computes on one GPU."""
    workers: Annotated[int, Ge(1)] = 1
    """Training processes of a trial, each with these `cpus` and `gpus`."""
    pack: Annotated[Annotated[int, Ge(1)] | Literal["auto"], BeforeValidator(read_pack)] = 1
    """Trials of LoRA that share one process with these `cpus` and `gpus`, its base policy and its
    engine; `auto`: as many as fit in the GPU's memory. Each trains as it would alone."""
    sharding: Sharding = "auto"
    """`full` divides weights, gradients and the optimizer's averages among the workers of a trial
    (FSDP2). `none` gives each worker all of them. `auto` is `full` for several workers."""
    env: Annotated[tuple[str, ...], BeforeValidator(environment.read_entries)] = ()
    """Environment variables of every training process, on every node: `[HF_TOKEN, NCCL_DEBUG=INFO]`
    or `{NCCL_DEBUG: INFO}`. A name alone takes the value that the command has; a secret must be
    given so, because what is written here is stored and shown."""

    @property
    def shards_policy(self) -> bool:
        """True if the workers of a trial share one copy of its policy."""
        return self.workers > 1 and self.sharding != "none"

    @property
    def share_text(self) -> str:
        """CPUs and GPUs of one process in words: `1 CPU and 0.5 GPUs`."""
        return f"{format_count(self.cpus, 'CPU')} and {format_count(self.gpus, 'GPU')}"

    @property
    def total_gpus(self) -> float:
        """GPUs of a trial, over its workers; of a shared process, the trial's part."""
        return self.gpus * self.workers / self.trials_per_process

    @property
    def trials_per_process(self) -> int:
        """Trials that share a process; 1 while `auto` is not settled, see `choose_pack`."""
        return 1 if self.pack == "auto" else self.pack

    def reduce_workers(self, most: int) -> int:
        """Return the most workers, at most `most`, that can share what these ones can; at least 1.

        What divides by a number of workers divides by each divisor of it.
        """
        fewer = range(min(most, self.workers), 1, -1)
        return next((count for count in fewer if self.workers % count == 0), 1)


def check_length_limit(training: TrainingSettings, problems: Problems) -> None:
    """Refuse a length limit that no completion can exceed."""
    longest = training.max_completion_length
    if training.length_limit >= longest:
        reason = f"not below max_completion_length = {longest}: every completion is within it"
        fix = f"write a limit below {longest}, or raise training.max_completion_length"
        key, other = "training.length_limit", "training.max_completion_length"
        problems.refuse(key, reason, fix, other, value=training.length_limit)


def check_optimizer(training: TrainingSettings, problems: Problems) -> None:
    """Refuse an optimizer whose package is not installed."""
    if training.optimizer == "adamw_8bit" and importlib.util.find_spec("torchao") is None:
        fix = "pip install 'gdpo-tune[adam8bit]', or write optimizer: adamw"
        problems.refuse("training.optimizer", "adamw_8bit needs the package torchao", fix)


def check_group_sizes(space: Space, training: TrainingSettings, problems: Problems) -> None:
    """Refuse group sizes that do not divide the completions of a step."""
    total, domain = training.completions_per_step, space.domains["group_size"]
    uneven = [size for size in list_group_sizes(space) if total % size]
    if not uneven:
        return
    divisors = [size for size in range(2, total + 1) if total % size == 0]
    if isinstance(domain, Uniform):
        divisors = [size for size in divisors if domain.low <= size <= domain.high] or divisors
    reason = f"{shorten_list(uneven)} does not divide {TOTAL} = {total}"
    fix = f"use group sizes among {show(divisors)}, or change {TOTAL}"
    key = "space.group_size" if problems.has_key("space.group_size") else TOTAL
    problems.refuse(key, reason, fix, "space.group_size", TOTAL)


def check_resources(
    own: Resources,
    rollout: RolloutSettings,
    space: Space,
    training: TrainingSettings,
    problems: Problems,
) -> None:
    """Refuse shares that no machine grants, and workers that cannot compute equal parts."""
    gpus, key, workers = own.gpus, "resources.gpus", own.workers
    environment.check_entries(own.env, problems)
    if workers > 1 and gpus not in (0.0, 1.0):
        reason = f"each of the {workers} workers of a trial trains on one GPU of its own"
        problems.refuse(key, reason, "write gpus: 1, which is for each of them, or 0")
    elif 0 < gpus < LEAST_RESOURCE:
        reason = "Ray counts in ten-thousandths, so this would be 0"
        problems.refuse(key, reason, f"write 0 for none, or at least {LEAST_RESOURCE}")
    elif gpus > 1:
        reason = "a training process computes on one GPU, and the others would idle"
        fix = f"write gpus: 1; for several GPUs a trial, also workers: {math.ceil(gpus)}"
        problems.refuse(key, reason, fix)
    if own.sharding == "full" and workers == 1:
        reason = "FSDP asked of one process, which holds the whole policy"
        fix = "write resources.workers: 2 or more, or sharding: auto"
        problems.refuse("resources.sharding", reason, fix, "resources.workers")
    if workers > 1 and rollout.vllm_mode == "server":
        reason = f"a server samples for one worker, and a trial has {workers}"
        fix = "write vllm_mode: colocate, with an engine in each worker, or resources.workers: 1"
        problems.refuse("rollout.vllm_mode", reason, fix, "resources.workers")
    total, sizes = training.completions_per_step, list_group_sizes(space)
    uneven = [size for size in sizes if workers > 1 and total // size % workers]
    if uneven:
        prompts = shorten_list([total // size for size in uneven])
        reason = (
            f"does not divide the {prompts} prompts of a step that group_size "
            f"{shorten_list(uneven)} leaves of {TOTAL} = {total}"
        )
        multiple = math.lcm(*(size * workers for size in sizes))
        fix = f"write completions_per_step: {-(-total // multiple) * multiple}, or fewer workers"
        problems.refuse("resources.workers", reason, fix, "space.group_size", TOTAL)
    _check_mini_batch(training, workers, problems)
    _check_micro_batch(training, workers, problems)


def _check_mini_batch(training: TrainingSettings, workers: int, problems: Problems) -> None:
    total, mini_batch = training.completions_per_step, training.mini_batch_size
    if not mini_batch or (total % mini_batch == 0 and mini_batch % workers == 0):
        return
    if total % mini_batch:
        reason = f"does not divide the {total} completions of a step"
    else:
        reason = f"{workers} workers cannot compute equal parts of it"
    sizes = [size for size in range(workers, total, workers) if total % size == 0]
    fix = f"write one of {show(sizes)}, or 0 for" if sizes else "write 0 for"
    fix += " one optimizer step a pass"
    problems.refuse("training.mini_batch_size", reason, fix, TOTAL, "resources.workers")


def _check_micro_batch(training: TrainingSettings, workers: int, problems: Problems) -> None:
    mini_batch, micro_batch = training.mini_batch_size, training.micro_batch_size
    share = (mini_batch or training.completions_per_step) // workers
    if not micro_batch or not share or share % micro_batch == 0:
        return
    part = f" that each of {workers} workers computes" if workers > 1 else ""
    whole = "mini-batch" if mini_batch else "step"
    reason = f"does not divide the {share} completions of a {whole}"
    smaller = [count for count in range(1, share) if share % count == 0]
    fix = f"write one of {show(smaller)}, or 0 to compute all at once"
    inputs = (TOTAL, "training.mini_batch_size", "resources.workers")
    problems.refuse("training.micro_batch_size", reason + part, fix, *inputs)


def list_group_sizes(space: Space) -> list[int]:
    """Return every group size that a trial can have."""
    return [size for size in space.list_reachable("group_size") or () if isinstance(size, int)]


def shorten_list(sizes: list[int]) -> str:
    """Return at most six values, then an ellipsis."""
    return join_names(sizes[:6]) + (", ..." if len(sizes) > 6 else "")


def check_sleep(settings: RolloutSettings, own: Resources, problems: Problems) -> None:
    """Refuse an engine that sleeps where vLLM cannot, or where others need it awake."""
    reason = ""
    if own.gpus == 0:
        reason = "vLLM on a CPU has no sleep mode"
    elif own.gpus < 1:
        reason = "vLLM fails if another trial takes memory of its GPU while it falls asleep"
    elif own.trials_per_process > 1:
        reason = "trials that share a process need its engine at different times"
    if settings.sleep and reason:
        fix = "remove the key, or write resources: {gpus: 1, pack: 1}"
        problems.refuse("rollout.sleep", reason, fix, "resources.gpus", "resources.pack")
