"""Problems from a data set, assigned to disjoint splits by a hash of the prompt.

The splits are those of the embedded tasks (`generation.choose_split`), except that nothing is kept
for a warm start: 80 % of the prompts are for training, 10 % for the search, 10 % for the front.
A prompt is in the same split whatever else is in the file, and in whatever order. The data set's
own splits do not matter here: `data.split` names the one that all three are cut from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from gdpo_tune.core.errors import DataError
from gdpo_tune.core.registry import describe_layout
from gdpo_tune.core.settings import DataSettings, TrainingSettings
from gdpo_tune.tasks.base import Problem, Split
from gdpo_tune.tasks.data_rows import RowError, choose_data_split, choose_problems, read_rows

LARGEST_SHARE_LEFT_OUT = 0.5
"""With more unusable rows than this share, the layout is probably not that of the data."""


@dataclass(frozen=True)
class CollectedData:
    """A data set whose rows have become problems."""

    splits: Mapping[Split, list[Problem]]
    """Problems with distinct prompts."""
    rows: int
    left_out: int
    """Rows that give no problem: an answer that cannot be parsed, a test that cannot be run."""
    first_left_out: str
    """Line, column and reason of the first of them; empty if there is none."""

    def __str__(self) -> str:
        prompts = sum(map(len, self.splits.values()))
        parts = ", ".join(f"{name} {len(problems)}" for name, problems in self.splits.items())
        left_out = f"; {self.left_out} left out ({self.first_left_out})" if self.left_out else ""
        return f"{self.rows} rows, {prompts} distinct prompts ({parts}){left_out}"


def select_problems(data: DataSettings, split: Split, count: int, seed: int) -> list[Problem]:
    """Return `count` problems of one split with distinct prompts, chosen by the seed.

    A smaller `count` gives the first of them. The order of the rows does not matter.

    Raises:
        DataError: the data cannot be read, or the split holds fewer prompts.
    """
    problems = _collect_once(data).splits.get(split, [])
    _require_enough(data, {split: (len(problems), count)})
    return choose_problems(problems, count, seed)


def describe_data(data: DataSettings) -> dict[str, str]:
    """Return provenance of the prompts, for a task's `environment`; nothing without a source.

    Raises:
        DataError: the data cannot be read or used.
    """
    return {"data": f"{data.source}: {_collect_once(data)}"} if data.source else {}


def check_data(data: DataSettings, training: TrainingSettings) -> None:
    """Refuse, before any work starts, data that would fail every trial.

    Raises:
        DataError: the data cannot be read or used, or a split holds too few prompts.
    """
    if not data.source:
        return
    sizes: dict[Split, tuple[int, int]] = {
        split: (len(problems), getattr(training, f"{split}_prompts"))
        for split, problems in _collect_once(data).splits.items()
    }
    _require_enough(data, sizes)


def collect_data(data: DataSettings) -> CollectedData:
    """Read a source and convert its rows with its layout.

    Of several rows with the same prompt the first one counts.

    Raises:
        DataError: the data cannot be read, holds no row, or most rows cannot be used.
    """
    layout = describe_layout(data.layout)
    splits: dict[Split, list[Problem]] = {"train": [], "validation": [], "test": []}
    seen: set[str] = set()
    rows, faults = 0, list[str]()
    for place, row in read_rows(data, layout.columns, layout.optional):
        rows += 1
        try:
            problem: Problem = layout.convert(row)
        except RowError as error:
            faults.append(f"{place}: {error}")
            continue
        if problem.prompt not in seen:
            seen.add(problem.prompt)
            splits[choose_data_split(problem.prompt)].append(problem)
    if not rows:
        raise DataError(f"data.source = {data.source} holds no row: give one that does")
    if len(faults) > LARGEST_SHARE_LEFT_OUT * rows:
        raise DataError(
            f"data.source = {data.source}: {len(faults)} of {rows} rows cannot be used as layout "
            f"{data.layout}, the first is {faults[0]}: correct the data, or write its layout as "
            "data.layout"
        )
    return CollectedData(splits, rows, len(faults), faults[0] if faults else "")


_collect_once = lru_cache(maxsize=1)(collect_data)
"""Every split of a trial, and every trial of a process, reads the same data."""


def _require_enough(data: DataSettings, sizes: Mapping[Split, tuple[int, int]]) -> None:
    """Refuse splits that are too small; `sizes` is name -> (available, needed) prompts."""
    short = {name: size for name, size in sizes.items() if size[0] < size[1]}
    if not short:
        return
    listed = "; ".join(
        f"{available or 'no'} distinct {name} prompts where training.{name}_prompts = {count}"
        for name, (available, count) in short.items()
    )
    lower = ", ".join(f"training.{name}_prompts" for name, (size, _) in short.items() if size)
    fix = f"lower {lower}, or give" if lower else "give"
    raise DataError(f"data.source = {data.source} has {listed}: {fix} more data")
