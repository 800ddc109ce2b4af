"""Word problems of a file in GSM8K's columns, with a reward that differs between completions.

A policy that has not learnt to answer earns no other reward, and would train on nothing.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gdpo_tune.tasks.custom import RewardFunctionTask

PROBLEMS = Path(__file__).with_name("problems.jsonl")


def right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    numbers = [re.findall(r"\d+", text)[-1:] for text in completions]
    return [float(last == [right]) for last, right in zip(numbers, answer, strict=True)]


def vowels(completions: list[str], **_: Any) -> list[float]:
    return [sum(map("aeiou".count, text)) / max(1, len(text)) for text in completions]


class WordTask(RewardFunctionTask):
    reward_funcs = [right, vowels]
    ranges = {"right": (0, 1), "vowels": (0, 1)}

    def rows(self) -> Iterator[dict[str, str]]:
        for line in PROBLEMS.read_text().splitlines():
            row = json.loads(line)
            yield {"prompt": row["question"], "answer": row["answer"].rpartition("#### ")[2]}
