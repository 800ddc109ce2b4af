"""Tasks made of reward functions as TRL takes them: derive from `RewardFunctionTask`.

    class Sums(RewardFunctionTask):
        reward_funcs = [right, short]
        ranges = {"right": (0, 1), "short": (0, 1)}

        def rows(self):
            return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in R for b in R]

A reward function is called with TRL's keywords: `prompts`, `completions`, `completion_ids`,
`trainer_state`, `log_metric`, `log_extra` and every column of the rows, a list of N each; and with
`lengths`, the tokens of each completion. It returns N numbers, or None for a completion that it
does not score; it may be async. A text instead of a function names a reward model: a Hub id or a
directory.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import hashlib
import inspect
import logging
import pickle
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Self, cast

from gdpo_tune.core.errors import GdpoTuneError, TrialFailure, UsageError
from gdpo_tune.core.settings import DataSettings, SandboxSettings, TrainingSettings
from gdpo_tune.core.system import CloseableResource
from gdpo_tune.core.task_files import describe_error
from gdpo_tune.core.trials import Direction
from gdpo_tune.tasks.base import (
    MOST_FAILED,
    CallContext,
    Problem,
    RewardFailures,
    Scores,
    Split,
)

RewardFunction = Callable[..., Any]
Messages = Sequence[Mapping[str, str]]
SHARES = {"validation": range(15), "test": range(15, 30), "train": range(30, 100)}
"""Per cent of the rows, by a hash of their prompt."""
MEAN_LENGTH = "mean_length"
TIME_LIMIT = 600.0
"""Seconds for one call of a function, if its class does not say otherwise."""
RESERVED = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")
"""Keywords that TRL sets itself: it drops a column of such a name, or raises for it."""
OPTIONAL = {*RESERVED[2:], "lengths"}
"""Keywords that a function gets only if its signature has room for them."""
METRIC_NAME = re.compile(r"[\w\-. :/]+")
"""Names that MLflow takes."""
_logger = logging.getLogger(__name__)


class RewardFunctionTask(CloseableResource):
    """A task whose rewards are functions; each of them is also a held-out metric."""

    reward_funcs: ClassVar[Sequence[RewardFunction | str]] = ()
    """Functions, or reward models by Hub id or directory."""
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {}
    """Name of a reward -> lowest and highest value, where they are known."""
    directions: ClassVar[Mapping[str, Direction]] = {}
    """Metric -> the better direction; `maximize` if it is not here, `minimize` for mean_length."""
    instructions: str = ""
    """The format in words, for a policy that does not know it."""
    time_limit: ClassVar[float] = TIME_LIMIT
    """Seconds that a function may take for a batch; a tenth of it for a completion alone."""
    rewards: ClassVar[tuple[str, ...]] = ()
    """Names of the functions, in their order."""
    places: ClassVar[Mapping[str, str]] = {}
    """Name of a function -> its file and line."""
    metrics: ClassVar[tuple[str, ...]] = (MEAN_LENGTH,)
    """The rewards, and the mean length of a completion in tokens."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.rewards = tuple(name_reward(function) for function in cls.reward_funcs)
        cls.places = dict(zip(cls.rewards, map(locate_function, cls.reward_funcs), strict=True))
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
        self.calls = CallRecord()
        """Record of the current batch; a process of its own replaces it, to tell its parent."""
        self.repeated_rows = 0
        """Rows left out because an earlier one has their prompt."""
        self._functions: list[RewardFunction] | None = None
        self._runner: asyncio.Runner | None = None

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """Return every row: its `prompt`, and the columns that the functions want.

        A prompt is a text, or in all rows a list of messages, mappings with `role` and `content`.
        It alone decides whether a row is for training, validation or test.
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
        self,
        problems: Sequence[Problem],
        completions: Sequence[str],
        lengths: Sequence[int],
        *,
        context: CallContext | None = None,
    ) -> Scores:
        """Call every function on N completions, each time with its own copy of everything.

        A function that raises is called once more, because a service may have been away, then for
        each completion alone: those on which it raises again are not scored.

        Raises:
            TrialFailure: a function returned another number of values, or what is no number.
        """
        batch = _Batch(problems, completions, lengths, context or CallContext())
        results: dict[str, CallResult] = {}
        for name, function in zip(self.rewards, self.load_functions(), strict=True):
            known = self.calls.finished.get(name)
            results[name] = known or self._call(name, function, batch)
        rewards = {name: result.values for name, result in results.items()}
        return Scores(
            rewards,
            {**rewards, MEAN_LENGTH: [float(length) for length in lengths]},
            {name: result.failures for name, result in results.items()},
            logged=[entry for result in results.values() for entry in result.logged],
            columns={k: v for result in results.values() for k, v in result.columns.items()},
            seconds={name: result.seconds for name, result in results.items()},
        )

    def environment(self) -> dict[str, str]:
        """Return how many rows were left out; nothing else is known of the task."""
        if not self.repeated_rows:
            return {}
        return {"rows_left_out": f"{self.repeated_rows}, whose prompt an earlier row has"}

    def close(self) -> None:
        """Forget the reward models."""
        self._functions = None
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def __enter__(self) -> Self:
        """Refuse splits that are too small, before a sweep starts."""
        self.problems("train", self.settings.train_prompts, 0)
        self.problems("validation", self.settings.validation_prompts, 0)
        self.problems("test", self.settings.test_prompts, 0)
        return self

    def load_functions(self) -> list[RewardFunction]:
        """Return the functions; the first call loads the reward models."""
        if self._functions is None:
            functions: list[RewardFunction] = []
            for function in type(self).reward_funcs:
                if isinstance(function, str):
                    from gdpo_tune.tasks.reward_model import RewardModel  # late: it imports torch

                    function = RewardModel(function)
                functions.append(function)
            self._functions = functions
        return self._functions

    def _call(self, name: str, function: RewardFunction, batch: _Batch) -> CallResult:
        """Return what a function says of a batch: at once, else row by row."""
        started, lost, first = time.perf_counter(), self.calls.lost.get(name, {}), ""
        everything = range(len(batch.completions))
        result = CallResult([None for _ in everything])
        for _ in range(0 if lost else 2):
            self.calls.begin(name, None)
            values, error = self._try(name, function, batch, everything, result)
            if values is not None:
                result.values = values
                if first:
                    _logger.warning("reward %s raised once, then judged: %s", name, first)
                break
            first = first or error
        else:
            first, failed = first or next(iter(lost.values())), 0
            # Each row that ends the process costs a start of it.
            gives_up = len(lost) - 1 > max(2, MOST_FAILED * len(everything))
            for row in everything:
                values = None
                if row not in lost and not gives_up:
                    self.calls.begin(name, row)
                    values, _ = self._try(name, function, batch, [row], result)
                result.values[row] = None if values is None else values[0]
                failed += values is None
            result.failures = RewardFailures(failed, first) if failed else RewardFailures()
        result.seconds = time.perf_counter() - started
        self.calls.end(name, result)
        return result

    def _try(
        self,
        name: str,
        function: RewardFunction,
        batch: _Batch,
        rows: Sequence[int],
        result: CallResult,
    ) -> tuple[list[float | None] | None, str]:
        """Return the rewards of some rows, or None and the last line of the traceback."""
        logged: list[tuple[str, float]] = []
        columns: dict[str, list[Any]] = {}

        def log_metric(metric: str, value: float) -> None:
            if not METRIC_NAME.fullmatch(metric):
                raise ValueError(f"log_metric({metric!r}): a name has letters, digits and -_. :/")
            logged.append((metric, float(value)))

        def log_extra(column: str, values: Sequence[Any]) -> None:
            if len(values) != len(rows):
                raise ValueError(
                    f"log_extra({column!r}): {len(values)} values for {len(rows)} completions"
                )
            columns[column] = [v if isinstance(v, int | float | None) else str(v) for v in values]

        try:
            keywords = batch.copy_keywords(rows)
            keywords = {"log_metric": log_metric, "log_extra": log_extra} | keywords
            returned = function(**_select_keywords(function, keywords))
            if inspect.isawaitable(returned):
                self._runner = self._runner or asyncio.Runner()
                returned = self._runner.run(_wait_for(returned))
            if isinstance(returned, Iterable) and not isinstance(returned, str | bytes | Mapping):
                returned = list(cast("Iterable[Any]", returned))
        except GdpoTuneError:
            raise
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            _logger.debug("a reward function raised", exc_info=True)
            return None, describe_error(error)
        values = _read_values(returned, len(rows), f"reward {name} ({self.places[name]})")
        result.logged += logged
        if len(rows) == len(batch.completions):
            result.columns |= columns
        return values, ""

    @functools.cached_property
    def _splits(self) -> dict[str, list[Problem]]:
        splits: dict[str, list[Problem]] = {"warm_start": [], **{split: [] for split in SHARES}}
        rows, self.repeated_rows = collect_rows(self.rows())
        for problem in rows.values():
            splits[choose_row_split(problem.prompt)].append(problem)
        return splits


@dataclass
class CallResult:
    """What one function said of N completions."""

    values: list[float | None]
    failures: RewardFailures = field(default_factory=RewardFailures)
    logged: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])
    """Metrics that it logged, in their order."""
    columns: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    """Extra columns that it logged, N values each."""
    seconds: float = 0.0


@dataclass
class CallRecord:
    """Calls of functions on one batch, for a process that may end in any of them."""

    finished: Mapping[str, CallResult] = field(default_factory=dict[str, CallResult])
    """Name -> result, from before the process was started again."""
    lost: Mapping[str, Mapping[int | None, str]] = field(
        default_factory=dict[str, Mapping[int | None, str]]
    )
    """Name -> row in which the process ended (None: all at once) -> reason."""
    begin: Callable[[str, int | None], None] = lambda name, row: None
    """Called before a call, with the function's name and the row as in `lost`."""
    end: Callable[[str, CallResult], None] = lambda name, result: None
    """Called with what a function said of the whole batch."""


class TrainerStateView(SimpleNamespace):
    """TRL's `trainer_state` as far as it is known."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"trainer_state.{name} is not known here: outside the steps of a training there are "
            "global_step and max_steps at most (docs/own_task.md)"
        )


class _Unknown:
    """A keyword of TRL that is not known here: any use of it raises."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __iter__(self) -> Any:
        raise TypeError(f"{self._name} are not known here: these texts come from no policy")

    def __len__(self) -> int:
        return self.__iter__()

    def __getitem__(self, index: Any) -> Any:
        return self.__iter__()


class _Batch:
    """N completions with what their functions get; every copy is new."""

    def __init__(
        self,
        problems: Sequence[Problem],
        completions: Sequence[str],
        lengths: Sequence[int],
        context: CallContext,
    ) -> None:
        self.completions, self._lengths = completions, lengths
        self._context = context
        # A problem occurs once for each completion of its group.
        copiers = {id(one): _build_copier((one.turns, one.data)) for one in problems}
        self._copy_row = [copiers[id(one)] for one in problems]
        self._problems = problems

    def copy_keywords(self, rows: Sequence[int]) -> dict[str, Any]:
        """Return the keywords of a call on some rows; a column wins over `lengths`."""
        copied = [self._copy_row[row]() for row in rows]
        texts = [self.completions[row] for row in rows]
        is_chat = bool(copied[0][0])
        ids = self._context.completion_ids
        state = self._context.trainer_state
        return {
            "prompts": [
                turns if is_chat else self._problems[row].prompt
                for row, (turns, _) in zip(rows, copied, strict=True)
            ],
            "completions": (
                [[{"role": "assistant", "content": text}] for text in texts] if is_chat else texts
            ),
            "completion_ids": (
                _Unknown("completion_ids") if ids is None else [list(ids[row]) for row in rows]
            ),
            "trainer_state": TrainerStateView(**copy.deepcopy(dict(state or {}))),
            "lengths": [self._lengths[row] for row in rows],
            **{name: [data[name] for _, data in copied] for name in copied[0][1]},
        }


def _build_copier(value: Any) -> Callable[[], Any]:
    try:
        stored = pickle.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError):
        return lambda: copy.deepcopy(value)
    return lambda: pickle.loads(stored)


def _select_keywords(function: RewardFunction, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords without those of `OPTIONAL` for which the function has no parameter."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C
        return dict(keywords)
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return dict(keywords)
    return {k: v for k, v in keywords.items() if k in parameters or k not in OPTIONAL}


async def _wait_for(returned: Awaitable[Any]) -> Any:
    return await returned


def _read_values(returned: Any, count: int, function: str) -> list[float | None]:
    """Return the values as numbers.

    Raises:
        TrialFailure: they are not one number or None for each completion.

    Source: TRL 1.16, `GRPOTrainer._calculate_rewards`, which raises for another number.
    """
    fix = "\n    fix: return a list with one number, or None, for each of `completions`"
    if not isinstance(returned, list):
        raise TrialFailure(
            f"{function} returned {_shorten(returned)}, a {type(returned).__name__}, in place of "
            f"a list of {count} numbers{fix}"
        )
    values = cast("list[Any]", returned)
    if len(values) != count:
        raise TrialFailure(f"{function} returned {len(values)} values for {count} completions{fix}")
    result: list[float | None] = []
    for row, value in enumerate(values):
        try:
            if isinstance(value, str | bytes):
                raise TypeError
            result.append(None if value is None else float(value))
        except (TypeError, ValueError):
            raise TrialFailure(
                f"{function} returned {_shorten(value)}, a {type(value).__name__}, for completion "
                f"{row}, in place of a number{fix}"
            ) from None
    return result


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def name_reward(function: RewardFunction | str) -> str:
    """Return a function's name, or a model's last part with `_` for all but letters and digits."""
    if isinstance(function, str):
        return re.sub(r"\W", "_", Path(function).name)
    return getattr(function, "__name__", type(function).__name__)


def locate_function(function: RewardFunction | str) -> str:
    """Return a function's file and line; what a reward model is, for its name."""
    if isinstance(function, str):
        return "a reward model"
    plain: Any = inspect.unwrap(getattr(function, "func", function))
    code = getattr(plain, "__code__", None) or getattr(type(plain).__call__, "__code__", None)
    if code is None:
        return f"a {type(function).__name__}"
    return f"{Path(code.co_filename).name}, line {code.co_firstlineno}"


def collect_rows(rows: Iterable[Mapping[str, Any]]) -> tuple[dict[str, Problem], int]:
    """Return prompt -> its problem, and how many rows repeat a prompt: the first one counts.

    Raises:
        UsageError: a row without a prompt, with a prompt of another form or with other columns
            than the first, or with a column that TRL does not give to functions.
    """
    result: dict[str, Problem] = {}
    columns: set[str] | None = None
    is_chat = False
    number = -1
    for number, row in enumerate(rows):
        prompt: Any = row.get("prompt")
        rest = {name: value for name, value in row.items() if name != "prompt"}
        if columns is None:
            columns, is_chat = set(rest), isinstance(prompt, list | tuple)
        turns = _read_messages(prompt, number) if is_chat else []
        if not is_chat and (not isinstance(prompt, str) or not prompt):
            raise UsageError(
                f"rows(): row {number} has no text as its `prompt`\n    fix: give every row a "
                "text, or every row a list of messages"
            )
        if set(rest) != columns:
            raise UsageError(
                f"rows(): row {number} has the columns {sorted(rest)}, and the "
                f"first one {sorted(columns)}"
            )
        if taken := sorted(columns.intersection(RESERVED)):
            raise UsageError(
                f"rows(): row {number} has the column {taken[0]}, a keyword that TRL sets itself, "
                f"so no function would get it\n    fix: give the column another name"
            )
        text = "\n\n".join(f"{one['role']}: {one['content']}" for one in turns) or prompt
        result.setdefault(text, Problem(text, "own", rest, turns))
    return result, number + 1 - len(result)


def _read_messages(prompt: Any, number: int) -> list[dict[str, str]]:
    """Return a prompt in TRL's conversational form, which ends before the policy's turn."""
    messages: list[Any] = list(prompt) if isinstance(prompt, list | tuple) else []
    for one in messages:
        if not isinstance(one, Mapping) or not all(
            isinstance(cast("Any", one).get(key), str) for key in ("role", "content")
        ):
            break
    else:
        if messages and messages[-1]["role"] != "assistant":
            return [dict(one) for one in messages]
    raise UsageError(
        f"rows(): the prompt of row {number} is no list of messages that ends before the policy's "
        f"turn: {_shorten(prompt)}\n    fix: give every row such a list, of mappings with the "
        "texts `role` and `content`, or every row a text"
    )


def choose_row_split(prompt: str) -> str:
    """Return the split of a row."""
    per_cent = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:4], "big") % 100
    return next(split for split, share in SHARES.items() if per_cent in share)
