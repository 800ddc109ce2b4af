"""Problems from a data set, dealt out to disjoint splits by a hash of the prompt.

The splits are those of the embedded tasks (`generation.split_of`), except that nothing is kept
for a warm start: 80 % of the prompts are for training, 10 % for the search, 10 % for the front.
So a prompt is in the same split whatever else is in the file, and in whatever order. The data set's
own splits stay out of this: `data.split` names the one that all three are cut from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256

from gdpo_tune.core import registry
from gdpo_tune.core.errors import DataError
from gdpo_tune.core.settings import DataSettings, TrainingSettings
from gdpo_tune.tasks.base import Problem, Split
from gdpo_tune.tasks.data.columns import Row, RowError
from gdpo_tune.tasks.data.rows import read_rows
from gdpo_tune.tasks.generation import split_of

LARGEST_SHARE_LEFT_OUT = 0.5
"""With more unusable rows than this share, the layout is probably not that of the data."""

Adapter = Callable[[Row], Problem]
"""Maps one row to a problem, purely; raises `RowError` for a row that it cannot use."""


@dataclass(frozen=True)
class Collected:
    """A data set, read and mapped."""

    splits: Mapping[Split, list[Problem]]
    """Problems with distinct prompts."""
    rows: int
    left_out: int
    """Rows that are no problem: an answer that cannot be parsed, a test that cannot be run."""
    first_left_out: str
    """Place, column and reason of the first of them; empty if there is none."""

    def __str__(self) -> str:
        prompts = sum(map(len, self.splits.values()))
        parts = ", ".join(f"{name} {len(found)}" for name, found in self.splits.items())
        left_out = f"; {self.left_out} left out ({self.first_left_out})" if self.left_out else ""
        return f"{self.rows} rows, {prompts} distinct prompts ({parts}){left_out}"


def problems_of(data: DataSettings, split: Split, count: int, seed: int) -> list[Problem]:
    """`count` problems of one split with distinct prompts; which ones, the seed decides.

    A smaller `count` gives the first of them. The order of the rows does not matter.

    Raises:
        DataError: the data cannot be had or read, or the split holds fewer prompts.
    """
    found = _kept(data).splits.get(split, [])
    _require_enough(data, {split: (len(found), count)})
    ranked = sorted(found, key=lambda problem: sha256(f"{seed}/{problem.prompt}".encode()).digest())
    return ranked[:count]


def describe(data: DataSettings) -> dict[str, str]:
    """Provenance of the prompts, for a task's `environment`; nothing without a source.

    Raises:
        DataError: the data cannot be had or read.
    """
    return {"data": f"{data.source}: {_kept(data)}"} if data.source else {}


def check_data(data: DataSettings, training: TrainingSettings) -> None:
    """Refuse, before any work starts, data that would fail every trial.

    Raises:
        DataError: the data cannot be had, read or used, or a split holds too few prompts.
    """
    if not data.source:
        return
    splits = _kept(data).splits
    asked: dict[Split, int] = {
        "train": training.train_prompts,
        "validation": training.validation_prompts,
        "test": training.test_prompts,
    }
    _require_enough(data, {name: (len(splits[name]), count) for name, count in asked.items()})


def collect(data: DataSettings) -> Collected:
    """Read a source and map its rows with the adapter of its layout.

    Of several rows with the same prompt the first one counts.

    Raises:
        DataError: the data cannot be had or read, holds no row, or most rows cannot be used.
    """
    layout = registry.LAYOUTS[data.layout]
    adapter: Adapter = registry.load(layout.target)
    splits: dict[Split, list[Problem]] = {"train": [], "validation": [], "test": []}
    seen: set[str] = set()
    rows, faults = 0, list[str]()
    for place, row in read_rows(data, layout.columns, layout.optional):
        rows += 1
        try:
            problem = adapter(row)
        except RowError as error:
            faults.append(f"{place}: {error}")
            continue
        if problem.prompt not in seen:
            seen.add(problem.prompt)
            name = split_of(problem.prompt)
            splits["train" if name == "warm_start" else name].append(problem)
    if not rows:
        raise DataError(f"data.source = {data.source} holds no row: give one that does")
    if len(faults) > LARGEST_SHARE_LEFT_OUT * rows:
        raise DataError(
            f"data.source = {data.source}: {len(faults)} of {rows} rows cannot be used as layout "
            f"{data.layout}, the first is {faults[0]}: mend the data, or write the layout that it "
            "has as data.layout"
        )
    return Collected(splits, rows, len(faults), faults[0] if faults else "")


_kept = lru_cache(maxsize=1)(collect)
"""Every split of a trial, and every trial of a process, reads the same data."""


def _require_enough(data: DataSettings, sizes: Mapping[Split, tuple[int, int]]) -> None:
    """Refuse splits (name -> prompts that there are, and that are asked for) that are too small."""
    short = {name: size for name, size in sizes.items() if size[0] < size[1]}
    if not short:
        return
    listed = "; ".join(
        f"{there or 'no'} distinct {name} prompts where training.{name}_prompts = {asked}"
        for name, (there, asked) in short.items()
    )
    lower = ", ".join(f"training.{name}_prompts" for name, (there, _) in short.items() if there)
    fix = f"lower {lower}, or give" if lower else "give"
    raise DataError(f"data.source = {data.source} has {listed}: {fix} more data")


class FromData:
    """The part of a task that takes problems from a data set, or writes its own without one."""

    _data: DataSettings
    _generate: Callable[[Split, int, int], list[Problem]]
    """How the task writes problems: of a split, so many, by a seed."""

    def problems(self, split: Split, count: int, seed: int) -> list[Problem]:
        """`count` problems with distinct prompts; the same arguments give the same list.

        Raises:
            UsageError: the split does not hold that many distinct prompts.
            DataError: the data set cannot be had, read or used.
        """
        if self._data.source:
            return problems_of(self._data, split, count, seed)
        return self._generate(split, count, seed)
