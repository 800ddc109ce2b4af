"""Differences between a library and this package that hold for a training."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

from gdpo_tune.core.parameters import STEP_LOSSES
from gdpo_tune.core.registry import NORMALIZATIONS
from gdpo_tune.exporters.training_setup import NEUTRAL, TrainingSetup

CONDITIONS: Mapping[str, Callable[[TrainingSetup], object]] = {
    "group deviation": lambda r: NORMALIZATIONS[r.mode].divides_by_group_std,
    "sums": lambda r: r.sums_first,
    "KL": lambda r: r.get_number("beta") > 0,
    "dapo or cispo": lambda r: r.loss in STEP_LOSSES,
    "several passes": lambda r: r.passes_per_step > 1,
    "mini-batches": lambda r: r.spec.training.mini_batches > 1,
    "micro-batches": lambda r: r.gradient_accumulation_steps > 1,
    "several optimizer steps": lambda r: r.updates_per_step > 1,
    "prompts read again": lambda r: (
        r.spec.training.steps * r.prompts_per_step > r.spec.training.train_prompts
    ),
    "chat": lambda r: r.is_chat,
    "adapters": lambda r: r.spec.model.lora_rank,
    "unknown end tokens": lambda r: not r.end_tokens,
    "end of a turn": lambda r: r.end_tokens[1:] and not _declares_ends(r),
    "own sampling": lambda r: r.own_decoding and _list_forced(r),
    "own engine": lambda r: r.spec.rollout.engine != "vllm" or r.spec.rollout.vllm_mode == "server",
    "merged adapters": lambda r: any(parent.is_adapter for parent in r.request.parents),
    "weighted tokens": lambda r: r.spec.rollout.importance_sampling.startswith("token"),
    "weighted completions": lambda r: r.spec.rollout.importance_sampling.startswith("sequence"),
}
"""Words of `differences.md`."""
TRAINERS = "every library that trains"
"""Its section for all but mergekit."""


@dataclass(frozen=True)
class Difference:
    """Something that the library does differently than the training that was measured."""

    topic: str
    ours: str
    theirs: str


def list_library_differences(library: str, setup: TrainingSetup) -> list[Difference]:
    """Return the differences of a library, a key of `registry.EXPORTERS`, from a training."""
    values = {
        "training": setup.spec.training,
        "rollout": setup.spec.rollout,
        "loss": setup.params.get("loss_type"),
        "forced": ", ".join(f"`{key}`" for key in _list_forced(setup)),
    }
    return [
        Difference(*(text.format_map(values) for text in texts))
        for conditions, *texts in read_differences(library, *([TRAINERS] if setup.rewards else []))
        if all(_holds(condition, setup) for condition in conditions.split(", ") if condition)
    ]


def read_differences(*titles: str) -> list[list[str]]:
    """Return conditions, topic, ours and theirs of the rows of `differences.md` in sections."""
    page = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
    sections = dict(section.split("\n", 1) for section in page.split("\n## ")[1:])
    tables = (sections[name].split("| --- |\n")[1] for name in titles)
    lines = [line for table in tables for line in table.strip().splitlines()]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def _holds(condition: str, setup: TrainingSetup) -> bool:
    """Return whether a setting has a value, or a word of `CONDITIONS` holds, or `not` so."""
    name, _, wanted = condition.removeprefix("not ").partition("=")
    if not wanted:
        holds = bool(CONDITIONS[name](setup))
    elif "." in name:
        holds = str(reduce(getattr, name.split("."), setup.spec)) == wanted
    else:
        holds = str(setup.params.get(name)) == wanted
    return holds != condition.startswith("not ")


def _declares_ends(setup: TrainingSetup) -> bool:
    """Return whether the policy's own files name every end token besides the tokenizer's."""
    declared = re.findall(r"\d+", str((setup.own_decoding or {}).get("eos_token_id")))
    return {*map(str, setup.end_tokens[1:])} <= {*declared}


def _list_forced(setup: TrainingSetup) -> list[str]:
    """Return the settings of the policy's own files that no neutral value turns off."""
    return [key for key in setup.own_settings if NEUTRAL[key] is None]
