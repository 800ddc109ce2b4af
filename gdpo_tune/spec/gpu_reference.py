"""The computed tables of docs/gpus.md: memory of recipes, and GPUs on which they fit.

Written by `python -m gdpo_tune.spec.gpu_reference docs/gpus.md search_spaces/*_qwen.yaml`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from gdpo_tune.core.files import write_atomically
from gdpo_tune.core.policy_size import PolicySize, find_known_size
from gdpo_tune.spec.disk import measure_disk
from gdpo_tune.spec.gpu_memory import CONTEXT, format_bytes, measure_engine, measure_trainer
from gdpo_tune.spec.load import load_spec
from gdpo_tune.spec.model import SweepSpec
from gdpo_tune.spec.reference import render_table

BEGIN, END = "<!-- generated: memory -->", "<!-- end -->"
DEVICES = {
    "A10, 24 GB": 23_028 << 20,
    "L40S, 48 GB": 46_068 << 20,
    "A100 or H100, 80 GB": 81_559 << 20,
    "H200, 141 GB": 143_771 << 20,
}
"""GPU -> bytes, as `nvidia-smi` reports them."""
SIZES = ("0.5B", "1.5B", "3B", "7B")
SLOTS = 8
"""Trials side by side, in the column of the disk."""


def fill_page(page: str, files: Sequence[Path]) -> str:
    """Return the page with new tables between its two marks; refuse a page without them."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks {BEGIN} or {END}")
    specs = [load_spec(file, to_run=False) for file in files]
    tables = (tabulate_memory(specs), tabulate_devices(specs), tabulate_sizes(specs))
    return "\n\n".join([before + BEGIN, *tables, END + after])


def tabulate_memory(specs: Iterable[SweepSpec]) -> str:
    """Return a table of what a trial of each recipe has on its GPU."""
    head = ("recipe", "weights, gradients, averages", "bfloat16 copies", "reference", "head")
    head += ("activations", "trainer in all", "vLLM at least", "disk of the sweep")
    rows: list[tuple[str, ...]] = []
    for spec in specs:
        size = get_size(spec)
        trainer, engine = measure_trainer(spec, size), measure_engine(spec, size)
        parts = (trainer.weights, trainer.rounded, trainer.reference, trainer.head)
        parts += (trainer.activations, trainer.total, engine.least)
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


def tabulate_sizes(specs: Sequence[SweepSpec]) -> str:
    """Return a table of the least GPU of each size of policy, in the settings of each recipe."""
    head = ("recipe", *(f"Qwen2.5-{size}" for size in SIZES))
    rows: list[tuple[str, ...]] = []
    for spec in specs:
        cells: list[str] = []
        for name in SIZES:
            size = find_known_size(f"Qwen/Qwen2.5-{name}")
            assert size is not None, "every size in the table is known"
            fits = (d for d, memory in DEVICES.items() if find_share(spec, size, memory))
            cells.append(next((device.partition(", ")[2] for device in fits), "none of these"))
        rows.append((f"`{spec.name}`", *cells))
    return render_table(head, rows)


def get_size(spec: SweepSpec) -> PolicySize:
    """Return the size of a recipe's policy."""
    size = find_known_size(spec.policy)
    if size is None:
        raise ValueError(f"{spec.name}: the size of {spec.policy} is not known")
    return size


def describe_fit(spec: SweepSpec, size: PolicySize, device: int) -> str:
    """Return whether a recipe fits on a GPU, and at which share of vLLM."""
    share = find_share(spec, size, device)
    if not share:
        return "no"
    as_it_is = math.isclose(share, spec.rollout.vllm_memory_share)
    return "yes" if as_it_is else f"with `vllm_memory_share: {share:g}`"


def find_share(spec: SweepSpec, size: PolicySize, device: int) -> float:
    """Return a share of vLLM at which a trial fits on a GPU, its own first; 0 if none does."""
    trainer, engine = measure_trainer(spec, size).total, measure_engine(spec, size).least
    least = math.ceil((engine + CONTEXT) / device * 20) / 20
    for share in (spec.rollout.vllm_memory_share, least):
        if engine <= share * device and trainer <= (1 - share) * device:
            return share
    return 0.0


if __name__ == "__main__":
    page, files = Path(sys.argv[1]), [Path(name) for name in sorted(sys.argv[2:])]
    write_atomically(page, fill_page(page.read_text(encoding="utf-8"), files))
