"""Program that makes `prompts.parquet` of a data set that the export only refers to."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gdpo_tune.core.errors import DataError, get_first_line
from gdpo_tune.core.prompt_order import PROBLEM_SEED, order_prompts
from gdpo_tune.exporters.glue.prompt_rows import READING, ExportedPrompt, build_prompt, write_rows
from gdpo_tune.policies.prompts import PromptFormat
from gdpo_tune.tasks.base import Problem
from gdpo_tune.tasks.data_rows import Row, collect_problems, shuffle_problems

DATA: Any = SimpleNamespace()
"""Place of the rows, by the names of the section `data:`."""
LAYOUT: Any = SimpleNamespace()
"""Columns of the layout, by the names of a `LayoutInfo`."""
POLICY = ""
"""Its tokenizer counts the tokens of prompts."""
INSTRUCTIONS = ""
IS_CHAT = False
COUNT = 0
"""Training prompts, those that are too long included."""
SEED = 0
"""Seed of the trial, which decides the order of the prompts."""
DIGEST = ""
"""Digest of the prompts that the trial read; empty if they were not at hand."""


def write_prompts(
    convert: Callable[[Row], Problem],
    build_row: Callable[[ExportedPrompt, int], Mapping[str, object]],
    file: Path,
) -> None:
    """Write the columns of a library for the prompts of the training, chosen as the trial did.

    Data that are elsewhere may be given as the program's argument. The program ends with a message
    if they are not those of the trial.
    """
    from transformers import AutoTokenizer

    if len(sys.argv) > 1:
        DATA.source, DATA.is_local = sys.argv[1], True
    LAYOUT.convert = convert
    try:
        read = collect_problems(DATA, LAYOUT).splits["train"]
    except DataError as error:
        fix = (
            "" if DATA.is_local else f"\n    fix: python {Path(sys.argv[0]).name} FILE, with a copy"
        )
        raise SystemExit(f"{error}{fix}") from error
    problems = shuffle_problems(read, PROBLEM_SEED)[:COUNT]
    library: Any = AutoTokenizer
    try:
        tokenizer = library.from_pretrained(POLICY)
    except (OSError, ValueError) as error:
        raise SystemExit(
            f"the tokenizer of {POLICY} cannot be loaded: {get_first_line(error)}\n"
            f"    fix: download it, and write its directory as POLICY in {Path(sys.argv[0]).name}"
        ) from error
    reader = PromptFormat(tokenizer, INSTRUCTIONS, **READING)
    tokens = reader.encode([problem.turns or problem.prompt for problem in problems])
    limit = DATA.max_prompt_length
    short = [p for p, ids in zip(problems, tokens, strict=True) if len(ids) <= limit]
    ordered = [short[index] for index in order_prompts(len(short), len(short), SEED)]
    if not short or len(problems) < COUNT or DIGEST not in ("", compute_digest(ordered)):
        raise SystemExit(
            f"{DATA.source} does not hold the {COUNT} prompts of the training: it is another "
            "version, or other data; give the right file as the argument"
        )
    prompts = [build_prompt(problem, reader, INSTRUCTIONS, IS_CHAT) for problem in ordered]
    write_rows([build_row(prompt, number) for number, prompt in enumerate(prompts)], file)


def compute_digest(problems: Iterable[Problem]) -> str:
    """Return 16 digits that stand for prompts in their order."""
    return sha256("\0".join(problem.prompt for problem in problems).encode()).hexdigest()[:16]
