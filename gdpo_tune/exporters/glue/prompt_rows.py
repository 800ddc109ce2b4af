"""Training prompts as a policy reads them, before a library's own columns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gdpo_tune.policies.prompts import PromptFormat
from gdpo_tune.tasks.base import Problem

READING: Mapping[str, Any] = {}
"""Arguments of `PromptFormat` in the training besides tokenizer and instructions."""


@dataclass(frozen=True)
class ExportedPrompt:
    """One training prompt."""

    text: str
    """Text that a policy without a chat template reads."""
    messages: Sequence[Mapping[str, str]] | None
    """Chat turns, each with `role` and `content`; None without a chat template."""
    problem: str
    """JSON by which `rewards.py` judges a completion."""


def build_prompt(
    problem: Problem, reader: PromptFormat | None, instructions: str, is_chat: bool
) -> ExportedPrompt:
    """Return the prompt of a problem, with instructions that may be empty.

    `reader` is how the policy reads prompts; None if its tokenizer is not on this machine.
    """
    prompt, messages = problem.prompt, None
    if is_chat and reader is not None:
        messages = reader.build_messages(problem.turns or prompt)
    elif is_chat:
        system = [{"role": "system", "content": instructions}] if instructions else []
        messages = [*system, *(problem.turns or [{"role": "user", "content": prompt}])]
    text = f"{instructions}\n\n{prompt}" if instructions else prompt
    return ExportedPrompt(text, messages, json.dumps(list_facts(problem), ensure_ascii=False))


def list_facts(problem: Problem) -> dict[str, Any]:
    """Return what a problem consists of; the turns only of a conversation."""
    return {name: value for name, value in asdict(problem).items() if name != "turns" or value}


def write_rows(rows: Sequence[Mapping[str, object]], file: Any) -> None:
    """Write rows as Parquet to a file or a stream."""
    import pyarrow
    from pyarrow import parquet

    library: Any = pyarrow  # comes without types
    writer: Any = parquet
    writer.write_table(library.Table.from_pylist(rows), file)
