"""Steps of `gpu_check.py` in which trials share a device, or a trial takes several."""

from __future__ import annotations

from collections.abc import Iterator

import gpu_check_judge as judgements
from gpu_check_plan import RANK, Context
from gpu_check_rows import Row, skip
from gpu_check_sweeps import build_sweep, find_refusal, run_sweep_command

NO_GPU = "no GPU"
SHARES = {1.0: 2, 0.5: 2, 0.25: 4}
"""Share of a GPU -> trials that train on it."""
PACKS = (1, 2, 4, 8)
"""Trials of LoRA in a process."""
SMALL_PACK = 2
"""Trials in a process on a CPU, where nothing is compared."""
PACK_STEPS = 12
"""Steps of their trials: the start of an engine must not decide."""
SECONDS = 300
"""Most seconds of a sweep."""


def check_packing(context: Context) -> Iterator[Row]:
    """Measure trials an hour with 1, 1/2 and 1/4 of a GPU each."""
    step, plan = "packing", context.plan
    if plan.small:
        for share in SHARES:
            yield skip(step, f"{judgements.name_share(share)} of the GPU", NO_GPU)
        return
    alone = None
    for share, trials in SHARES.items():
        file = build_sweep(plan, f"packing_{share:g}", share, trials, RANK)
        if reason := find_refusal(file):
            yield skip(step, f"{judgements.name_share(share)} of the GPU", reason)
            continue
        figures = run_sweep_command(file, step, context.processes, SECONDS, small=False)
        alone = alone or figures.trials_per_hour
        yield judgements.judge_packing(step, share, figures, alone, unit="the GPU")


def check_packs(context: Context) -> Iterator[Row]:
    """Measure trials an hour of processes that train 1, 2, 4 and 8 trials on one base."""
    step, plan = "packs", context.plan
    alone = None
    for size in PACKS:
        check, trials = judgements.name_pack(size), max(size, 2)
        if plan.small and size != SMALL_PACK:
            yield skip(step, check, NO_GPU)
            continue
        file = build_sweep(plan, f"pack_{size}", 1.0, trials, RANK, PACK_STEPS, pack=size)
        if reason := find_refusal(file):
            yield skip(step, check, reason)
            continue
        figures = run_sweep_command(file, step, context.processes, SECONDS, small=plan.small)
        yield judgements.judge_pack(step, size, figures, alone)
        alone = alone or figures.trials_per_hour


def check_shards(context: Context) -> Iterator[Row]:
    """Check that two processes train every weight of one policy, each on its own GPU."""
    step, check, plan = "shards", "two workers under FSDP2", context.plan
    if plan.small or len(plan.devices) < 2:
        yield skip(step, check, NO_GPU if plan.small else "it needs two GPUs")
        return
    file = build_sweep(plan, step, 1.0, 2, 0, workers=2)
    devices = plan.devices[:2]
    if reason := find_refusal(file, devices):
        yield skip(step, check, reason)
        return
    figures = run_sweep_command(
        file, step, context.processes, SECONDS, small=False, devices=devices
    )
    yield judgements.judge_shards(step, check, figures, trials=2)
