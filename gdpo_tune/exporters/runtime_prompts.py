"""Training prompts of an export: rows for each library, and the program that makes them.

An export has a copy of this module and of what it imports.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from gdpo_tune.core.errors import DataError, get_first_line
from gdpo_tune.core.settings import DataSettings
from gdpo_tune.core.task_info import PROBLEM_SEED, order_prompts
from gdpo_tune.policies.prompt_format import PromptFormat
from gdpo_tune.tasks.base import Problem
from gdpo_tune.tasks.data_rows import shuffle_problems
from gdpo_tune.tasks.dataset import collect_data


@dataclass(frozen=True)
class ExportedPrompt:
    """One training prompt as a policy reads it, before a library's own columns."""

    text: str
    """Text that a policy without a chat template reads."""
    messages: Sequence[Mapping[str, str]] | None
    """Chat turns, each with `role` and `content`; None without a chat template."""
    problem: str
    """JSON by which `rewards.py` scores a completion."""

    @property
    def turns(self) -> Sequence[Mapping[str, str]]:
        """Chat turns, for a library that takes nothing else."""
        return self.messages or [{"role": "user", "content": self.text}]


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


def build_trl_row(prompt: ExportedPrompt, number: int) -> Mapping[str, object]:
    """Return columns for TRL; each but `prompt` reaches the reward functions."""
    return {"prompt": prompt.messages or prompt.text, "problem": prompt.problem}


def build_message_row(prompt: ExportedPrompt, number: int) -> Mapping[str, object]:
    """Return columns for ms-swift, and for NeMo-RL's `ResponseDataset`."""
    return {"messages": prompt.turns, "problem": prompt.problem}


def build_verl_row(prompt: ExportedPrompt, number: int) -> Mapping[str, object]:
    """Return columns for verl's data set."""
    return {
        "data_source": "gdpo_tune",
        "prompt": prompt.turns,
        "reward_model": {"style": "rule", "ground_truth": prompt.problem},
        "extra_info": {"index": number},
    }


@dataclass(frozen=True)
class PromptSource:
    """The data set of a training, and which of its prompts the trial read, in which order."""

    data: DataSettings
    policy: str
    """Its tokenizer counts the tokens of prompts."""
    instructions: str
    reading: Mapping[str, Any]
    """Arguments of `PromptFormat` besides tokenizer and instructions."""
    is_chat: bool
    count: int
    """Training prompts, those that are too long included."""
    seed: int
    """Seed of the trial, which decides the order of the prompts."""
    digest: str
    """Digest of the prompts that the trial read; empty if they were not at hand."""


def make_prompts(
    source: PromptSource,
    build_row: Callable[[ExportedPrompt, int], Mapping[str, object]],
    file: Path,
) -> None:
    """Write the columns of a library for the prompts of the training, chosen as the trial did.

    The program's argument may name the data; it ends with a message if they are not the trial's.
    """
    from transformers import AutoTokenizer

    data, program = source.data, Path(sys.argv[0]).name
    if len(sys.argv) > 1:
        data = data.replace(source=str(Path(sys.argv[1]).absolute()))
    try:
        read = collect_data(data).splits["train"]
    except DataError as error:
        fix = "" if data.is_local else f"\n    fix: python {program} FILE, with a copy"
        raise SystemExit(f"{error}{fix}") from error
    problems = shuffle_problems(read, PROBLEM_SEED)[: source.count]
    library: Any = AutoTokenizer
    try:
        tokenizer = library.from_pretrained(source.policy)
    except (OSError, ValueError) as error:
        raise SystemExit(
            f"the tokenizer of {source.policy} cannot be loaded: {get_first_line(error)}\n"
            f"    fix: download it, and write its directory as policy= in {program}"
        ) from error
    reader = PromptFormat(tokenizer, source.instructions, **source.reading)
    chosen = choose_problems(problems, reader, data.max_prompt_length, source.seed)
    is_other = len(problems) < source.count or source.digest not in ("", compute_digest(chosen))
    if not chosen or is_other:
        raise SystemExit(
            f"{data.source} does not hold the {source.count} prompts of the training: it is "
            "another version, or other data; give the right file as the argument"
        )
    prompts = [build_prompt(one, reader, source.instructions, source.is_chat) for one in chosen]
    write_rows([build_row(prompt, number) for number, prompt in enumerate(prompts)], file)


def choose_problems(
    problems: Sequence[Problem], reader: PromptFormat | None, longest: int, seed: int
) -> list[Problem]:
    """Return the problems that a trial with that seed reads, in its order.

    Without a reader, none is left out for its length of more than `longest` tokens.
    """
    if reader is not None:
        tokens = reader.encode([problem.turns or problem.prompt for problem in problems])
        problems = [p for p, ids in zip(problems, tokens, strict=True) if len(ids) <= longest]
    count = len(problems)
    return [problems[index] for index in order_prompts(count, count, seed)] if count else []


def compute_digest(problems: Iterable[Problem]) -> str:
    """Return 16 digits that stand for prompts in their order."""
    return sha256("\0".join(problem.prompt for problem in problems).encode()).hexdigest()[:16]
