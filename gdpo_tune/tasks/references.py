"""Reference solutions of a data set, scored by the rewards of a sweep before it starts.

A wrong layout, a wrong column and a broken grader have one sign: solutions that the data calls
right earn nothing. Rows without a solution or a problem are not counted.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gdpo_tune.core.content import hash_files, read_cache, write_cache
from gdpo_tune.core.errors import DataError
from gdpo_tune.core.registry import describe_layout
from gdpo_tune.core.text import make_printable
from gdpo_tune.tasks.base import Problem
from gdpo_tune.tasks.columns import RowError
from gdpo_tune.tasks.data_rows import convert_row, list_parts, read_rows
from gdpo_tune.tasks.dataset import collect_once

if TYPE_CHECKING:
    from gdpo_tune.core.settings import DataSettings, SandboxSettings
    from gdpo_tune.sandbox import Result

SAMPLE = 200
"""References that are scored before a sweep, drawn from the whole data."""
WARN_BELOW, REFUSE_BELOW = 0.95, 0.5
"""Shares of references with full marks. Data sets have faults of their own, but not this many."""
MOST_LISTED = 5
"""References that a warning lists."""


class Reference(NamedTuple):
    """The data's own solution of a row, as a completion."""

    place: str
    """Where the row stands, such as `train.jsonl:12`."""
    problem: Problem | None
    completion: str
    reason: str = ""
    """Why there is no problem, or no solution."""


@dataclass(frozen=True)
class ReferenceCheck:
    """How many references earned full marks, and which did not."""

    reward: str
    count: int
    right: int
    wrong: Sequence[Sequence[str]]
    """Place and reason of the first ones that did not."""
    seconds: float

    @property
    def share(self) -> float:
        """Share with full marks; 1 without a reference."""
        return self.right / self.count if self.count else 1.0

    def __str__(self) -> str:
        if not self.count:
            return "none in the data"
        is_listed = not self.wrong or self.share < WARN_BELOW  # a warning lists them
        first = "" if is_listed else "; the first that does not: {}, {}".format(*self.wrong[0])
        return f"{self.right} of {self.count} earn full {self.reward}{first}"


def read_references(data: DataSettings) -> Iterator[Reference]:
    """Yield the reference of each row, in order.

    Raises:
        DataError: the data cannot be read.
    """
    layout = describe_layout(data.layout)
    for part in (*list_parts(data), "train"):
        for place, row in read_rows(data, layout, part):
            problem: Problem | None = None
            try:
                problem = convert_row(layout, row)
                yield Reference(place, problem, layout.write_reference(row))
            except RowError as error:
                yield Reference(place, problem, "", str(error))


def check_references(
    data: DataSettings,
    sandbox: SandboxSettings,
    task: Any,
    read_back: Callable[[Sequence[str]], Sequence[str]] = list,
) -> ReferenceCheck:
    """Score a sample of the references with the first reward of a task, its correctness.

    `read_back` returns what rewards see of completions that a policy has written. The result is
    cached by sample, settings and code.

    Raises:
        DataError: the data cannot be read, or most references earn less than full marks.
    """
    rows = collect_once(data).rows
    # Drawn, not every n-th: a fault of every n-th row would be all that is seen.
    drawn = set(random.Random(0).sample(range(rows), min(SAMPLE, rows)))
    chosen = (one for row, one in enumerate(read_references(data)) if row in drawn)
    references = [one for one in chosen if one.problem and not one.reason]
    seen = read_back([one.completion for one in references]) if references else ()
    references = [one._replace(completion=s) for one, s in zip(references, seen, strict=True)]
    name, reward = next(iter(task.reward_funcs.items()))
    package = Path(__file__).parents[1]
    files = sorted(f for room in ("tasks", "sandbox") for f in (package / room).rglob("*.py"))
    sampled = [(one.place, one.completion, one.problem.data) for one in references if one.problem]
    facts = [[*hash_files(files).values()], sandbox.model_dump(), reward.__name__, sampled]
    text = json.dumps(facts, sort_keys=True, default=str).encode("utf-8", "replace")
    key = hashlib.blake2b(text, digest_size=16).hexdigest()
    cache = read_cache("references.json")
    if key not in cache:
        began = time.monotonic()
        wrong = list(_find_wrong_references(references, task)) if references else []
        cache[key] = [len(wrong), wrong[:MOST_LISTED], round(time.monotonic() - began, 1)]
        write_cache("references.json", dict(list(cache.items())[-200:]))
    count, wrong, seconds = cache[key]
    found = ReferenceCheck(name, len(references), len(references) - count, wrong, seconds)
    if found.share < REFUSE_BELOW:
        raise DataError(
            f"data.source = {data.source}: of {found.count} reference solutions, {found.right} "
            f"earn full {found.reward}:\n{format_wrong_references(found)}\n"
            "    fix: write the layout and columns that the data has; "
            "gdpo-tune score FILE.yaml --reference shows every row"
        )
    return found


def format_wrong_references(found: ReferenceCheck) -> str:
    """Return a line for each of the first references that earned less than full marks."""
    lines = [f"  {place}: {reason}" for place, reason in found.wrong]
    more = found.count - found.right - len(lines)
    return "\n".join([*lines, *([f"  and {more} more"] if more > 0 else [])])


def _find_wrong_references(references: Sequence[Reference], task: Any) -> Iterator[tuple[str, str]]:
    problems = [one.problem for one in references]
    completions = [one.completion for one in references]
    scores = task.score(problems, completions, [1] * len(references))
    name, reward = next(iter(task.reward_funcs.items()))
    results = scores.results or [None] * len(references)
    # The metric of that name also counts what the reward leaves out: answers without a call.
    values = scores.metrics.get(name, scores.rewards[name])
    for one, value, result in zip(references, values, results, strict=True):
        if value is None or value < reward.high:
            end = " ".join(make_printable(one.completion).split())[-60:]
            gold = one.problem.data.get("answer") if one.problem else None
            stated = f"; the data's answer is {make_printable(gold)}" if gold else ""
            shown = f"{name} is {value} for ...{end}{stated}"
            yield one.place, describe_result(result) if scores.results else shown


def describe_result(result: Result | None) -> str:
    """Return the sandbox's verdict on a program in one line; its detail comes from the program."""
    if result is None:
        return "no program"
    passed, detail = result.verdicts.count("passed"), " ".join(result.untrusted_detail.split())
    verdict = f"{result.status} ({passed} of {len(result.verdicts)} tests)"
    return f"{verdict}: {make_printable(detail)}" if detail else verdict
