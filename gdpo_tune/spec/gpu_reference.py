"""The computed tables of docs/gpus.md: memory of recipes, and GPUs on which they fit.

Written by `python -m gdpo_tune.spec.gpu_reference docs/gpus.md search_spaces/*_qwen.yaml`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from gdpo_tune.core.files import write_atomically
from gdpo_tune.core.policy_size import PolicySize, find_known_size
from gdpo_tune.core.vllm_memory import CONTEXT
from gdpo_tune.spec.disk import measure_disk
from gdpo_tune.spec.gpu_memory import (
    AVERAGES,
    AVERAGES_8BIT,
    Layout,
    fits,
    format_bytes,
    measure_engine,
    measure_trainer,
    read_layout,
)
from gdpo_tune.spec.load import load_spec
from gdpo_tune.spec.model import SweepSpec
from gdpo_tune.spec.reference import render_table

BEGIN, END = "<!-- generated: memory -->", "<!-- end -->"
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
RANK, MICRO_BATCH = 32, 4
COUNTS = (1, 2, 4, 8)
"""GPUs of a trial, each with a process."""
MOST_PACKED = 32
"""Trials of LoRA in a process above which the table does not count."""
SLOTS = 8
"""Trials side by side, in the column of the disk."""


def fill_page(page: str, files: Sequence[Path]) -> str:
    """Return the page with new tables between its two marks; refuse a page without them."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks {BEGIN} or {END}")
    specs = [load_spec(file, to_run=False) for file in files]
    base = next(spec for spec in specs if spec.name == BASE)
    tables = (tabulate_memory(specs), tabulate_devices(specs))
    tables += (tabulate_gpus(base), tabulate_packs(base))
    return "\n\n".join([before + BEGIN, *tables, END + after])


def tabulate_memory(specs: Iterable[SweepSpec]) -> str:
    """Return a table of what a trial of each recipe has on its GPU."""
    head = ("recipe", "weights, gradients, averages", "bfloat16 copies", "reference", "head")
    head += ("activations", "trainer in all", "vLLM at least", "disk of the sweep")
    rows: list[tuple[str, ...]] = []
    for spec in specs:
        size = get_size(spec)
        trainer, engine = measure_trainer(spec, size), measure_engine(spec, size)
        parts = (trainer.weights + trainer.gradients, trainer.rounded, trainer.reference)
        parts += (trainer.head, trainer.activations, trainer.total, engine.least)
        disk = measure_disk(spec, size, SLOTS).peak
        cells = (format_bytes(part) if part else "" for part in (*parts, disk))
        rows.append((f"`{spec.name}`", *cells))
    return render_table(head, rows)


def tabulate_devices(specs: Iterable[SweepSpec]) -> str:
    """Return a table of the GPUs on which each recipe fits as it is."""
    rows = [
        (f"`{spec.name}`", *(describe_fit(spec, get_size(spec), each) for each in DEVICES.values()))
        for spec in specs
    ]
    return render_table(("recipe", *DEVICES), rows)


def tabulate_gpus(base: SweepSpec) -> str:
    """Return a table of the GPUs that a trial needs, by policy, kind of training and GPU."""
    head = ("policy", "what is trained", *(device.partition(", ")[2] for device in DEVICES))
    rows: list[tuple[str, ...]] = []
    for policy in POLICIES:
        for kind, rank in (("every weight", 0), (f"LoRA, rank {RANK}", RANK)):
            spec, size = adapt_recipe(base, rank), get_known_size(policy)
            cells = (count_gpus(spec, size, memory) for memory in DEVICES.values())
            rows.append((policy.partition("/")[2], kind, *cells))
    return render_table(head, rows)


def count_gpus(spec: SweepSpec, size: PolicySize, device: int) -> str:
    """Return the least number of GPUs of a trial, and the number with averages in 8 bits."""
    least: dict[int, int] = {}
    for averages in (AVERAGES, AVERAGES_8BIT):
        layouts = (Layout(workers=count, shards=count, averages=averages) for count in COUNTS)
        fitting = (each.shards for each in layouts if find_share(spec, size, device, each))
        least[averages] = next(fitting, 0)
    usual, smaller = least[AVERAGES], least[AVERAGES_8BIT]
    if usual == smaller:
        return str(usual) if usual else "none"
    return f"{usual}, or {smaller} (8 bits)" if usual else f"{smaller} (8 bits)"


def tabulate_packs(base: SweepSpec) -> str:
    """Return a table of how many trials of LoRA fit into one process, by policy and GPU."""
    head = ("policy", *(device.partition(", ")[2] for device in DEVICES))
    rows: list[tuple[str, ...]] = []
    spec = adapt_recipe(base, RANK)
    for policy in POLICIES:
        size = get_known_size(policy)
        cells = (str(count_packed(spec, size, memory) or "none") for memory in DEVICES.values())
        rows.append((policy.partition("/")[2], *cells))
    return render_table(head, rows)


def count_packed(spec: SweepSpec, size: PolicySize, device: int) -> int:
    """Return how many trials fit into one process with the best share of the engine."""
    counts = range(MOST_PACKED, 0, -1)
    return next((n for n in counts if find_share(spec, size, device, Layout(trials=n))), 0)


def adapt_recipe(base: SweepSpec, rank: int) -> SweepSpec:
    """Return a recipe with adapters of a rank, or none, and with small micro-batches.

    They change the memory of a step and not its result.
    """
    training = replace(base.training, micro_batch_size=MICRO_BATCH)
    changes = {"model": replace(base.model, lora_rank=rank), "training": training}
    return base.model_copy(update=changes)


def get_known_size(policy: str) -> PolicySize:
    """Return the size of a policy of the tables."""
    size = find_known_size(policy)
    if size is None:
        raise ValueError(f"the size of {policy} is not known")
    return size


def get_size(spec: SweepSpec) -> PolicySize:
    """Return the size of a recipe's policy."""
    return get_known_size(spec.policy)


def describe_fit(spec: SweepSpec, size: PolicySize, device: int) -> str:
    """Return whether a recipe fits on a GPU, and at which share of vLLM."""
    share = find_share(spec, size, device)
    if not share:
        return "no"
    as_it_is = math.isclose(share, spec.rollout.vllm_memory_share)
    return "yes" if as_it_is else f"with `vllm_memory_share: {share:g}`"


def find_share(
    spec: SweepSpec, size: PolicySize, device: int, layout: Layout | None = None
) -> float:
    """Return a share of vLLM at which a trial fits on its GPUs, its own first; 0 if none does."""
    layout = layout or read_layout(spec)
    trainer, engine = measure_trainer(spec, size, layout), measure_engine(spec, size, layout)
    least = math.ceil((engine.least + CONTEXT) / device * 20) / 20
    for share in (spec.rollout.vllm_memory_share, least):
        if fits(trainer, engine, room=device, share=share, sleeps=spec.rollout.sleep):
            return share
    return 0.0


if __name__ == "__main__":
    page, files = Path(sys.argv[1]), [Path(name) for name in sorted(sys.argv[2:])]
    write_atomically(page, fill_page(page.read_text(encoding="utf-8"), files))
