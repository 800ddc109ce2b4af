"""Cache of a worker process, which later trials reuse.

A trial changes nothing here: it trains a copy of the policy. So its results are bitwise equal in a
fresh and in a reused process.
"""

from __future__ import annotations

import atexit
import copy
import functools
import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gdpo_tune.core import task_files
from gdpo_tune.core.errors import DataError
from gdpo_tune.core.task_info import PROBLEM_SEED
from gdpo_tune.core.text import join_turns
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.core.trials import PROMPTS_LEFT_OUT
from gdpo_tune.policies.adapters import hash_policy, save_initial_policy
from gdpo_tune.policies.load_policy import load_policy, read_position_limit, restore_base_files
from gdpo_tune.policies.prompt_choice import choose_prompt_format
from gdpo_tune.policies.prompt_format import PromptFormat
from gdpo_tune.tasks.base import Problem, Split, Task
from gdpo_tune.tasks.data_rows import LARGEST_SHARE_LEFT_OUT
from gdpo_tune.training.trl_arguments import choose_weights_dtype

_LOGGER = logging.getLogger("gdpo_tune.training")
_COPIED_PARAMETERS = 50_000_000
"""A larger policy is loaded again for each trial instead of being kept twice in memory."""


@dataclass(frozen=True)
class ProblemSet:
    """Problems of one split, with their prompts as the policy reads them."""

    problems: Sequence[Problem]
    prompts: Sequence[Sequence[int]]
    """P tokenized prompts."""


@dataclass
class WorkerCache:
    """Task with its sandbox, policy, and tokenized prompts, for trials that agree in them."""

    config: TrialConfig
    """Config of the first trial."""
    task: Task
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptFormat
    pristine: PreTrainedModel | None
    """The untrained policy; None: a trial took it, because it is too large to copy."""
    initial: str = ""
    """Digest of the untrained policy, as checkpoints record it."""
    decoding: Any = None
    """Generation config by which policies are judged, as checkpoints record it."""
    is_read_back: bool = False
    """True once a trial has shown that what it writes is what it trains."""
    shared: dict[str, object] = field(default_factory=dict[str, object])
    """`list_shared_settings` of the first trial, in which all others agree."""
    left_out: dict[str, str] = field(default_factory=dict[str, str])
    """`prompts_left_out.<split>` -> how many prompts were too long."""
    _splits: dict[Split, ProblemSet] = field(default_factory=dict[Split, ProblemSet])

    def take_policy(self) -> PreTrainedModel:
        """Return an untrained policy that the caller may train."""
        if self.pristine is None:
            return load_initial_policy(self.config)[0]
        if self.pristine.num_parameters() <= _COPIED_PARAMETERS:
            return copy.deepcopy(self.pristine)
        model, self.pristine = self.pristine, None
        return model

    def encode_prompts(self, prompts: Sequence[Any]) -> list[list[int]]:
        """Return the tokens of training prompts, by the texts or turns of their problems."""
        return [list(self._training_prompts[text]) for text in map(join_turns, prompts)]

    @functools.cached_property
    def _training_prompts(self) -> dict[str, Sequence[int]]:
        train = self.load_split("train")
        texts = (problem.prompt for problem in train.problems)
        return dict(zip(texts, train.prompts, strict=True))

    @property
    def environment(self) -> dict[str, str]:
        """Provenance of the task, and the number of prompts left out of the splits in use."""
        return {**self.task.environment(), **self.left_out}

    def save_format(self, directory: Path) -> None:
        """Record in a trained policy's directory its prompts, decoding, initial policy and form."""
        self.prompts.save(directory)
        dtype = str(choose_weights_dtype(self.config)).removeprefix("torch.")
        save_initial_policy(directory, self.initial, dtype)
        self.decoding.save_pretrained(directory)
        restore_base_files(directory, self.config.policy, self.config.model.revision)

    def load_split(self, split: Split) -> ProblemSet:
        """Load the problems of a split whose prompts are short enough.

        Raises:
            DataError: more than half of the prompts are too long.
        """
        if split in self._splits:
            return self._splits[split]
        count: int = getattr(self.config.training, f"{split}_prompts")
        problems = self.task.problems(split, count, PROBLEM_SEED)
        prompts = self.prompts.encode([problem.turns or problem.prompt for problem in problems])
        limit, fix = self.config.data.max_prompt_length, "raise data.max_prompt_length"
        bound = f"data.max_prompt_length = {limit}"
        positions = read_position_limit(self.config.policy, self.config.model.revision)
        # A turn after answers of tools may be as long again, before it is cut.
        longest = self.config.training.max_completion_length * (2 if self.prompts.tools else 1)
        if positions and positions - longest < limit:
            limit = positions - longest
            bound = f"the {limit} that {positions} positions of the policy leave for a prompt"
            fix = "lower training.max_completion_length"
        short = [row for row, prompt in enumerate(prompts) if len(prompt) <= limit]
        left_out = count - len(short)
        if left_out > LARGEST_SHARE_LEFT_OUT * count:
            longest = max(map(len, prompts))
            raise DataError(
                f"{left_out} of {count} {split} prompts have more tokens than {bound}, the longest "
                f"has {longest}: {fix}, or use data with shorter prompts"
            )
        if left_out:
            self.left_out[f"{PROMPTS_LEFT_OUT}{split}"] = f"{left_out} of {count}"
            _LOGGER.warning(
                "%d of %d %s prompts are left out: more tokens than %s",
                *(left_out, count, split, bound),
            )
        chosen = ProblemSet([problems[row] for row in short], [prompts[row] for row in short])
        self._splits[split] = chosen
        return chosen


_cache: WorkerCache | None = None


def list_shared_settings(config: TrialConfig) -> dict[str, object]:
    """Return what trials that share a cache have in common, by its name in a sweep file."""
    rewards = tuple(task_files.load_task_info(config.task, config.params).rewards)
    names = ("task", "policy", "start", "training", "sandbox", "data", "model", "scoring")
    return {"rewards": rewards, **{name: getattr(config, name) for name in names}}


def build_worker_cache(config: TrialConfig) -> WorkerCache:
    """Build a cache for a trial and for those that agree with it."""
    model, tokenizer = load_initial_policy(config)
    task: Task = task_files.build_task(
        config.task, config.training, config.sandbox, config.data, config.params, config.scoring
    )
    tools = getattr(task, "tool_format", None)
    prompts = choose_prompt_format(config.policy, tokenizer, task.instructions, config.model, tools)
    return WorkerCache(
        config=config,
        task=task,
        tokenizer=tokenizer,
        prompts=prompts,
        pristine=model,
        initial=hash_policy(model),
        decoding=copy.deepcopy(model.generation_config),
        shared=list_shared_settings(config),
    )


@contextmanager
def open_worker_cache(config: TrialConfig) -> Generator[WorkerCache]:
    """Yield the process's cache for this trial, built if there is none that fits.

    Any exception in the block, an exit included, closes it, because a batch may have been in the
    sandbox at that moment. Otherwise it stays for the next trial.
    """
    global _cache
    if _cache is None or _cache.shared != list_shared_settings(config):
        release_worker_cache()
        _cache = build_worker_cache(config)
    _cache.task.directory = config.directory
    try:
        yield _cache
    except BaseException:
        release_worker_cache()
        raise


def release_worker_cache() -> None:
    """Close the process's cache, if there is one."""
    global _cache
    if _cache is not None:
        closing, _cache = _cache, None
        closing.task.close()


def load_initial_policy(config: TrialConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the policy at which a trial begins, and its tokenizer."""
    return load_policy(
        config.policy,
        choose_weights_dtype(config),
        config.model.revision,
        dropout=config.model.dropout,
        temperature=config.training.evaluation_temperature,
        weights=config.start,
        attention=config.model.attention,
    )


atexit.register(release_worker_cache)
