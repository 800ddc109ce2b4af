"""Tasks made of reward functions as TRL takes them: derive from `RewardFunctionTask`.

    class Sums(RewardFunctionTask):
        reward_funcs = [right, short]
        ranges = {"right": (0, 1), "short": (0, 1)}

        def rows(self):
            return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in R for b in R]

A reward function is called with keywords: `prompts`, `completions`, `lengths` (tokens of each
completion) and every column of the rows, a list of N each. It returns N numbers, or None for a
completion that it does not score. A text instead of a function names a reward model: a Hub id or a
directory.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.settings import DataSettings, SandboxSettings, TrainingSettings
from gdpo_tune.core.system import CloseableResource
from gdpo_tune.core.task_files import describe_error
from gdpo_tune.core.trials import Direction
from gdpo_tune.tasks.base import Problem, Split
from gdpo_tune.tasks.task import RewardFailures, Scores

RowReward = Callable[..., Sequence[float | None]]
Columns = Mapping[str, Sequence[Any]]
SHARES = {"validation": range(15), "test": range(15, 30), "train": range(30, 100)}
"""Per cent of the rows, by a hash of their prompt."""
MEAN_LENGTH = "mean_length"
_logger = logging.getLogger(__name__)


class RewardFunctionTask(CloseableResource):
    """A task whose rewards are functions; each of them is also a held-out metric."""

    reward_funcs: ClassVar[Sequence[RowReward | str]] = ()
    """Functions, or reward models by Hub id or directory."""
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {}
    """Name of a reward -> lowest and highest value, where they are known."""
    directions: ClassVar[Mapping[str, Direction]] = {}
    """Metric -> the better direction; `maximize` if it is not here, `minimize` for mean_length."""
    instructions: str = ""
    """The format in words, for a policy that does not know it."""
    rewards: ClassVar[tuple[str, ...]] = ()
    """Names of the functions, in their order."""
    metrics: ClassVar[tuple[str, ...]] = (MEAN_LENGTH,)
    """The rewards, and the mean length of a completion in tokens."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.rewards = tuple(name_reward(function) for function in cls.reward_funcs)
        cls.metrics = (*cls.rewards, MEAN_LENGTH)
        cls.ranges = {MEAN_LENGTH: (0.0, float("inf")), **cls.ranges}
        cls.directions = {MEAN_LENGTH: "minimize", **cls.directions}

    def __init__(
        self,
        settings: TrainingSettings,
        sandbox: SandboxSettings | None = None,
        data: DataSettings | None = None,
    ) -> None:
        """Keep the sweep's `training:` as `self.settings`; a subclass may use the other two."""
        self.settings = settings
        self.sandbox = sandbox
        self.data = data
        self._functions: list[RowReward] | None = None

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """Return every row: its `prompt`, a text, and the columns that the functions want.

        The prompt alone decides whether a row is for training, validation or test.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method rows()")

    def problems(self, split: Split, count: int, seed: int) -> list[Problem]:
        """Return `count` rows of a split, in an order that the seed decides.

        Raises:
            UsageError: the split has fewer.
        """
        rows = self._splits[split]
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

        A function that raises is called again for each completion alone: those on which it raises
        again are not scored.
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
        failures: dict[str, RewardFailures] = {}
        for name, function in zip(self.rewards, self._load_functions(), strict=True):
            rewards[name], failures[name] = call_reward_function(function, columns)
        metrics = {**rewards, MEAN_LENGTH: [float(length) for length in lengths]}
        return Scores(rewards, metrics, failures)

    def environment(self) -> dict[str, str]:
        """Return nothing: the task adds no provenance of its own."""
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

    def _load_functions(self) -> list[RowReward]:
        if self._functions is None:
            functions: list[RowReward] = []
            for function in type(self).reward_funcs:
                if isinstance(function, str):
                    function = RewardModel(function)
                functions.append(function)
            self._functions = functions
        return self._functions

    @functools.cached_property
    def _splits(self) -> dict[str, list[Problem]]:
        splits: dict[str, list[Problem]] = {"warm_start": [], **{split: [] for split in SHARES}}
        for prompt, row in collect_rows(self.rows()).items():
            splits[choose_row_split(prompt)].append(Problem(prompt, "own", row))
        return splits


def name_reward(function: RowReward | str) -> str:
    """Return a function's name, or a model's last part with `_` for all but letters and digits."""
    if isinstance(function, str):
        return re.sub(r"\W", "_", Path(function).name)
    return getattr(function, "__name__", type(function).__name__)


def collect_rows(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return prompt -> the other columns; of rows with the same prompt the first counts.

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


def choose_row_split(prompt: str) -> str:
    """Return the split of a row."""
    per_cent = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:4], "big") % 100
    return next(split for split, share in SHARES.items() if per_cent in share)


def call_reward_function(
    function: RowReward, columns: Columns
) -> tuple[list[float | None], RewardFailures]:
    """Return the rewards of N completions, and the failures of the function."""
    values, first_error = _try_function(function, columns)
    if values is not None:
        return values, RewardFailures()
    values = []
    failed = 0
    for row in range(len(columns["completions"])):
        alone, _ = _try_function(function, {name: [c[row]] for name, c in columns.items()})
        values += [None] if alone is None else alone
        failed += alone is None
    return values, RewardFailures(failed, first_error) if failed else RewardFailures()


def _try_function(function: RowReward, columns: Columns) -> tuple[list[float | None] | None, str]:
    """Return the rewards, or None and the last line of the traceback."""
    count = len(columns["completions"])
    try:
        returned = function(**columns)
        if inspect.iscoroutine(returned):
            returned.close()
            raise TypeError("an async reward function; write a plain one")
        values = [None if value is None else float(value) for value in returned]
        if len(values) != count:
            raise ValueError(f"{len(values)} rewards for {count} completions")
        return values, ""
    except Exception as error:  # a user's function may raise anything
        _logger.debug("a reward function raised", exc_info=True)
        return None, describe_error(error)


class RewardModel:
    """The logit of `prompt + completion`, by a model from the Hub or a directory.

    Raises:
        UsageError: there is no such model, or its tokenizer cannot pad.
    """

    def __init__(self, name: str) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        try:
            self._model: Any = AutoModelForSequenceClassification.from_pretrained(
                name, num_labels=1
            )
            self._tokenizer: Any = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise UsageError(f"reward model {name} cannot be loaded: {reason}") from error
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        if self._tokenizer.pad_token is None:
            raise UsageError(f"the tokenizer of reward model {name} has no pad or end token")
        self._model.config.pad_token_id = self._tokenizer.pad_token_id
        self._model.to("cuda" if torch.cuda.is_available() else "cpu").eval()

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
        """Return N rewards."""
        texts = [prompt + text for prompt, text in zip(prompts, completions, strict=True)]
        inputs = self._tokenizer(
            text=texts,
            return_tensors="pt",
            padding=True,
            padding_side="right",
            add_special_tokens=False,
        ).to(self._model.device)
        import torch

        with torch.inference_mode():
            return self._model(**inputs).logits[:, 0].float().tolist()
