"""What a process keeps between trials: the task with its sandbox, the policy, tokenized prompts.

A reused process then starts a trial in milliseconds. Nothing here changes during a trial: the
policy is copied before it is trained, so results are bitwise equal whether or not a trial came
before.
"""

from __future__ import annotations

import atexit
import copy
import logging
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gdpo_tune.core import task_files
from gdpo_tune.core.errors import DataError
from gdpo_tune.core.settings import DataSettings, ModelSettings, SandboxSettings, TrainingSettings
from gdpo_tune.core.trials import LEFT_OUT, TrialConfig
from gdpo_tune.policies.load_policy import load_policy
from gdpo_tune.policies.prompts import PromptFormat, prompt_format
from gdpo_tune.tasks.base import Problem, Split, Task
from gdpo_tune.training.evaluation import HeldOut
from gdpo_tune.training.trl_arguments import weights_type

_LOGGER = logging.getLogger("gdpo_tune.training")
_PROBLEM_SEED = 0
"""Prompts are those of the sweep, not of the trial: every trial and every night sees the same."""
_COPIED_PARAMETERS = 50_000_000
"""A larger policy is loaded again for each trial instead of being kept twice in memory."""
LARGEST_SHARE_LEFT_OUT = 0.5
"""With more prompts too long than this share, what is trained on is not what was asked for."""


@dataclass
class Warm:
    """The state for trials of one task, policy and settings."""

    policy: str
    settings: TrainingSettings
    data: DataSettings
    model: ModelSettings
    task: Task
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptFormat
    """How the policy is given a prompt, in training and held-out evaluation alike."""
    pristine: PreTrainedModel | None
    _train_problems: list[Problem] = field(default_factory=list[Problem])
    _splits: dict[str, HeldOut] = field(default_factory=dict[str, HeldOut])
    _left_out: dict[str, str] = field(default_factory=dict[str, str])

    def fresh_policy(self) -> PreTrainedModel:
        """The untrained policy, the caller's to change."""
        if self.pristine is None:
            return _load(self.policy, self.model)[0]
        if self.pristine.num_parameters() <= _COPIED_PARAMETERS:
            return copy.deepcopy(self.pristine)
        model, self.pristine = self.pristine, None
        return model

    def train_problems(self) -> list[Problem]:
        """The training prompts that the settings ask for."""
        if not self._train_problems:
            self._train_problems, _ = self._prompts("train", self.settings.train_prompts)
        return self._train_problems

    def validation(self) -> HeldOut:
        """What the search sees."""
        return self._split("validation", self.settings.validation_prompts)

    def test(self) -> HeldOut:
        """What the front is claimed on."""
        return self._split("test", self.settings.test_prompts)

    def environment(self) -> dict[str, str]:
        """What the task says of itself, and which splits lack prompts, as far as they were used."""
        return {**self.task.environment(), **self._left_out}

    def _split(self, split: Split, count: int) -> HeldOut:
        if split not in self._splits:
            self._splits[split] = HeldOut(split, *self._prompts(split, count))
        return self._splits[split]

    def _prompts(self, split: Split, count: int) -> tuple[list[Problem], list[list[int]]]:
        """Problems of a split whose prompts are short enough, and these prompts, tokenized.

        Raises:
            DataError: more than half of the prompts are too long.
        """
        problems = self.task.problems(split, count, _PROBLEM_SEED)
        prompts = self.prompts.encode([problem.prompt for problem in problems])
        limit = self.data.max_prompt_length
        short = [row for row, prompt in enumerate(prompts) if len(prompt) <= limit]
        left_out = count - len(short)
        if left_out > LARGEST_SHARE_LEFT_OUT * count:
            longest = max(map(len, prompts))
            raise DataError(
                f"{left_out} of {count} {split} prompts have more tokens than "
                f"data.max_prompt_length = {limit}, the longest has {longest}: raise "
                "data.max_prompt_length, or use data with shorter prompts"
            )
        if left_out:
            self._left_out[f"{LEFT_OUT}{split}"] = f"{left_out} of {count}"
            _LOGGER.warning(
                "%d of %d %s prompts are left out: they have more than data.max_prompt_length = %d "
                "tokens",
                *(left_out, count, split, limit),
            )
        return [problems[row] for row in short], [prompts[row] for row in short]


_Key = tuple[
    str, str, TrainingSettings, SandboxSettings, DataSettings, ModelSettings, tuple[str, ...]
]
_kept: tuple[_Key, Warm] | None = None


@contextmanager
def warm(config: TrialConfig) -> Generator[Warm]:
    """The process's state for this trial, made if it is missing or of another kind.

    It outlives a trial that ends well. Whatever else ends the block, an exit included, closes it,
    because a batch may have been in the sandbox at that moment.

    Raises:
        PolicyError, SandboxUnavailable: the policy or the task cannot be had.
    """
    state = _acquire(config)
    finished = False
    try:
        yield state
        finished = True
    finally:
        if not finished:
            release()


def release() -> None:
    """Close what is kept, if anything."""
    global _kept
    if _kept is not None:
        _, state = _kept
        _kept = None
        state.task.close()


def _acquire(config: TrialConfig) -> Warm:
    global _kept
    key = (
        *(config.task, config.policy, config.training),
        *(config.sandbox, config.data, config.model),
        tuple(task_files.task_info(config.task, config.params).rewards),
    )
    if _kept is None or _kept[0] != key:
        release()
        model, tokenizer = _load(config.policy, config.model)
        task: Task = task_files.build_task(
            config.task, config.training, config.sandbox, config.data, config.params
        )
        wanted = config.model.instructions
        prompts = prompt_format(config.policy, tokenizer, task.instructions, wanted)
        state = Warm(
            config.policy,
            config.training,
            config.data,
            config.model,
            task,
            tokenizer,
            prompts,
            model,
        )
        _kept = (key, state)
    return _kept[1]


def _load(policy: str, settings: ModelSettings) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return load_policy(policy, weights_type(settings), settings.revision)


atexit.register(release)
