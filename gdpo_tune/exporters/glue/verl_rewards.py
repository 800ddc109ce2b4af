"""Rewards as verl's reward loop asks for them, and rows of its data set."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from gdpo_tune.exporters.glue.judging import judge_each, weigh
from gdpo_tune.exporters.glue.prompt_rows import ExportedPrompt


def build_row(prompt: ExportedPrompt, number: int) -> Mapping[str, object]:
    """Return the columns of a prompt for verl's data set."""
    return {
        "data_source": "gdpo_tune",
        "prompt": prompt.messages or [{"role": "user", "content": prompt.text}],
        "reward_model": {"style": "rule", "ground_truth": prompt.problem},
        "extra_info": {"index": number},
    }


class RewardManager:
    """Reward manager of verl that judges all completions together that wait for their rewards.

    verl asks for one completion at a time, and for many at once. Those that come while others are
    judged make the next batch.
    """

    def __init__(self, config: Any, tokenizer: Any, compute_score: Any, **_: Any) -> None:
        self._tokenizer = tokenizer
        self._turn = asyncio.Lock()
        self._waiting: list[tuple[str, str, int]] = []
        """Problem, completion and its tokens of each completion of the next batch."""
        self._judged: asyncio.Task[list[Mapping[str, float | None]]] | None = None
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
        if self._judged is None or not place:
            self._judged = asyncio.create_task(self._judge_waiting())
        rewards = (await asyncio.shield(self._judged))[place]
        separate = {name: value or 0.0 for name, value in rewards.items()}
        return {"reward_score": weigh(rewards), "reward_extra_info": separate}

    async def _judge_waiting(self) -> list[Mapping[str, float | None]]:
        async with self._turn:
            batch, self._waiting = self._waiting, []
            # In a thread, so that completions can be sampled meanwhile.
            return await asyncio.to_thread(judge_each, *zip(*batch, strict=True))
