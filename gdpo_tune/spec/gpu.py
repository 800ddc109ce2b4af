"""Choice of the sampler under `auto`, and the check that a share of a GPU holds a trial."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from gdpo_tune.core.engines import find_vllm
from gdpo_tune.core.errors import ResourcesError
from gdpo_tune.core.gpu_memory import GIB, TrialMemory
from gdpo_tune.core.policy_shapes import PolicyShapes
from gdpo_tune.core.text import format_bytes
from gdpo_tune.spec.checks import check_lengths_and_batches, check_resource_settings
from gdpo_tune.spec.first_trials import count_wide
from gdpo_tune.spec.model import SweepSpec
from gdpo_tune.spec.space import Choices

RANK = 16
"""Rank of the adapters that messages propose."""
WORKERS = (2, 4, 8)
"""Numbers of workers that messages propose."""
MEASURE_BY_CUDA = """
from torch import cuda
for number in range(cuda.device_count()):
    print(cuda.get_device_properties(number).total_memory >> 20)
"""
"""Program that prints the MiB of each GPU that CUDA sees; this process imports no torch."""


class Choice(NamedTuple):
    """Sampler, which may have been chosen where the file says `auto`, and the reason."""

    value: str
    why: str

    def __str__(self) -> str:
        return f"{self.value} ({self.why})"


def may_use_vllm(spec: SweepSpec) -> bool:
    """Return whether trials may sample with vLLM on a machine that has what this one has."""
    is_found = spec.resources.gpus > 0 and find_vllm() is not None
    return spec.rollout.engine == "vllm" or (spec.rollout.engine == "auto" and is_found)


def measure_trial(spec: SweepSpec, policy: PolicyShapes) -> TrialMemory:
    """Estimate the memory of a process of a trial, for the largest group of the space."""
    model, rollout = spec.model, spec.rollout
    betas, sizes = (spec.space.list_reachable(name) for name in ("beta", "group_size"))
    return TrialMemory(
        spec.build_trial_config({}, 0, Path()),
        policy,
        bfloat16=model.dtype != "float32",
        recomputes=model.gradient_checkpointing != "off",
        may_have_reference=betas is None or any(float(beta) > 0 for beta in betas),
        has_engine=may_use_vllm(spec) and rollout.vllm_mode == "colocate",
        workers=spec.resources.workers,
        group_size=max((int(size) for size in sizes or ()), default=1),
    )


def check_gpu_share(spec: SweepSpec, policy: PolicyShapes | None, device: int | None) -> None:
    """Raise `ResourcesError` for a share of a GPU in which the policy could not be trained.

    An unknown `policy`, an unknown `device` (bytes of the smallest GPU) and trials on a cluster
    (`RAY_ADDRESS`) pass. The bound is without activations: completions may be short.
    """
    gpus = spec.resources.gpus
    if not gpus or policy is None or device is None or os.environ.get("RAY_ADDRESS"):
        return
    memory = measure_trial(spec, policy)
    least = memory.least_room / device
    if gpus >= least:
        return
    parts = {
        "weights, gradients and moments": memory.weights + memory.gradients,
        "the reference": memory.reference,
        "copies to compute with": memory.least - memory.at_rest - memory.gradients,
        "vLLM": memory.engine.least if memory.has_engine else 0,
    }
    raise ResourcesError(
        f"resources.gpus = {gpus:g}: to train {policy.parameters / 1e6:,.1f} million parameters "
        f"takes at least {_round_up(least):g} of a GPU of {device / GIB:.0f} GiB, without "
        f"activations ({', '.join(f'{format_bytes(n)} for {k}' for k, n in parts.items() if n)})\n"
        f"    fix: {', or '.join(_list_remedies(spec, memory, device))}"
    )


def _list_remedies(spec: SweepSpec, memory: TrialMemory, device: int) -> list[str]:
    """Return changes of which each suffices: a larger share or GPU, then what asks for less."""
    gpus, enough = spec.resources.gpus, _round_up(memory.least_room / device)
    remedies = [f"--set resources.gpus={enough:g}" if enough <= 1 else "a GPU with more memory"]
    alternatives: list[tuple[str, TrialMemory]] = []

    def propose(text: str, **changes: object) -> None:
        changed = measure_trial(spec.replace(**changes), memory.policy)
        alternatives.append((text, changed))

    if memory.has_engine:
        share = _round_up(memory.engine.least / (memory.least + memory.engine.least))
        text = f"divide it otherwise: --set rollout.vllm_memory_share={share:g}"
        propose(text, rollout=spec.rollout.replace(vllm_memory_share=share))
    if memory.has_engine and gpus >= 1:
        text = "let vLLM sleep during a step: --set rollout.sleep=true"
        propose(text, rollout=spec.rollout.replace(sleep=True))
    if memory.reference:
        text = "do without the reference policy: --set space.beta=0"
        alternatives.append((text, replace(memory, may_have_reference=False)))
    if not memory.rank:
        text = f"train adapters: --set model.lora_rank={RANK}"
        propose(text, model=spec.model.replace(lora_rank=RANK))
    if gpus >= 1 and spec.resources.sharding != "none":
        for count in (count for count in WORKERS if count > spec.resources.workers):
            resources = spec.resources.replace(workers=count)
            asked = spec.replace(resources=resources)
            if not [*check_resource_settings(asked), *check_lengths_and_batches(asked)]:
                text = f"divide the policy: --set resources.workers={count}, each with a GPU"
                propose(text, resources=resources)
                if alternatives[-1][1].least_room <= device:
                    break
    return remedies + [text for text, each in alternatives if each.least_room <= gpus * device]


def _round_up(share: float) -> float:
    return math.ceil(share * 100) / 100


def read_device_memory() -> int | None:
    """Return the bytes of the smallest GPU here; None without NVIDIA's tool or without a GPU.

    Of a GPU that is divided (MIG), the tool tells the whole, and torch the part that CUDA sees. Of
    unequal ones CUDA tells which are visible: `CUDA_VISIBLE_DEVICES` has UUIDs, or numbers in
    CUDA's order, in which the fastest comes first.
    """
    query = "--query-gpu=memory.total,mig.mode.current"
    try:
        answer = _run(["nvidia-smi", query, "--format=csv,noheader,nounits"], 20)
        are_equal = len(set(answer.splitlines())) <= 1
        if "Enabled" in answer or ("CUDA_VISIBLE_DEVICES" in os.environ and not are_equal):
            answer = _run([sys.executable, "-c", MEASURE_BY_CUDA], 120)
    except (OSError, subprocess.SubprocessError):
        return None
    amounts = (line.partition(",")[0].strip() for line in answer.splitlines())
    return min((int(amount) << 20 for amount in amounts if amount.isdigit()), default=None)


def _run(command: list[str], seconds: float) -> str:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, check=True
    ).stdout


LARGE = 300
"""Trials from which a proposal of the Gaussian process takes more than five seconds of a core."""
MANY_OBJECTIVES = 4
"""Number of objectives from which expected hypervolume is slow and says little about each."""
CROWDED = 32
"""Slots from which proposals of a second or more, one after the other, leave some of them idle."""


def choose_sampler(spec: SweepSpec, slots: int | None = None) -> Choice:
    """Return the requested sampler, or for `auto` that of the first of these rules that holds.

    The value is a key of `registry.SAMPLERS`, never `auto`.
    `qmc` if all trials run side by side without an earlier sweep. `tpe` for many objectives, many
    trials, only choices, or many slots. Else `gp`, the Gaussian process.
    `slots` is the number of trials at the same time; None while that is unknown.
    """
    search, domains = spec.search, spec.space.searched_domains.values()
    trials, objectives = count_affordable_trials(spec), len(spec.objectives)
    name, why = "tpe", ""
    if search.sampler != "auto":
        name, why = search.sampler, "as requested"
    elif slots is not None and slots >= trials and not search.warm_start:
        name, why = "qmc", f"all {trials} trials run side by side, so none can learn from another"
    elif objectives >= MANY_OBJECTIVES:
        why = f"{objectives} objectives are too many for a Gaussian process"
    elif trials > LARGE:
        why = f"a Gaussian process of {trials} trials takes many seconds a proposal"
    elif domains and all(isinstance(domain, Choices) for domain in domains):
        why = "every parameter is a choice, and choices have no distance"
    elif slots is not None and slots > CROWDED:
        why = f"{slots} slots would wait for proposals of a Gaussian process"
    else:
        most = "at most " if search.is_divided else ""
        counts = f"{most}{trials} trials of {len(domains)} parameters and {objectives} objective"
        plural = "s" if objectives > 1 else ""
        name, why = "gp", f"{counts}{plural}: small enough for Gaussian-process search"
    return Choice(name, why)


def count_affordable_trials(spec: SweepSpec) -> int:
    """Return how many configurations the sweep can afford, at most."""
    search = spec.search
    limits = [count_wide(spec) if search.is_divided else search.trials]
    if search.budget.trials:
        limits.append(search.budget.trials)
    if search.budget.completions and search.scheduler.type == "fifo":
        each = spec.training.steps * spec.training.completions_per_step
        limits.append(-(-search.budget.completions // each))
    return min(limits)
