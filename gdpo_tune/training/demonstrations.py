"""Demonstrations of the supervised start: texts of the data or of a file, and their tokens.

A prompt has the tokens that trials see. Prompts are of the training split: solutions of held-out
prompts would make the figures of every trial worthless. Importing this module imports no torch.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gdpo_tune.core.errors import DataError
from gdpo_tune.core.files import DATA_KINDS, expand_path, list_data_files
from gdpo_tune.core.task_files import is_task_file
from gdpo_tune.core.task_info import PROBLEM_SEED
from gdpo_tune.core.text import join_names, join_turns
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.policies.load_policy import read_position_limit
from gdpo_tune.policies.prompt_format import PromptFormat
from gdpo_tune.tasks.base import Problem, Task
from gdpo_tune.tasks.columns import RowError, get_text
from gdpo_tune.tasks.custom import is_open_conversation
from gdpo_tune.tasks.data_rows import LARGEST_SHARE_LEFT_OUT, read_local
from gdpo_tune.tasks.generation import normalize_prompt
from gdpo_tune.tasks.references import read_references

COLUMNS = ("prompt", "completion")
WRITE_FILE = 'write lines {"prompt": ..., "completion": ...} to start.demonstrations: FILE.jsonl'
Text = tuple[Problem, Any]
"""A problem, and the completion that is to be learned, or the texts of the policy's turns."""


@dataclass(frozen=True)
class Demonstrations:
    """Tokens to learn from, in the order of their source."""

    rows: list[tuple[list[int], list[int]]]
    """Prompt, and completion with its end token."""
    left_out: Mapping[str, int]
    """Reason -> how many were left out."""
    masks: Sequence[list[int]] = ()
    """Of a task with tools: 0 for each token of a completion that a tool has written, else 1."""

    def __str__(self) -> str:
        tokens = sum(len(completion) for _, completion in self.rows)
        left_out = "".join(f"; {count} left out: {why}" for why, count in self.left_out.items())
        return f"{len(self.rows)} with {tokens:,} tokens to write{left_out}"


def collect_demonstrations(
    config: TrialConfig, task: Task, prompts: PromptFormat
) -> Demonstrations:
    """Read or write the demonstrations of a supervised start, as tokens.

    Raises:
        DataError: there are none, more than half do not fit, or a row of the file is no
            demonstration.
    """
    start, data, training = config.supervised, config.data, config.training
    assert start is not None, "the trial is a supervised start"
    positions = read_position_limit(config.policy, config.model.revision)
    key, left_out = f"start.demonstrations = {start.demonstrations}", Counter[str]()
    if start.file:
        texts = list(_read_file(start.file, key, as_data=not is_task_file(config.task)))
        held_out = {
            normalize_prompt(problem.prompt)
            for split in ("validation", "test")
            for problem in task.problems(split, getattr(training, f"{split}_prompts"), PROBLEM_SEED)
        }
        shown = [one for one in texts if normalize_prompt(one[0].prompt) not in held_out]
        left_out["held-out prompts"] = len(texts) - len(shown)
    else:
        problems = task.problems("train", training.train_prompts, PROBLEM_SEED)
        shown = list(_write_texts(problems, task, config, key))
        left_out["no solution stated"] = len(problems) - len(shown)
    if not shown:
        why = "; ".join(f"{count} {reason}" for reason, count in left_out.items())
        raise DataError(f"{key}: no demonstration ({why})\n    fix: {WRITE_FILE}")
    encoded = prompts.encode([problem.turns or problem.prompt for problem, _ in shown])
    tokenizer: Any = prompts.tokenizer
    turns = [[text] if isinstance(text, str) else text for _, text in shown]
    written = [tokenizer(each, add_special_tokens=False)["input_ids"] for each in turns]
    masks: list[list[int]] = []
    ended: list[list[int]] = [[*each[0], tokenizer.eos_token_id] for each in written]
    if prompts.tools:
        from gdpo_tune.training.turns import TurnLoop, run_script  # late: it imports torch

        loop = TurnLoop(task, prompts, sys.maxsize, sys.maxsize, sys.maxsize)
        scripts = zip(shown, encoded, written, strict=True)
        ran = [run_script(loop, one, prompt, script) for (one, _), prompt, script in scripts]
        ended, masks = [one for one, _, _ in ran], [mask for _, mask, _ in ran]
        if reason := next((why for _, _, why in ran if why), ""):
            fix = "return the texts of the policy's turns from write_reference"
            raise DataError(f"{key}: {reason}\n    fix: {fix}")
    most = data.max_prompt_length, training.max_completion_length
    kept = [
        row
        for row, (prompt, completion) in enumerate(zip(encoded, ended, strict=True))
        if len(prompt) <= most[0] and len(completion) <= most[1]
        if positions is None or len(prompt) + len(completion) <= positions
    ]
    rows = [(encoded[row], ended[row]) for row in kept]
    left_out["too long"] = len(shown) - len(rows)
    if left_out["too long"] > LARGEST_SHARE_LEFT_OUT * len(shown):
        longest = [max(map(len, tokens)) for tokens in (encoded, ended)]
        context = f", or than the {positions} positions of the policy" if positions else ""
        raise DataError(
            f"{key}: {left_out['too long']} of {len(shown)} have more tokens than "
            f"data.max_prompt_length = {most[0]} and training.max_completion_length = {most[1]}"
            f"{context}; the longest have {longest[0]} and {longest[1]}\n"
            "    fix: raise these lengths, or demonstrate shorter completions"
        )
    return Demonstrations(rows, +left_out, [masks[row] for row in kept] if masks else [])


def _write_texts(
    problems: Collection[Problem], task: Any, config: TrialConfig, key: str
) -> Iterator[Text]:
    """Yield the solution that the data, or else the task, states of each problem."""
    data, reason = config.data, ""
    write: Any = getattr(task, "write_reference", None)
    if not data.source and write is None:
        also = "give its class write_reference(problem), which returns a completion, or "
        fix = also * is_task_file(config.task) + WRITE_FILE
        raise DataError(
            f"{key}: the task {config.task} states no solutions of its problems\n    fix: {fix}"
        )
    if not data.source:
        yield from ((problem, write(problem)) for problem in problems)
        return
    references: dict[str, str] = {}
    for one in read_references(data):
        if one.problem is not None:  # of several rows with the same prompt the first one counts
            references.setdefault(one.problem.prompt, one.completion)
        reason = reason or (one.reason and f"{one.place}: {one.reason}")
    if not any(references.values()):
        head = f"{key}: layout {data.layout} of {data.source} states no solutions"
        raise DataError(f"{head} ({reason})\n    fix: {WRITE_FILE}")
    yield from ((p, text) for p in problems if (text := references.get(p.prompt)))


def _read_file(file: str, key: str, *, as_data: bool) -> Iterator[Text]:
    """Yield the rows of a file; `as_data`: texts end as the prompts of layouts do."""

    def select(place: str, present: Collection[str]) -> list[str]:
        if missing := [name for name in COLUMNS if name not in present]:
            raise DataError(
                f"{place}: no column {join_names(missing)}; there are {join_names(present)}\n"
                f"    fix: {WRITE_FILE}"
            )
        return [*COLUMNS]

    if list_data_files(expand_path(file)) != [expand_path(file)]:
        fix = f"write data, or the path of a {DATA_KINDS} file"
        raise DataError(f"{key}: no such file\n    fix: {fix}")
    is_empty = True
    for place, row in read_local(file, "", "train", select):
        is_empty = False
        prompt: Any = row.get("prompt")
        try:
            if isinstance(prompt, list) and not is_open_conversation(prompt):
                reason = "no list of messages with `role` and `content` before the policy's turn"
                raise RowError("prompt", reason)
            is_chat = isinstance(prompt, list)
            text = join_turns(prompt) if is_chat else get_text(row, "prompt")
            text = f"{text.strip()}\n" if as_data else text
            yield Problem(text, "own", {}, prompt if is_chat else ()), get_text(row, "completion")
        except RowError as error:
            raise DataError(f"{place}: {error}\n    fix: correct or remove the row") from error
    if is_empty:
        raise DataError(f"{key}: the file is empty\n    fix: {WRITE_FILE}")
