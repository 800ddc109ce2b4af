"""Reward functions as ms-swift calls them: classes, whose objects are called with a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gdpo_tune.exporters.glue.prompt_rows import ExportedPrompt
from gdpo_tune.exporters.glue.trl_rewards import build_reward_function


def build_row(prompt: ExportedPrompt, number: int) -> Mapping[str, object]:
    """Return the columns of a prompt; each column but `messages` reaches the reward functions."""
    turns = prompt.messages or [{"role": "user", "content": prompt.text}]
    return {"messages": turns, "problem": prompt.problem}


def build_reward_class(name: str) -> type:
    """Build the class of one reward, which ms-swift logs by its name."""
    reward = build_reward_function(name)

    class Reward:
        def __init__(self, args: Any = None, **_: Any) -> None:
            self.args = args

        def __call__(
            self,
            completions: Sequence[str],
            response_token_ids: Sequence[Sequence[int]],
            problem: Sequence[str],
            **_: Any,
        ) -> Sequence[float | None]:
            return reward(completions, response_token_ids, problem)

    Reward.__name__ = name
    return Reward
