"""Training prompts of an export, as the policy read them: rows, or a program for them."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from gdpo_tune.core.errors import DataError, get_first_line
from gdpo_tune.core.files import expand_path, is_local_source
from gdpo_tune.core.prompt_order import PROBLEM_SEED, order_prompts
from gdpo_tune.core.registry import describe_layout
from gdpo_tune.exporters.base import PROMPTS_FILE, TrainingFiles
from gdpo_tune.exporters.bundle import Bundle, format_docstring
from gdpo_tune.exporters.data_licence import is_within_reach
from gdpo_tune.exporters.glue.prompt_program import compute_digest
from gdpo_tune.exporters.glue.prompt_rows import (
    ExportedPrompt,
    build_prompt,
    list_facts,
    write_rows,
)
from gdpo_tune.exporters.recipe import Recipe
from gdpo_tune.exporters.reward_file import SANDBOX, SANDBOX_COPY, runs_programs
from gdpo_tune.policies.prompts import (
    PromptFormat,
    choose_instructions,
    choose_prompt_format,
    load_local_tokenizer,
)

REFERENCE_FILE = "make_prompts.py"
"""Program of an export that writes the prompts."""
_GLUE = "gdpo_tune.exporters.glue"
_SETTINGS = "gdpo_tune.core.settings"


@dataclass(frozen=True)
class ExportedPrompts:
    """Training prompts in the order in which the trial read them first."""

    problems: Sequence[Any]
    instructions: str
    """Text before every prompt; may be empty."""
    reader: PromptFormat | None
    """How the policy reads them; None if its tokenizer is not on this machine: then no prompt is
    left out for its length."""


def collect_prompts(recipe: Recipe) -> ExportedPrompts:
    """Collect the training prompts of a recipe.

    Raises:
        DataError, UsageError: the data cannot be read, or holds too few prompts.
        PolicyError: the tokenizer loses tags that the rewards need.
    """
    task = recipe.build_task()
    try:
        problems = task.problems("train", recipe.training.train_prompts, PROBLEM_SEED)
    except DataError as error:
        raise DataError(
            f"{error}; or --reference-data, which writes a program that makes the prompts where "
            "the data are"
        ) from error
    tokenizer = load_local_tokenizer(recipe.policy_name, recipe.model.revision)
    request = task.instructions, recipe.model.instructions
    instructions = choose_instructions(recipe.policy_name, tokenizer, *request)
    reader = None
    if tokenizer is not None:
        arguments = recipe.model.chat_template_kwargs, recipe.model.template_date
        reader = choose_prompt_format(recipe.policy_name, tokenizer, *request, *arguments)
        tokens = reader.encode([p.turns or p.prompt for p in problems])
        limit = recipe.data.max_prompt_length
        problems = [p for p, read in zip(problems, tokens, strict=True) if len(read) <= limit]
        if not problems:
            raise DataError(
                f"every prompt has more than data.max_prompt_length = {limit} tokens: raise that, "
                "or give other data"
            )
    order = order_prompts(len(problems), len(problems), recipe.seed)
    return ExportedPrompts([problems[i] for i in order], instructions, reader)


def format_prompts(prompts: ExportedPrompts, recipe: Recipe, training: TrainingFiles) -> bytes:
    """Return the prompts as Parquet, with the columns of the library.

    Raises:
        DataError: one of them cannot be written, so that the rewards would read another problem.
    """
    exported: list[ExportedPrompt] = []
    for problem in prompts.problems:
        try:
            prompt = build_prompt(problem, prompts.reader, prompts.instructions, recipe.is_chat)
            prompt.text.encode()
            prompt.problem.encode()
            is_kept = is_same_json(list_facts(problem), json.loads(prompt.problem))
        except (TypeError, ValueError) as error:
            raise _build_prompt_error(problem, get_first_line(error)) from error
        if not is_kept:
            raise _build_prompt_error(problem, "a tuple, or a key that is no text")
        exported.append(prompt)
    stream = io.BytesIO()
    write_rows([training.build_row(prompt, n) for n, prompt in enumerate(exported)], stream)
    return stream.getvalue()


def is_same_json(value: Any, read: Any) -> bool:
    """Return whether JSON gives a value back as it was; NaN is the same as NaN."""
    if isinstance(value, Mapping):
        entries = cast("Mapping[Any, Any]", value)
        return list(entries) == list(read) and all(is_same_json(entries[k], read[k]) for k in read)
    if isinstance(value, list):
        return all(map(is_same_json, cast("list[Any]", value), read))
    return bool(value == read or (value != value and read != read))


def _build_prompt_error(problem: Any, reason: str) -> DataError:
    return DataError(
        f"the row of the prompt {problem.prompt!r} cannot be written as JSON ({reason}): give "
        "each column of the task's rows texts, numbers, lists and mappings by texts"
    )


def format_reference(recipe: Recipe, training: TrainingFiles) -> str:
    """Return the program that writes the prompts from their data set.

    Raises:
        DataError: the prompts come from no data set.
    """
    if not recipe.data.source:
        raise DataError(
            f"--reference-data: task {recipe.task} writes its own prompts, so there is no data set "
            "to refer to: leave it out"
        )
    layout, source = describe_layout(recipe.data.layout), recipe.data.source
    # Only functions of types: the settings of a sweep are absent there.
    renamed: dict[str, str | None] = {_SETTINGS: None}
    if runs_programs(recipe):
        renamed[SANDBOX] = f"{SANDBOX_COPY}.sandbox"
    bundle = Bundle(renamed=renamed)
    convert, build_row = layout.convert, training.build_row
    for function in (convert, build_row):
        bundle.add(function.__module__, function.__name__)
    bundle.add(f"{_GLUE}.prompt_program", "write_prompts")
    data: dict[str, Any] = {**recipe.data.model_dump(), "is_local": recipe.data.is_local}
    for section in (data, data["validation"], data["test"]):
        if section["source"] and is_local_source(section["source"]):
            section["source"] = str(expand_path(section["source"]).absolute())
    arguments = ", ".join(
        f"{name}=SimpleNamespace(**{value!r})"
        if name in ("validation", "test")
        else f"{name}={value!r}"
        for name, value in data.items()
    )
    shape = ("columns", "optional", "one_of", "keeps_messages")
    columns = ", ".join(f"{name}={getattr(layout, name)!r}" for name in shape)
    tokenizer = load_local_tokenizer(recipe.policy_name, recipe.model.revision)
    mode, own = recipe.model.instructions, recipe.build_task().instructions
    prompts = collect_prompts(recipe) if is_within_reach(recipe.data) else None
    digest = compute_digest(prompts.problems) if prompts and prompts.reader else ""
    values = {
        "DATA": f"SimpleNamespace({arguments})",
        "LAYOUT": f"SimpleNamespace({columns})",
        "POLICY": repr(recipe.policy),
        "INSTRUCTIONS": repr(choose_instructions(recipe.policy_name, tokenizer, own, mode)),
        "READING": repr(recipe.reading),
        "IS_CHAT": repr(recipe.is_chat),
        "COUNT": repr(recipe.training.train_prompts),
        "SEED": repr(recipe.seed),
        "DIGEST": repr(digest),
    }
    imports, definitions = bundle.format({k: f"{k} = {value}" for k, value in values.items()})
    call = f"write_prompts({convert.__name__}, {build_row.__name__}, target)"
    title = f"Makes {PROMPTS_FILE} of {source}: python {REFERENCE_FILE} [FILE]"
    return f'''{format_docstring(title)}

from __future__ import annotations

{imports}


{definitions}


if __name__ == "__main__":
    target = Path(__file__).with_name("{PROMPTS_FILE}")
    {call}
'''
