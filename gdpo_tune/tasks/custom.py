"""Tasks made of reward functions as TRL takes them: derive from `RewardFunctionTask`.

    class Sums(RewardFunctionTask):
        reward_funcs = [rewards.answer, rewards.length]

        def rows(self):
            return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in R for b in R]

A reward function is called with TRL's keywords: `prompts`, `completions`, `completion_ids`,
`trainer_state`, `log_metric`, `log_extra` and every column of the rows, a list of N each; and with
`lengths`, the tokens of each completion, `length_limit` and `sandbox_settings`. It returns N
numbers, or None for a completion that it does not score; it may be async. Those of
`gdpo_tune.rewards` know their ranges. A text instead of a function names a reward model: a Hub id
or a directory.

With `tools`, which the policy calls between its turns, completions are lists of messages, and
`lengths` count the policy's own tokens.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import os
import random
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple, Self, cast, get_args

from gdpo_tune.core import errors
from gdpo_tune.core.errors import GdpoTuneError, TrialFailure, UsageError, get_first_line
from gdpo_tune.core.settings import DataSettings, SandboxSettings, TrainingSettings
from gdpo_tune.core.system import CloseableResource
from gdpo_tune.core.task_files import describe_task_error
from gdpo_tune.core.text import join_turns
from gdpo_tune.core.trials import Direction
from gdpo_tune.tasks.base import (
    EvaluationFunction,
    Problem,
    RewardFunction,
    Split,
    read_reward_values,
)
from gdpo_tune.tasks.columns import SURROGATE
from gdpo_tune.tasks.generation import choose_row_split
from gdpo_tune.tasks.judge import Judge
from gdpo_tune.tasks.text_rewards import RangedReward

MEAN_LENGTH = "mean_length"
NOT_READ = {
    "metrics": "every reward is a metric: write it as a reward function, and give that weight 0 in "
    "space.reward_weights if it shall only be measured",
    "rewards": "rewards have the names of reward_funcs: write a mapping of names to functions",
    "environment_factory": "no call keeps a state: write its methods as functions in `tools`",
}
"""Attribute that a class may not set -> the reason and what to do."""
TURN_METRICS = ("turns", "tool_calls", "tool_errors", "tool_tokens")
"""Metrics of tasks with tools: turns and calls of the policy, those of its calls that raised, and
the tokens that tools wrote, of a completion."""
TOOL_ERROR = "{'error':"
"""Beginning of the turn in which TRL tells the policy that its call raised."""
RESERVED = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")
"""Keywords that TRL sets itself: it drops a column of such a name, or raises for it."""


class RewardFunctionTask(CloseableResource):
    """A task whose rewards are functions; each of them is also a held-out metric."""

    reward_funcs: ClassVar[Sequence[RewardFunction | str] | Mapping[str, RewardFunction | str]] = ()
    """Functions, or reward models by Hub id or directory; or a mapping of names to these."""
    evaluations: ClassVar[Mapping[str, EvaluationFunction]] = {}
    """Name of a metric -> function that measures the policy itself, such as a benchmark."""
    ranges: ClassVar[Mapping[str, tuple[float, float]]] = {}
    """Name of a reward -> lowest and highest value, where they are known. Functions that
    `gdpo_tune.rewards.reward` makes bring their own."""
    directions: ClassVar[Mapping[str, Direction]] = {}
    """Metric -> the better direction; `maximize` if it is not here, `minimize` for mean_length."""
    instructions: str = ""
    """The format in words, for a policy that does not know it."""
    time_limit: ClassVar[float | None] = None
    """Seconds that a function may take for a batch, 600 if None; a tenth for a completion alone."""
    most_failed: ClassVar[float] = 0.1
    """Share of a batch on which a function may raise, after completions were tried alone. 0: none,
    and a function that raises is called for the whole batch again, never for one alone."""
    tools: ClassVar[Sequence[Callable[..., Any]]] = ()
    """Functions that the policy may call, with types and docstrings as Transformers reads them."""
    tool_time_limit: ClassVar[float] = 10.0
    """Seconds that one call of a tool may take."""
    chat_template: ClassVar[str] = ""
    """Chat template of a task with tools, in place of the policy's own."""
    response_template: ClassVar[Mapping[str, Any] | None] = None
    """How Transformers reads calls in a turn of the policy; TRL knows it for common templates."""
    rewards: ClassVar[tuple[str, ...]] = ()
    """Names of the functions, in their order."""
    _named: ClassVar[tuple[tuple[str, RewardFunction | str], ...]] = ()
    places: ClassVar[Mapping[str, str]] = {}
    """Name of a function -> its file and line."""
    metrics: ClassVar[tuple[str, ...]] = (MEAN_LENGTH,)
    """The rewards, the mean length of a completion in tokens, `TURN_METRICS` with tools, and the
    evaluations."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for name in NOT_READ.keys() & vars(cls).keys():
            raise UsageError(f"{cls.__name__}.{name} is not read: {NOT_READ[name]}")
        funcs = cls.reward_funcs
        is_named = isinstance(funcs, Mapping)
        named = tuple(funcs.items() if is_named else ((name_reward(f), f) for f in funcs))
        cls._named = named
        cls.rewards = tuple(name for name, _ in named)
        own = (MEAN_LENGTH, *(TURN_METRICS if cls.tools else ()))
        cls._check_tools(own)
        if taken := cls.evaluations.keys() & {*cls.rewards, *own}:
            raise UsageError(
                f"{cls.__name__}.evaluations names {min(taken)!r}, which is a metric already\n"
                "    fix: give the function another name"
            )
        for name, function in cls.evaluations.items():
            try:
                inspect.signature(function).bind(None, None, split="test", seed=0)
            except TypeError as error:
                raise UsageError(
                    f"{cls.__name__}.evaluations[{name!r}] ({locate_function(function)}): {error}"
                    f"\n    fix: write def {name}(policy, tokenizer, split, seed)"
                ) from error
        measured = [*named, *cls.evaluations.items()]
        cls.places = {name: locate_function(function) for name, function in measured}
        cls.metrics = (*cls.rewards, *own, *cls.evaluations)
        cls.judges = tuple(name for name, function in named if isinstance(function, Judge))
        known = {n: (f.low, f.high) for n, f in named if isinstance(f, RangedReward | Judge)}
        cls.ranges = {**dict.fromkeys(own, (0.0, float("inf"))), **known, **cls.ranges}
        cls.directions = {**dict.fromkeys(own, "minimize"), **cls.directions}

    @classmethod
    def _check_tools(cls, metrics: Sequence[str]) -> None:
        limit: Any = cls.tool_time_limit
        tools: Any = cls.tools
        names, reason = [getattr(tool, "__name__", "") for tool in tools], ""
        if not isinstance(tools, Sequence) or not all(names) or len({*names}) < len(names):
            reason = "tools has to be a list of functions with different names"
        elif not (isinstance(limit, int | float) and limit > 0):
            reason = f"tool_time_limit = {limit!r} has to be seconds above 0"
        elif not cls.tools and (cls.chat_template or cls.response_template):
            reason = "chat_template and response_template are read with tools alone: remove them"
        elif cls.tools and (taken := {*metrics} & {*cls.rewards}):
            reason = f"the reward {min(taken)} has the name of a metric of tasks with tools"
        if reason:
            raise UsageError(f"{cls.__name__}: {reason}")

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
        self.repeated_rows = 0
        """Rows left out because an earlier one has their prompt."""
        self._functions: dict[str, RewardFunction] = {}
        self._runner = asyncio.Runner()

    def rows(self) -> Iterable[Mapping[str, Any]]:
        """Return every row: its `prompt`, and the columns that the functions want.

        A prompt is a text, or in all rows a list of messages with `role` and `content`. It alone
        decides whether a row is for training, validation or test.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method rows()")

    def problems(self, split: Split, count: int, seed: int) -> list[Problem]:
        """Return `count` rows of a split, in an order that the seed decides.

        Raises:
            UsageError: the split has fewer.
        """
        self._check_size({split: count})
        return random.Random(f"{seed}/{split}").sample(self._splits[split], count)

    def _check_size(self, wanted: Mapping[Split, int]) -> None:
        few = {split: n for split, n in wanted.items() if n > len(self._splits[split])}
        if not few:
            return
        found = {split: len(self._splits[split]) for split in few}
        has = ", ".join(f"{found[split]} of {n} {split} prompts" for split, n in few.items())
        words = [f"--set training.{split}_prompts={n}" for split, n in found.items()]
        fix = f"{' '.join(words)}, or " if all(found.values()) else ""
        raise UsageError(
            f"{type(self).__name__} has {has}\n    fix: {fix}more rows: a hash of the prompts "
            "gives training 80 per cent, the others 10 each"
        )

    def environment(self) -> dict[str, str]:
        """Return how many rows were left out; nothing else is known of the task."""
        if not self.repeated_rows:
            return {}
        return {"rows_left_out": f"{self.repeated_rows}, whose prompt an earlier row has"}

    def close(self) -> None:
        """Forget the reward models."""
        self._functions.clear()
        self._runner.close()

    def __enter__(self) -> Self:
        """Refuse splits that are too small, before a sweep starts."""
        splits: tuple[Split, ...] = ("train", "validation", "test")
        self._check_size({split: getattr(self.settings, f"{split}_prompts") for split in splits})
        return self

    def load_functions(self, directory: Path | None, seconds: float) -> None:
        """Load the reward models, if they are not loaded yet; give judges their limits."""
        for name, function in self._named:
            if isinstance(function, Judge):
                function.open(name, directory, seconds)
            if name not in self._functions:
                is_model = isinstance(function, str)
                self._functions[name] = RewardModel(function) if is_model else function

    def call_function(self, name: str, batch: RewardBatch) -> CallResult:
        """Call one function, which may change the batch; `load_functions` comes first.

        Raises:
            CallError: it raised.
            TrialFailure: it returned another number of values, or what is no number.
        """
        count, function = len(batch.completions), self._functions[name]
        logged: list[tuple[str, float]] = []
        columns: dict[str, list[Any]] = {}

        def log_metric(metric: str, value: float) -> None:
            if not re.fullmatch(r"[\w\-. :/]+", metric):  # MLflow takes no others
                raise ValueError(f"log_metric({metric!r}): a name has letters, digits and -_. :/")
            logged.append((metric, float(value)))

        def log_extra(column: str, values: Sequence[Any]) -> None:
            if len(values) != count:
                raise ValueError(f"log_extra({column!r}): {len(values)} values for {count} texts")
            columns[column] = [v if isinstance(v, int | float | None) else str(v) for v in values]

        failures: dict[int, str] = {}
        keywords = {
            "log_failure": failures.__setitem__,
            "log_metric": log_metric,
            "log_extra": log_extra,
            "length_limit": [self.settings.length_limit] * count,
            "sandbox_settings": self.sandbox,
            **_build_keywords(batch),
        }
        try:
            accepted = inspect.signature(function).parameters
            if all(one.kind is not one.VAR_KEYWORD for one in accepted.values()):
                keywords = {k: v for k, v in keywords.items() if k in accepted}
            returned = function(**keywords)
            if inspect.iscoroutine(returned):
                returned = self._runner.run(returned)
            values = read_reward_values(returned, count, f"reward {name} ({self.places[name]})")
        except (errors.DiskFullError, TrialFailure):
            raise
        except BaseException as error:  # a user's function may raise anything
            raise CallError(describe_task_error(error)) from error
        return CallResult(values, logged, columns, failures)

    def describe_tools(self) -> list[dict[str, Any]]:
        """Return the JSON schema of each tool, as a chat template takes it.

        Raises:
            UsageError: a tool lacks a docstring or types.
        """
        from transformers.utils.chat_template_utils import get_json_schema  # late: a second

        schemas: list[dict[str, Any]] = []
        for tool in self.tools:
            try:
                schemas.append(get_json_schema(tool))
                named = schemas[-1]["function"]["parameters"]["properties"]
                inspect.signature(tool).bind(**named)  # as each call does
            except Exception as error:  # of several types, for a docstring or types
                raise UsageError(
                    f"tool {tool.__name__} ({locate_function(tool)}): {get_first_line(error)}\n"
                    "    fix: give each argument a name, a type and a line under `Args:`"
                ) from error
        return schemas

    def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool, and return the text that the policy reads.

        Raises:
            CallError: it raised; the message is that of the error, as TRL tells it.
        """
        tool = next(tool for tool in self.tools if tool.__name__ == name)
        try:
            returned = tool(**arguments)
            if inspect.iscoroutine(returned):
                returned = self._runner.run(returned)
            return str(returned)
        except BaseException as error:  # a user's function may raise anything
            raise CallError(str(error)) from error

    @functools.cached_property
    def _splits(self) -> dict[str, list[Problem]]:
        splits: dict[str, list[Problem]] = {name: [] for name in get_args(Split)}
        rows = list(self.rows() or ())  # None, if a `return` is missing
        problems = collect_rows(rows, are_chats=bool(self.tools))
        self.repeated_rows = len(rows) - len(problems)
        for prompt, problem in problems.items():
            splits[choose_row_split(prompt)].append(problem)
        return splits


class RewardModel:
    """A reward model by Hub id or directory, read as TRL does: the logit of `prompt + completion`.

    Raises:
        UsageError: there is no such model, or its tokenizer cannot pad.
    """

    def __init__(self, name: str) -> None:
        import torch  # late: few tasks have a reward model
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        try:
            loaded: Any = AutoModelForSequenceClassification.from_pretrained(
                name, num_labels=1, output_loading_info=True
            )
            self._tokenizer: Any = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError, RuntimeError) as error:
            reason = get_first_line(error)
            raise UsageError(f"reward model {name} cannot be loaded: {reason}") from error
        self._model, report = loaded
        if missing := sorted(map(str, report["missing_keys"])):
            # They would be drawn at random, as trl#1379 has it.
            raise UsageError(
                f"reward model {name} lacks trained weights: {', '.join(missing)}\n    fix: name a "
                "classifier with one output, saved with its head, not a language model"
            )
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        if self._tokenizer.pad_token is None:
            raise UsageError(f"the tokenizer of reward model {name} has no pad or end token")
        self._model.config.pad_token_id = self._tokenizer.pad_token_id
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
        self._model.to(device).eval()

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
        """Return N rewards; conversations are read in the template of the reward model."""
        texts = [prompt + text for prompt, text in zip(prompts, completions, strict=True)]
        if not isinstance(prompts[0], str):
            texts = [self._tokenizer.apply_chat_template(turns, tokenize=False) for turns in texts]
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


class RewardBatch(NamedTuple):
    """N completions to score."""

    problems: Sequence[Any]
    """`Problem`s; on their way to another process as pickles, of which each makes a new copy."""
    completions: Sequence[Any]
    """Texts; of a task with tools messages, of which `lengths` has the policy's tokens."""
    lengths: Sequence[int]
    completion_ids: Sequence[Sequence[int]] | None
    trainer_state: Mapping[str, Any]

    def take(self, row: int) -> RewardBatch:
        """Return a batch of one completion."""
        ids = None if self.completion_ids is None else [self.completion_ids[row]]
        text, length = self.completions[row], self.lengths[row]
        return RewardBatch([self.problems[row]], [text], [length], ids, self.trainer_state)


class CallResult(NamedTuple):
    """Rewards that one function gave N completions, and what it logged."""

    values: list[float | None]
    logged: list[tuple[str, float]]
    columns: dict[str, list[Any]]
    failures: dict[int, str]
    """Row that the function itself said that it could not score -> the reason."""


class CallError(GdpoTuneError):
    """A reward function that raised; the message is the last line of its traceback."""


class _TrainerState(SimpleNamespace):
    """TRL's `trainer_state` as far as it is known."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"trainer_state.{name} is not known here: outside the steps of a training there are "
            "global_step and max_steps at most (docs/own_task.md)"
        )


class _UnknownIds(Sequence[Any]):
    """TRL's `completion_ids` where they are not known: any use raises."""

    def __getitem__(self, index: Any) -> Any:
        raise TypeError("completion_ids are not known here: these texts come from no policy")

    def __len__(self) -> int:
        return self[0]


def _build_keywords(batch: RewardBatch) -> dict[str, Any]:
    """Return the keywords of a call; a column wins over `lengths`."""
    problems, texts, ids = batch.problems, batch.completions, batch.completion_ids
    is_chat = bool(problems[0].turns)
    return {
        "prompts": [one.turns if is_chat else one.prompt for one in problems],
        "completions": ([_list_messages(text) for text in texts] if is_chat else list(texts)),
        "completion_ids": _UnknownIds() if ids is None else [list(each) for each in ids],
        "trainer_state": _TrainerState(**batch.trainer_state),
        "lengths": list(batch.lengths),
        **{name: [one.data[name] for one in problems] for name in problems[0].data},
    }


def _list_messages(completion: Any) -> list[dict[str, Any]]:
    """Return a completion as messages; a text is one of the policy."""
    if isinstance(completion, str):
        return [{"role": "assistant", "content": completion}]
    return copy.deepcopy(completion)


def measure_turns(batch: RewardBatch) -> dict[str, list[float]]:
    """Return the values of `TURN_METRICS` for N completions; calls count if answered or not."""
    columns: list[list[float]] = [[] for _ in TURN_METRICS]
    for row, (completion, length) in enumerate(zip(batch.completions, batch.lengths, strict=True)):
        messages = _list_messages(completion)
        own = [one for one in messages if one["role"] == "assistant"]
        answers = [one["content"] for one in messages if one["role"] == "tool"]
        columns[0].append(len(own))
        columns[1].append(sum(len(one.get("tool_calls") or ()) for one in own))
        columns[2].append(sum(text.startswith(TOOL_ERROR) for text in answers))
        columns[3].append(len(batch.completion_ids[row]) - length if batch.completion_ids else 0)
    return {n: list(map(float, c)) for n, c in zip(TURN_METRICS, columns, strict=True)}


def name_reward(function: RewardFunction | str) -> str:
    """Return a function's name, or the last part of a model's with `_` for other signs."""
    if isinstance(function, str):
        return re.sub(r"\W", "_", Path(function).name)
    return getattr(function, "__name__", type(function).__name__)


def locate_function(function: RewardFunction | str) -> str:
    """Return a function's file and line."""
    if isinstance(function, str):
        return "a reward model"
    if isinstance(function, Judge):
        return function.place
    plain: Any = inspect.unwrap(getattr(function, "func", function))
    code = getattr(plain, "__code__", None) or getattr(type(plain).__call__, "__code__", None)
    if code is None:
        return f"a {type(function).__name__}"
    return f"{Path(code.co_filename).name}, line {code.co_firstlineno}"


def collect_rows(rows: Iterable[Any], *, are_chats: bool = False) -> dict[str, Problem]:
    """Return prompt -> its problem; of rows with the same prompt the first one counts.

    With `are_chats`, a text is a conversation of one turn of a user.

    Raises:
        UsageError: a row without a prompt, with a prompt of another form or with other columns
            than the first, or with a column that TRL does not give to functions.
    """
    result: dict[str, Problem] = {}
    columns: set[str] | None = None
    is_chat = False
    for number, row in enumerate(rows):
        names: Any = row if isinstance(row, Mapping) else [None]
        if not all(isinstance(name, str) for name in names):
            shown = reprlib.repr(row)
            raise UsageError(
                f"rows(): row {number} is no mapping of the names of columns to values: {shown}"
                '\n    fix: give every row as {"prompt": ..., "column": ...}'
            )
        prompt: Any = row.get("prompt")
        rest = {name: value for name, value in row.items() if name != "prompt"}
        if columns is None:
            columns, is_chat = set(rest), not isinstance(prompt, str)
        is_usable = is_open_conversation(prompt) if is_chat else _is_text(prompt)
        reason = ""
        if "prompt" not in row:
            reason = f"has no prompt, only {sorted(rest)}"
        elif not is_usable or not prompt:
            reason = (
                "has a prompt that is neither a text that UTF-8 can write nor a list of messages "
                "that ends before the "
                f"policy's turn, or unlike row 0: {reprlib.repr(prompt)}\n    fix: give every row "
                "a text, or every row such a list, of mappings with the texts `role`, `content`"
            )
        elif set(rest) != columns:
            reason = f"has the columns {sorted(rest)}, and the first one {sorted(columns)}"
        elif taken := sorted(columns.intersection(RESERVED)):
            reason = (
                f"has the column {taken[0]}, a keyword that TRL sets itself, so no function would "
                "get it\n    fix: give the column another name"
            )
        turns = [dict(one) for one in prompt] if is_chat and not reason else []
        has_calls = any(one["role"] == "tool" or one.get("tool_calls") for one in turns)
        if has_calls or "tools" in rest:
            reason = (
                f"has {'turns of tools' if has_calls else 'the column tools'}, but a row is what "
                "stands before the policy's first turn\n    fix: give functions as `tools` of the "
                "class, or write what the policy may know into the text of its prompt"
            )
        if reason:
            raise UsageError(f"rows(): row {number} {reason}")
        if are_chats and not turns:
            turns = [{"role": "user", "content": prompt}]
        text = join_turns(turns) if turns else prompt
        result.setdefault(text, Problem(text, "own", rest, turns))
    return result


def _is_text(prompt: Any) -> bool:
    return isinstance(prompt, str) and not SURROGATE.search(prompt)


def is_open_conversation(prompt: Any) -> bool:
    """Return whether a prompt is messages in TRL's form that end before the policy's turn."""
    if not isinstance(prompt, list | tuple):
        return False
    messages = cast("Sequence[Any]", prompt)
    roles = [
        one["role"]
        for one in messages
        if isinstance(one, Mapping) and all(_is_text(one.get(key)) for key in ("role", "content"))
    ]
    return 0 < len(roles) == len(messages) and roles[-1] != "assistant"
