"""What a process keeps between trials: the task with its sandbox, the policy, tokenized prompts.

A reused process then starts a trial in milliseconds. Nothing here changes during a trial: the
policy is copied before it is trained, so results are bitwise equal whether or not a trial came
before.
"""

from __future__ import annotations

import atexit
import copy
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gdpo_tune import registry
from gdpo_tune.policies.load import load_policy
from gdpo_tune.tasks.base import Problem, Split, Task
from gdpo_tune.training.evaluation import HeldOut
from gdpo_tune.trials import TrainingSettings, TrialConfig

_PROBLEM_SEED = 0
"""Prompts are those of the sweep, not of the trial: every trial and every night sees the same."""
_COPIED_PARAMETERS = 50_000_000
"""A larger policy is loaded again for each trial instead of being kept twice in memory."""


@dataclass
class Warm:
    """The state for trials of one task, policy and training settings."""

    policy: str
    settings: TrainingSettings
    task: Task
    tokenizer: PreTrainedTokenizerBase
    pristine: PreTrainedModel | None
    _train_problems: list[Problem] = field(default_factory=list[Problem])
    _splits: dict[str, HeldOut] = field(default_factory=dict[str, HeldOut])

    def fresh_policy(self) -> PreTrainedModel:
        """The untrained policy, the caller's to change."""
        if self.pristine is None:
            return load_policy(self.policy)[0]
        if self.pristine.num_parameters() <= _COPIED_PARAMETERS:
            return copy.deepcopy(self.pristine)
        model, self.pristine = self.pristine, None
        return model

    def train_problems(self) -> list[Problem]:
        """The training prompts that the settings ask for."""
        if not self._train_problems:
            count = self.settings.train_prompts
            self._train_problems = self.task.problems("train", count, _PROBLEM_SEED)
        return self._train_problems

    def validation(self) -> HeldOut:
        """What the search sees."""
        return self._split("validation", self.settings.validation_prompts)

    def test(self) -> HeldOut:
        """What the front is claimed on."""
        return self._split("test", self.settings.test_prompts)

    def _split(self, split: Split, count: int) -> HeldOut:
        if split not in self._splits:
            problems = self.task.problems(split, count, _PROBLEM_SEED)
            tokenize: Any = self.tokenizer
            prompts = tokenize([problem.prompt for problem in problems])["input_ids"]
            self._splits[split] = HeldOut(split, problems, prompts)
        return self._splits[split]


_kept: tuple[tuple[str, str, TrainingSettings], Warm] | None = None


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
    key = (config.task, config.policy, config.training)
    if _kept is None or _kept[0] != key:
        release()
        model, tokenizer = load_policy(config.policy)
        task: Task = registry.load(registry.TASKS[config.task].target)(config.training)
        _kept = (key, Warm(config.policy, config.training, task, tokenizer, model))
    return _kept[1]


atexit.register(release)
