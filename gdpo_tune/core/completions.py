"""`completions.jsonl`: a few held-out completions of one trial, for a person to read.

A line is `{"prompt": ..., "completion": ..., "metrics": {"correctness": 1.0, ...}}`. Every trial
of a sweep keeps completions of the same prompts, which are drawn at random. The file is small on
purpose: it has `MOST_COMPLETIONS` lines, and long texts are cut.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.files import write_atomically

COMPLETIONS_FILE = "completions.jsonl"
MOST_COMPLETIONS = 24
"""Completions that are kept."""
LONGEST_TEXT = 1500
"""Characters of a text that are kept; of a prompt the last ones, where the question is."""
CUT = "\N{HORIZONTAL ELLIPSIS}"


@dataclass(frozen=True)
class Completion:
    """A completion with its prompt and its metrics."""

    prompt: str
    completion: str
    metrics: Mapping[str, float | None]
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Extra columns that reward functions logged."""


def shorten_completion(
    prompt: str,
    completion: str,
    metrics: Mapping[str, float | None],
    columns: Mapping[str, Any] | None = None,
) -> Completion:
    """Build a completion whose texts are cut to `LONGEST_TEXT`."""
    if len(prompt) > LONGEST_TEXT:
        prompt = CUT + prompt[-LONGEST_TEXT:]
    if len(completion) > LONGEST_TEXT:
        completion = completion[:LONGEST_TEXT] + CUT
    cut = {k: v[:LONGEST_TEXT] if isinstance(v, str) else v for k, v in (columns or {}).items()}
    return Completion(prompt, completion, dict(metrics), cut)


def write_completions(directory: Path, completions: Sequence[Completion]) -> None:
    """Replace a trial's file; its directory is created if missing."""
    directory.mkdir(parents=True, exist_ok=True)
    rows = [{k: v for k, v in asdict(one).items() if k != "columns" or v} for one in completions]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    write_atomically(directory / COMPLETIONS_FILE, "".join(f"{line}\n" for line in lines))


def read_completions(directory: Path) -> list[Completion]:
    """Return the completions of a trial; none without a file.

    Raises:
        UsageError: a line of the file holds no completion.
    """
    path = directory / COMPLETIONS_FILE
    if not path.exists():
        return []
    result: list[Completion] = []
    # Bytes are split: a text may hold line breaks that are none in a file, such as U+2028.
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            result.append(Completion(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise UsageError(
                f"{path}:{number}: this line holds no completion ({error})\n"
                "    fix: move the file away; a report then shows those of the other trials"
            ) from None
    return result
