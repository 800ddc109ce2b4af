"""The computed tables of docs/gpus.md: memory of recipes, and GPUs on which they fit.

Written by `python -m gdpo_tune.spec.gpu_reference docs/gpus.md search_spaces/*_qwen.yaml`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gdpo_tune.core.files import write_atomically
from gdpo_tune.core.gpu_memory import CUDA_CONTEXT_BYTES, MOMENTS, TrialMemory
from gdpo_tune.core.policy_shapes import PolicyShapes, find_known_size
from gdpo_tune.core.text import format_bytes, render_table
from gdpo_tune.spec.gpu import measure_trial
from gdpo_tune.spec.load import load_spec
from gdpo_tune.spec.machine import measure_disk
from gdpo_tune.spec.model import SweepSpec
from gdpo_tune.spec.reference import fill_between

DEVICES = {
    "A10, 24 GB": 23_028 << 20,
    "A100, 40 GB": 40_960 << 20,
    "L40S, 48 GB": 46_068 << 20,
    "A100 or H100, 80 GB": 81_559 << 20,
    "H200, 141 GB": 143_771 << 20,
}
"""GPU -> bytes, as `nvidia-smi` reports them."""
POLICIES = ("Qwen/Qwen3-0.6B", *(f"Qwen/Qwen2.5-{size}" for size in ("1.5B", "3B", "7B", "14B")))
"""Policies of the tables of sizes, from small to large."""
BASE = "math_qwen"
"""Recipe whose settings those tables take."""
RANK = 32
COUNTS = (1, 2, 4, 8)
"""GPUs of a trial, each with a process."""
SLOTS = 8
"""Trials side by side, in the column of the disk."""


def fill_page(page: str, files: Sequence[Path]) -> str:
    """Return the page with new tables, see `fill_between`."""
    specs = [load_spec(file, to_run=False) for file in files]
    base = next(spec for spec in specs if spec.name == BASE)
    memory_rows: list[tuple[str, ...]] = []
    for spec in specs:
        size = get_known_size(spec.policy)
        m, disk = measure_trial(spec, size), measure_disk(spec, size, SLOTS)
        parts = [m.weights + m.gradients, m.compute_copies, m.reference, m.head, m.activations]
        parts += [m.total, m.engine.least, disk.peak]
        memory_rows.append((f"`{spec.name}`", *(format_bytes(n) if n else "" for n in parts)))
    fit_rows = [(f"`{s.name}`", *(describe_fit(s, d) for d in DEVICES.values())) for s in specs]
    gpu_rows: list[tuple[str, ...]] = []
    for policy in POLICIES:
        name, devices = policy.partition("/")[2], DEVICES.values()
        for kind, rank in (("every weight", 0), (f"LoRA, rank {RANK}", RANK)):
            recipe = base.replace(model=base.model.replace(lora_rank=rank))
            memory = measure_trial(recipe, get_known_size(policy))
            gpu_rows.append((name, kind, *(count_gpus(memory, device) for device in devices)))
    sizes = [device.partition(", ")[2] for device in DEVICES]
    head = ("recipe", "weights, gradients, moments", "bfloat16 copies", "reference", "head")
    head += ("activations", "trainer in all", "vLLM at least", "disk of the sweep")
    tables = (
        render_table(head, memory_rows),
        render_table(("recipe", *DEVICES), fit_rows),
        render_table(("policy", "what is trained", *sizes), gpu_rows),
    )
    return fill_between(page, "<!-- generated: memory -->", tables)


def count_gpus(memory: TrialMemory, device: int) -> str:
    """Return the least number of GPUs of a trial, and the number with moments in 8 bits."""
    least: dict[str, int] = {}
    for optimizer, moments in MOMENTS.items():
        spread = (replace(memory, workers=n, shards=n, moment_bytes=moments) for n in COUNTS)
        least[optimizer] = next((each.shards for each in spread if find_share(each, device)), 0)
    usual, smaller = least["adamw"], least["adamw_8bit"]
    if usual == smaller:
        return str(usual) if usual else "none"
    return f"{usual}, or {smaller} (8 bits)" if usual else f"{smaller} (8 bits)"


def get_known_size(policy: str) -> PolicyShapes:
    """Return the size of a policy of the tables."""
    size = find_known_size(policy)
    if size is None:
        raise ValueError(f"the size of {policy} is not known")
    return size


def describe_fit(spec: SweepSpec, device: int) -> str:
    """Return whether a recipe fits on a GPU, and at which share of vLLM."""
    share = find_share(measure_trial(spec, get_known_size(spec.policy)), device)
    if not share:
        return "no"
    as_it_is = math.isclose(share, spec.rollout.vllm_memory_share)
    return "yes" if as_it_is else f"with `vllm_memory_share: {share:g}`"


def find_share(memory: TrialMemory, device: int) -> float:
    """Return a share of vLLM at which a trial fits on its GPUs, its own first; 0 if none does."""
    least = math.ceil((memory.engine.least + CUDA_CONTEXT_BYTES) / device * 20) / 20
    shares = (memory.engine_share, least)
    return next((s for s in shares if replace(memory, engine_share=s).fits(device)), 0.0)


if __name__ == "__main__":
    page, files = Path(sys.argv[1]), [Path(name) for name in sorted(sys.argv[2:])]
    write_atomically(page, fill_page(page.read_text(encoding="utf-8"), files))
