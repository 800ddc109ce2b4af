"""Training prompts of an exported folder, as the policy read them, in the layout of a library."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from gdpo_tune.core.prompt_order import order_prompts
from gdpo_tune.core.task_files import build_task
from gdpo_tune.exporters.base import ExportedPrompt
from gdpo_tune.exporters.recipe import Recipe
from gdpo_tune.policies.prompts import PromptFormat, choose_instructions, load_local_tokenizer

if TYPE_CHECKING:
    from gdpo_tune.tasks.base import Problem

PROBLEM_SEED = 0
"""Prompts belong to the sweep and not to the trial; see `training.worker_cache`."""


@dataclass(frozen=True)
class ExportedPrompts:
    """Training prompts in the order in which the trial read them first."""

    rows: Sequence[ExportedPrompt]
    knows_tokenizer: bool
    """False if the tokenizer is not on this machine: then no prompt is left out for its length."""
    left_out: int
    """Prompts with more tokens than `data.max_prompt_length`."""


def collect_prompts(recipe: Recipe) -> ExportedPrompts:
    """Collect the training prompts of a recipe.

    Raises:
        DataError, UsageError: the data cannot be read, or holds too few prompts.
        PolicyError: the tokenizer loses tags that the rewards need.
    """
    task = build_task(recipe.task, recipe.training, recipe.sandbox, recipe.data, recipe.params)
    problems = task.problems("train", recipe.training.train_prompts, PROBLEM_SEED)
    tokenizer = load_local_tokenizer(recipe.policy_name, recipe.model.revision)
    mode = recipe.model.instructions
    instructions = choose_instructions(recipe.policy_name, tokenizer, task.instructions, mode)
    short = problems
    if tokenizer is not None:
        tokens = PromptFormat(tokenizer, instructions).encode([p.prompt for p in problems])
        limit = recipe.data.max_prompt_length
        short = [p for p, read in zip(problems, tokens, strict=True) if len(read) <= limit]
    order = order_prompts(len(short), len(short), recipe.seed)
    return ExportedPrompts(
        rows=[_build_prompt(short[index], instructions, recipe.is_chat) for index in order],
        knows_tokenizer=tokenizer is not None,
        left_out=len(problems) - len(short),
    )


def format_parquet(
    prompts: ExportedPrompts, build_row: Callable[[ExportedPrompt, int], Mapping[str, object]]
) -> bytes:
    """Return the prompts as Parquet; `build_row` turns a prompt and its number into columns."""
    import pyarrow
    from pyarrow import parquet

    library: Any = pyarrow  # comes without types
    rows = [build_row(prompt, number) for number, prompt in enumerate(prompts.rows)]
    stream = io.BytesIO()
    writer: Any = parquet
    writer.write_table(library.Table.from_pylist(rows), stream)
    return stream.getvalue()


def _build_prompt(problem: Problem, instructions: str, is_chat: bool) -> ExportedPrompt:
    text = f"{instructions}\n\n{problem.prompt}" if instructions else problem.prompt
    system = [{"role": "system", "content": instructions}] if instructions else []
    messages = [*system, {"role": "user", "content": problem.prompt}] if is_chat else None
    judged = json.dumps(asdict(problem), ensure_ascii=False)
    return ExportedPrompt(text, messages, judged)
