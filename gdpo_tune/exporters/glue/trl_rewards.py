"""Reward functions as TRL calls them: one for each reward, which judge a batch only once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gdpo_tune.exporters.glue.judging import judge
from gdpo_tune.exporters.glue.prompt_rows import ExportedPrompt


def build_row(prompt: ExportedPrompt, number: int) -> Mapping[str, object]:
    """Return the columns of a prompt; each column but `prompt` reaches the reward functions."""
    return {"prompt": prompt.messages or prompt.text, "problem": prompt.problem}


_latest: tuple[Any, Mapping[str, Sequence[float | None]]] = (None, {})
"""Batch that was judged last, which TRL passes to one function after another, and its rewards."""


def build_reward_function(name: str) -> Callable[..., Sequence[float | None]]:
    """Build the function of one reward, which TRL logs by its name."""

    def reward(
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        problem: Sequence[str],
        **_: Any,
    ) -> Sequence[float | None]:
        global _latest
        latest = _latest  # that of another thread may follow at any time
        if latest[0] is not completions:
            texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
            latest = completions, judge(problem, texts, [len(ids) for ids in completion_ids])
            _latest = latest
        return latest[1][name]

    reward.__name__ = name
    return reward
