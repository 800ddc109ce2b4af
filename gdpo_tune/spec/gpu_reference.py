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
from gdpo_tune.core.gpu_memory import CONTEXT, MOMENTS, TrialMemory
from gdpo_tune.core.policy_shapes import PolicyShapes, find_known_size
from gdpo_tune.core.text import format_bytes
from gdpo_tune.spec.gpu import measure_trial
from gdpo_tune.spec.load import load_spec
from gdpo_tune.spec.machine import measure_disk
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
        m = measure_trial(spec, size)
        disk = measure_disk(spec, size, SLOTS).peak
        parts = (m.weights + m.gradients, m.rounded, m.reference, m.head, m.activations, m.total)
        cells = (format_bytes(part) if part else "" for part in (*parts, m.engine.least, disk))
        rows.append((f"`{spec.name}`", *cells))
    return render_table(head, rows)


def tabulate_devices(specs: Iterable[SweepSpec]) -> str:
    """Return a table of the GPUs on which each recipe fits as it is."""
    rows = [
        (f"`{spec.name}`", *(describe_fit(spec, each) for each in DEVICES.values()))
        for spec in specs
    ]
    return render_table(("recipe", *DEVICES), rows)


def tabulate_gpus(base: SweepSpec) -> str:
    """Return a table of the GPUs that a trial needs, by policy, kind of training and GPU."""
    head = ("policy", "what is trained", *(device.partition(", ")[2] for device in DEVICES))
    rows: list[tuple[str, ...]] = []
    for policy in POLICIES:
        for kind, rank in (("every weight", 0), (f"LoRA, rank {RANK}", RANK)):
            memory = measure_trial(adapt_recipe(base, rank), get_known_size(policy))
            cells = (count_gpus(memory, device) for device in DEVICES.values())
            rows.append((policy.partition("/")[2], kind, *cells))
    return render_table(head, rows)


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


def tabulate_packs(base: SweepSpec) -> str:
    """Return a table of how many trials of LoRA fit into one process, by policy and GPU."""
    head = ("policy", *(device.partition(", ")[2] for device in DEVICES))
    rows: list[tuple[str, ...]] = []
    spec = adapt_recipe(base, RANK)
    for policy in POLICIES:
        memory = measure_trial(spec, get_known_size(policy))
        cells = (str(count_packed(memory, device) or "none") for device in DEVICES.values())
        rows.append((policy.partition("/")[2], *cells))
    return render_table(head, rows)


def count_packed(memory: TrialMemory, device: int) -> int:
    """Return how many trials fit into one process with the best share of the engine."""
    counts = range(MOST_PACKED, 0, -1)
    return next((n for n in counts if find_share(replace(memory, trials=n), device)), 0)


def adapt_recipe(base: SweepSpec, rank: int) -> SweepSpec:
    """Return a recipe with adapters of a rank, or none, and with small micro-batches.

    They change the memory of a step and not its result.
    """
    training = base.training.replace(micro_batch_size=MICRO_BATCH)
    return base.replace(model=base.model.replace(lora_rank=rank), training=training)


def get_known_size(policy: str) -> PolicyShapes:
    """Return the size of a policy of the tables."""
    size = find_known_size(policy)
    if size is None:
        raise ValueError(f"the size of {policy} is not known")
    return size


def get_size(spec: SweepSpec) -> PolicyShapes:
    """Return the size of a recipe's policy."""
    return get_known_size(spec.policy)


def describe_fit(spec: SweepSpec, device: int) -> str:
    """Return whether a recipe fits on a GPU, and at which share of vLLM."""
    share = find_share(measure_trial(spec, get_size(spec)), device)
    if not share:
        return "no"
    as_it_is = math.isclose(share, spec.rollout.vllm_memory_share)
    return "yes" if as_it_is else f"with `vllm_memory_share: {share:g}`"


def find_share(memory: TrialMemory, device: int) -> float:
    """Return a share of vLLM at which a trial fits on its GPUs, its own first; 0 if none does."""
    least = math.ceil((memory.engine.least + CONTEXT) / device * 20) / 20
    shares = (memory.engine_share, least)
    return next((s for s in shares if replace(memory, engine_share=s).fits(device)), 0.0)


if __name__ == "__main__":
    page, files = Path(sys.argv[1]), [Path(name) for name in sorted(sys.argv[2:])]
    write_atomically(page, fill_page(page.read_text(encoding="utf-8"), files))
