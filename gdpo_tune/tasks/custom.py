"""Tasks out of reward functions as TRL takes them: derive from `RewardFunctionTask`.

    class Sums(RewardFunctionTask):
        reward_funcs = [right, short]
        ranges = {"right": (0, 1), "short": (0, 1)}

        def rows(self):
            return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in R for b in R]

A reward function is called with keywords: `prompts`, `completions`, `lengths` (tokens of each
completion) and every column of the rows, a list of N each; it returns N numbers, or None where it
has nothing to say. A text in its place is a reward model: a Hub id or a folder.
"""

from __future__ import annotations

import hashlib
import inspect
import random
import re
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from gdpo_tune.core.closing import Closing
from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.settings import DataSettings, SandboxSettings, TrainingSettings
from gdpo_tune.core.trials import Direction
from gdpo_tune.tasks.base import Failures, Problem, Scores, Split

RewardFunction = Callable[..., Sequence[float | None]]
SHARES = {"validation": range(15), "test": range(15, 30), "train": range(30, 100)}
"""Per cent of the rows, by a hash of their prompt."""
MEAN_LENGTH = "mean_length"


class RewardFunctionTask(Closing):
    """A task whose rewards are functions; each of them is a held-out metric, too."""

    reward_funcs: ClassVar[Sequence[RewardFunction | str]] = ()
    """Functions, or reward models by Hub id or folder."""
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {}
    """Name of a reward -> lowest and highest value, where they are known."""
    directions: ClassVar[Mapping[str, Direction]] = {MEAN_LENGTH: "minimize"}
    """Metric -> which way is better; `maximize` if it is not here."""
    instructions: str = ""
    """What a policy that does not know the format is told of it."""
    rewards: ClassVar[tuple[str, ...]] = ()
    """Names of the functions, in their order."""
    metrics: ClassVar[tuple[str, ...]] = (MEAN_LENGTH,)
    """The rewards, and the mean length of a completion in tokens."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.rewards = tuple(reward_name(function) for function in cls.reward_funcs)
        cls.metrics = (*cls.rewards, MEAN_LENGTH)
        if MEAN_LENGTH not in cls.ranges:
            cls.ranges = {**cls.ranges, MEAN_LENGTH: (0.0, float("inf"))}
        if MEAN_LENGTH not in cls.directions:
            cls.directions = {**cls.directions, MEAN_LENGTH: "minimize"}

    def __init__(
        self,
        settings: TrainingSettings,
        sandbox: SandboxSettings | None = None,
        data: DataSettings | None = None,
    ) -> None:
        """`self.settings` is the sweep's `training:`; the other two are there for use."""
        self.settings = settings
        self.sandbox = sandbox
        self.data = data
        self._splits: dict[str, list[Problem]] | None = None
        self._functions: list[RewardFunction] | None = None

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """Every row: its `prompt`, a text, and whatever columns the functions want.

        Where rows go, to training, validation or test, hangs on their prompt alone.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method rows()")

    def problems(self, split: Split, count: int, seed: int) -> list[Problem]:
        """`count` rows of a split, in an order of their own.

        Raises:
            UsageError: the split has fewer.
        """
        rows = self._rows()[split]
        if count > len(rows):
            raise UsageError(
                f"{type(self).__name__} has {len(rows)} {split} prompts, and "
                f"training.{split}_prompts = {count}\n"
                f"    fix: --set training.{split}_prompts={len(rows)}, or more rows"
                + ("" if rows else " (a split gets 15 per cent of them, by hash)")
            )
        return random.Random(f"{seed}/{split}").sample(rows, count)

    def score(
        self, problems: Sequence[Problem], completions: Sequence[str], lengths: Sequence[int]
    ) -> Scores:
        """Call every function on N completions.

        One that raises is called again for each completion alone: those on which it raises again
        are not scored.
        """
        columns: dict[str, list[Any]] = {
            name: [problem.data[name] for problem in problems] for name in problems[0].data
        }
        columns |= {
            "prompts": [problem.prompt for problem in problems],
            "completions": list(completions),
            "lengths": list(lengths),
        }
        rewards: dict[str, Sequence[float | None]] = {}
        failures: dict[str, Failures] = {}
        for name, function in zip(self.rewards, self._loaded(), strict=True):
            rewards[name], failures[name] = judged(function, columns, len(completions))
        metrics = {**rewards, MEAN_LENGTH: [float(length) for length in lengths]}
        return Scores(rewards, metrics, failures)

    def environment(self) -> dict[str, str]:
        """Nothing that the trainer does not know."""
        return {}

    def close(self) -> None:
        """Forget the reward models."""
        self._functions = None

    def __enter__(self) -> Self:
        """Refuse splits that are too small, before a sweep starts."""
        self.problems("train", self.settings.train_prompts, 0)
        self.problems("validation", self.settings.validation_prompts, 0)
        self.problems("test", self.settings.test_prompts, 0)
        return self

    def _loaded(self) -> list[RewardFunction]:
        if self._functions is None:
            self._functions = [
                load_model(given) if isinstance(given, str) else given
                for given in type(self).reward_funcs
            ]
        return self._functions

    def _rows(self) -> dict[str, list[Problem]]:
        if self._splits is None:
            self._splits = {"warm_start": [], **{split: [] for split in SHARES}}
            for prompt, row in distinct(self.rows()).items():
                self._splits[split_of(prompt)].append(Problem(prompt, "own", row))
        return self._splits


def reward_name(function: RewardFunction | str) -> str:
    """A function's name, or the last part of a model's; every sign but letters and digits is _."""
    if isinstance(function, str):
        return re.sub(r"\W", "_", Path(function).name)
    return getattr(function, "__name__", type(function).__name__)


def distinct(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Prompt -> the other columns; of rows with the same prompt the first counts.

    Raises:
        UsageError: a row without a prompt, or with other columns than the first.
    """
    result: dict[str, dict[str, Any]] = {}
    columns: set[str] | None = None
    for number, row in enumerate(rows):
        if not isinstance(row.get("prompt"), str) or not row["prompt"]:
            raise UsageError(f"rows(): row {number} has no text as its `prompt`")
        rest = {name: value for name, value in row.items() if name != "prompt"}
        columns = set(rest) if columns is None else columns
        if set(rest) != columns:
            raise UsageError(
                f"rows(): row {number} has the columns {sorted(rest)}, and the "
                f"first one {sorted(columns)}"
            )
        result.setdefault(row["prompt"], rest)
    return result


def split_of(prompt: str) -> str:
    """Where a row goes."""
    per_cent = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:4], "big") % 100
    return next(split for split, share in SHARES.items() if per_cent in share)


def judged(
    function: RewardFunction, columns: Mapping[str, Sequence[Any]], count: int
) -> tuple[list[float | None], Failures]:
    """Rewards of N completions, and what the function failed on."""
    with _Attempt() as whole:
        return _called(function, columns, count), Failures()
    values: list[float | None] = []
    failed = 0
    for row in range(count):
        with _Attempt() as alone:
            values += _called(function, {name: [c[row]] for name, c in columns.items()}, 1)
        if alone.error:
            values.append(None)
            failed += 1
    return values, Failures(failed, whole.error) if failed else Failures()


class _Attempt:
    """Keeps what a block raises: a function that somebody else wrote may raise anything."""

    def __init__(self) -> None:
        self.error = ""
        """The last line of the traceback; empty if nothing was raised."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        place = traceback.extract_tb(trace)[-1]
        told = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
        self.error = f"{told} ({Path(place.filename).name}, line {place.lineno})"
        return True


def _called(
    function: RewardFunction, columns: Mapping[str, Sequence[Any]], count: int
) -> list[float | None]:
    returned = function(**columns)
    if inspect.iscoroutine(returned):
        returned.close()
        raise TypeError("an async reward function; write a plain one")
    values = [None if value is None else float(value) for value in returned]
    if len(values) != count:
        raise ValueError(f"{len(values)} rewards for {count} completions")
    return values


def load_model(name: str) -> RewardFunction:
    """A reward model as a function."""
    # Only who uses one pays for importing torch.
    from gdpo_tune.tasks.reward_model import RewardModel

    return RewardModel(name)
