"""Differences between a library and this package, read from `differences.toml`."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gdpo_tune.core.parameters import STEP_LOSSES
from gdpo_tune.core.registry import NORMALIZATIONS
from gdpo_tune.exporters.training_setup import NEUTRAL, TrainingSetup

CONDITIONS: Mapping[str, Callable[[TrainingSetup], object]] = {
    "gdpo": lambda r: r.mode == "gdpo",
    "not gdpo": lambda r: r.mode != "gdpo",
    "grpo": lambda r: r.mode == "grpo",
    "divided by std": lambda r: NORMALIZATIONS[r.mode].divides_by_group_std,
    "each reward normalized": lambda r: not r.sums_first,
    "sum normalized": lambda r: r.sums_first,
    "leave one out": lambda r: r.leaves_one_out,
    "kl": lambda r: r.get_number("beta") > 0,
    "bnpo": lambda r: r.loss == "bnpo",
    "loss by tokens of the step": lambda r: r.loss in STEP_LOSSES,
    "passes": lambda r: r.passes_per_step > 1,
    "mini-batches": lambda r: r.training.mini_batches > 1,
    "micro-batches": lambda r: r.gradient_accumulation_steps > 1,
    "several optimizer steps": lambda r: r.updates_per_step > 1,
    "prompts read again": lambda r: (
        r.training.steps * r.prompts_per_step > r.training.train_prompts
    ),
    "informative prompts": lambda r: r.selects_prompts,
    "prompts in turn": lambda r: not r.selects_prompts,
    "chat": lambda r: r.is_chat,
    "no adapters": lambda r: not r.model.lora_rank,
    "8-bit AdamW": lambda r: r.training.optimizer == "adamw_8bit",
    "auto precision": lambda r: r.model.dtype == "auto",
    "not bfloat16": lambda r: r.model.dtype != "bfloat16",
    "not float32": lambda r: r.model.dtype != "float32",
    "vllm": lambda r: r.rollout.engine == "vllm",
    "not vllm": lambda r: r.rollout.engine != "vllm",
    "end tokens unknown": lambda r: not r.end_tokens,
    "own settings": lambda r: r.own_decoding and _list_forced(r),
    "own engine": lambda r: r.rollout.engine != "vllm" or r.rollout.vllm_mode == "server",
    "corrected": lambda r: r.rollout.importance_sampling != "off",
    "corrected by completion": lambda r: not r.rollout.importance_sampling.startswith("token"),
}


@dataclass(frozen=True)
class Difference:
    """Something that the library does differently than the training that was measured."""

    topic: str
    ours: str
    theirs: str


def list_library_differences(library: str, setup: TrainingSetup) -> list[Difference]:
    """Return the differences of a library, a key of `registry.EXPORTERS`, from a training."""
    found: list[Difference] = []
    values = _list_values(setup)
    for row in _read_table():
        cell = row.get(library, row.get("every", []))
        cases = [[cell]] if isinstance(cell, str) else cell
        theirs = next((text for text, *when in cases if _holds(when, setup)), "")
        if theirs and _holds(row.get("when", []), setup):
            if measured := row.get("measured", {}).get(library):
                theirs += f" (measured {measured})"
            texts = (text.format_map(values) for text in (row["topic"], row["ours"], theirs))
            found.append(Difference(*texts))
    return found


@functools.cache
def _read_table() -> Sequence[Mapping[str, Any]]:
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    return tomllib.loads(text)["difference"]


def _holds(conditions: Sequence[str], setup: TrainingSetup) -> bool:
    return all(CONDITIONS[name](setup) for name in conditions)


def _list_forced(setup: TrainingSetup) -> list[str]:
    """Return the settings of the policy's own files that no neutral value turns off."""
    return [key for key in setup.own_settings if NEUTRAL[key] is None]


def _list_values(setup: TrainingSetup) -> dict[str, object]:
    rollout, own = setup.rollout, "the trainer's own model"
    unit, _, treatment = rollout.importance_sampling.partition("_")
    correction = (
        f"each {'completion' if unit == 'sequence' else 'token'} is weighted by its probability in "
        f"the trainer against vLLM, a ratio above {rollout.importance_sampling_cap:g} "
        f"{'left out' if treatment == 'mask' else 'lowered to it'}"
    )
    sampled = {"auto": f"if vLLM sampled, {correction}; else {own} sampled", "vllm": correction}
    precision = "bfloat16 on a GPU, float32 elsewhere"
    return {
        "completions": setup.training.completions_per_step,
        "longest": setup.training.max_completion_length,
        "loss": setup.loss,
        "mini_batches": setup.training.mini_batches,
        "precision": precision if setup.model.dtype == "auto" else setup.model.dtype,
        "forced": ", ".join(f"`{key}`" for key in _list_forced(setup)),
        "correction": sampled.get(rollout.engine, f"{own} sampled"),
        "engine": {
            "auto": f"vLLM if it is installed on a GPU, else {own}",
            "transformers": own,
            "vllm": "a vLLM server",
        }[rollout.engine],
    }
