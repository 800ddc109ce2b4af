"""Rewards of completions in an export, in the form in which each library asks for them.

An export has a copy of this module and of what it imports; its `rewards.py` has the settings of its
training.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gdpo_tune.core.parameters import build_shaping
from gdpo_tune.core.settings import DataSettings, SandboxSettings, TrainingSettings
from gdpo_tune.core.shaping import Rewards, Shaping
from gdpo_tune.core.task_files import build_task, load_task_info
from gdpo_tune.core.task_info import Scoring
from gdpo_tune.core.trials import Params
from gdpo_tune.policies.prompt_format import PromptFormat
from gdpo_tune.tasks.base import Problem


@dataclass(frozen=True, eq=False)
class RewardScorer:
    """The rewards of a training, computed and shaped as there, and their weights."""

    task: str
    """Name, or file and class."""
    training: TrainingSettings
    sandbox: SandboxSettings
    data: DataSettings
    params: Params
    scoring: Scoring
    weights: Mapping[str, float]
    """The largest is 1."""

    def score(
        self, problems: Sequence[str], completions: Sequence[str], lengths: Sequence[int]
    ) -> Rewards:
        """Return reward name -> N rewards, unweighted; None means not scored.

        `problems` are texts of the column `problem` of prompts.parquet. `completions` lack the end
        token; `lengths` are their tokens, the end token included.

        Raises:
            SandboxUnavailable: this machine offers no isolation, so no program was run.
        """
        read = [Problem(**json.loads(text)) for text in problems]
        task, shaping = _load_task(os.getpid(), self)
        scores = task.score(read, completions, lengths)
        rewards = shaping.apply(scores.rewards, lengths, scores.partial)
        return {name: rewards[name] for name in self.weights}

    def score_each(
        self, problems: Sequence[str], completions: Sequence[str], lengths: Sequence[int]
    ) -> list[Mapping[str, float | None]]:
        """Return the rewards of each of N completions by name; see `score`."""
        rewards = self.score(problems, completions, lengths)
        columns = zip(*rewards.values(), strict=True)
        return [dict(zip(rewards, values, strict=True)) for values in columns]

    def weigh(self, rewards: Mapping[str, float | None]) -> float:
        """Return the weighted sum of one completion's rewards; one not scored counts as 0."""
        return sum(weight * (rewards[name] or 0.0) for name, weight in self.weights.items())


@functools.cache
def _load_task(process: int, scorer: RewardScorer) -> tuple[Any, Shaping]:
    """Build the task of a training when it is first used, in each process: a fork has its own.

    It is not entered, because a task in a file would read its rows, which an export has not.
    """
    settings = scorer.training, scorer.sandbox, scorer.data, scorer.params, scorer.scoring
    task = build_task(scorer.task, *settings)
    atexit.register(task.close)
    info = load_task_info(scorer.task, scorer.params)
    return task, build_shaping(scorer.params, scorer.training, info)


# TRL, Axolotl and ms-swift ------------------------------------------------------------------------


def build_trl_rewards(scorer: RewardScorer) -> dict[str, Callable[..., Sequence[float | None]]]:
    """Build a function for each reward, which TRL logs by its name; a batch is scored once."""
    latest: tuple[Any, Rewards] = (None, {})
    """Batch that was scored last, which TRL passes to one function after another."""

    def score_once(completions: Sequence[Any], tokens: Any, problems: Sequence[str]) -> Rewards:
        nonlocal latest
        batch, rewards = latest  # that of another thread may follow at any time
        if batch is not completions:
            texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
            rewards = scorer.score(problems, texts, [len(ids) for ids in tokens])
            latest = completions, rewards
        return rewards

    def build(name: str) -> Callable[..., Sequence[float | None]]:
        def reward(
            completions: Sequence[Any], completion_ids: Any, problem: Sequence[str], **_: Any
        ) -> Sequence[float | None]:
            return score_once(completions, completion_ids, problem)[name]

        reward.__name__ = name
        return reward

    return {name: build(name) for name in scorer.weights}


def build_swift_rewards(scorer: RewardScorer) -> dict[str, type]:
    """Build a class for each reward, whose objects ms-swift calls and logs by its name."""

    def build(name: str, function: Callable[..., Sequence[float | None]]) -> type:
        class Reward:
            def __init__(self, args: Any = None, **_: Any) -> None:
                self.args = args

            def __call__(
                self, completions: Any, response_token_ids: Any, problem: Any, **_: Any
            ) -> Sequence[float | None]:
                return function(completions, response_token_ids, problem)

        Reward.__name__ = name
        return Reward

    return {name: build(name, each) for name, each in build_trl_rewards(scorer).items()}


class VerlRewardManager:
    """Reward manager of verl, which asks for many completions at once, one by one.

    Those that come while others are scored make the next batch.
    """

    scorer: RewardScorer

    def __init__(self, config: Any, tokenizer: Any, compute_score: Any, **_: Any) -> None:
        self._tokenizer = tokenizer
        self._turn = asyncio.Lock()
        self._waiting: list[tuple[str, str, int]] = []
        """Problem, completion and its tokens of each completion of the next batch."""
        self._scored: asyncio.Task[list[Mapping[str, float | None]]] | None = None
        """Rewards of the next batch."""

    async def run_single(self, data: Any) -> dict[str, Any]:
        """Return the weighted sum of the rewards of a completion, and each reward by its name."""
        row = data[-1:][0]
        tokens = row.batch["responses"]
        length = int(row.batch["attention_mask"][-len(tokens) :].sum())
        text = self._tokenizer.decode(tokens[:length], skip_special_tokens=True)
        problem = row.non_tensor_batch["reward_model"]["ground_truth"]
        place = len(self._waiting)
        self._waiting.append((problem, text, length))
        if self._scored is None or not place:
            self._scored = asyncio.create_task(self._score_waiting())
        rewards = (await asyncio.shield(self._scored))[place]
        separate = {name: value or 0.0 for name, value in rewards.items()}
        return {"reward_score": self.scorer.weigh(rewards), "reward_extra_info": separate}

    async def _score_waiting(self) -> list[Mapping[str, float | None]]:
        async with self._turn:
            batch, self._waiting = self._waiting, []
            # In a thread, so that completions can be sampled meanwhile.
            return await asyncio.to_thread(self.scorer.score_each, *zip(*batch, strict=True))


class NemoEnvironment:
    """Environment of one turn, whose `config` is the section `env.gdpo` of the configuration."""

    scorer: RewardScorer

    def __init__(self, config: Mapping[str, Any]) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(config["tokenizer"])
        self._longest: int = config["max_completion_length"]
        self._sums: bool = config["weighted_sum"]

    def step(
        self, logs: Sequence[Sequence[Mapping[str, str]]], metadata: Sequence[Mapping[str, str]]
    ) -> tuple[Any, ...]:
        """Return the rewards of N completions, and the end of N episodes.

        NeMo-RL passes no tokens on, so that a completion is tokenized again.
        """
        import torch

        texts = [turns[-1]["content"] for turns in logs]
        tokens = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        lengths = [min(len(each) + 1, self._longest) for each in tokens]
        rewards = self.scorer.score_each([entry["problem"] for entry in metadata], texts, lengths)
        given: Any = torch.tensor([self.scorer.weigh(each) for each in rewards])
        if not self._sums:
            given = {
                f"reward/{name}": torch.tensor([each[name] or 0.0 for each in rewards])
                for name in self.scorer.weights
            }
        nothing = [{"role": "environment", "content": ""} for _ in texts]
        unknown = [None] * len(texts)
        return nothing, list(metadata), unknown, given, torch.ones(len(texts)), unknown

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, float]]:
        """Return the batch as it is, and no metrics."""
        return batch, {}

    def shutdown(self) -> None:
        """Leave the sandbox, if there is one, to the end of this process."""


def process_nemo_prompt(
    row: Mapping[str, Any],
    spec: Any,
    tokenizer: Any,
    longest: int,
    number: int,
    *,
    reading: Mapping[str, Any],
) -> dict[str, Any]:
    """Return a prompt as NeMo-RL samples from it: the tokens that the searched policy read.

    One above `longest` tokens is cut and does not count in the loss, as in NeMo-RL's own.
    """
    import torch

    reader, turns = PromptFormat(tokenizer, **reading), row["messages"]
    plain = "\n\n".join(turn["content"] for turn in turns)
    prompt = plain if reader.template is None else turns
    tokens = torch.tensor(reader.encode([prompt])[0])
    fits = len(tokens) < longest
    text = reader.render(prompt)
    return {
        "message_log": [
            {"role": "user", "content": text, "token_ids": tokens if fits else tokens[:4]}
        ],
        "length": len(tokens),
        "extra_env_info": {"problem": row["problem"]},
        "loss_multiplier": 1.0 if fits else 0.0,
        "idx": number,
        "task_name": row["task_name"],
    }
