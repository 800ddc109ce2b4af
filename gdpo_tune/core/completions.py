"""`completions.jsonl`: a few held-out completions of one trial, so that a person can read them.

A line is `{"prompt": ..., "completion": ..., "metrics": {"correctness": 1.0, ...}}`. Small on
purpose: `MOST` lines, long texts cut. Light: importing this needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.files import write_whole

FILE = "completions.jsonl"
MOST = 6
LONGEST = 1500
"""Characters of a text that are kept; of a prompt the last ones, where the question is."""
CUT = "\N{HORIZONTAL ELLIPSIS}"


@dataclass(frozen=True)
class Completion:
    """What a policy said, and what it was judged."""

    prompt: str
    completion: str
    metrics: Mapping[str, float | None]


def shortened(prompt: str, completion: str, metrics: Mapping[str, float | None]) -> Completion:
    """A completion as it is kept."""
    if len(prompt) > LONGEST:
        prompt = CUT + prompt[-LONGEST:]
    if len(completion) > LONGEST:
        completion = completion[:LONGEST] + CUT
    return Completion(prompt, completion, dict(metrics))


def write_completions(directory: Path, completions: Sequence[Completion]) -> None:
    """Replace a trial's file; its folder is made if missing."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(asdict(completion), ensure_ascii=False) for completion in completions]
    write_whole(directory / FILE, "".join(f"{line}\n" for line in lines))


def read_completions(directory: Path) -> list[Completion]:
    """What was kept of a trial; nothing for trials from before there was such a file.

    Raises:
        UsageError: a line is none of such a file.
    """
    path = directory / FILE
    if not path.exists():
        return []
    # Of bytes: a text may hold line breaks that are none in a file, such as U+2028.
    lines = enumerate(path.read_bytes().splitlines(), 1)
    return [_completion(line, f"{path}:{number}") for number, line in lines]


def _completion(line: bytes, where: str) -> Completion:
    """A line of the file."""
    try:
        return Completion(**json.loads(line))
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"{where}: this line holds no completion ({error})\n"
            "    fix: move the file away; a report shows the other trials' then"
        ) from None
