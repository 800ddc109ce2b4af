"""Metrics of a policy before any reinforcement learning: the table in docs/measurements.md.

In a forced mode, the first tokens of the thoughts (none, terse or long) are given and the policy
continues greedily. This shows whether shorter answers really cost correctness.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from recipes.demonstrations import MODES

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from gdpo_tune.tasks.base import Problem, Scores, Task

_BATCH = 100
_SAMPLES = 2
_Table = dict[str, dict[str, float]]


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    max_length: int,
    prompts: int,
    seed: int,
) -> dict[str, _Table]:
    """Measure every metric of a task with an embedded policy, on validation prompts.

    Args:
        model: the policy.
        tokenizer: its tokenizer.
        task: the task.
        max_length: tokens after which a completion is cut.
        prompts: number of prompts.
        seed: of the problems and of the sampling.

    Returns:
        `sampled` (temperature 1) and one `forced_<mode>` a mode, each a table
        family -> metric -> mean, with the row `all`.

    Raises:
        SandboxUnavailable: programs cannot be run safely here.
    """
    with task:
        problems = task.problems("validation", prompts, seed)
        repeated = [problem for problem in problems for _ in range(_SAMPLES)]
        policy = _PolicySampler(model, tokenizer, max_length, seed)
        texts, lengths = policy.complete(repeated, [""] * len(repeated), greedy=False)
        tables = {"sampled": _build_table(repeated, task.score(repeated, texts, lengths))}
        for mode in MODES:
            openings = [policy.open_thought(problem.data["thoughts"][mode]) for problem in problems]
            texts, lengths = policy.complete(problems, openings, greedy=True)
            tables[f"forced_{mode}"] = _build_table(problems, task.score(problems, texts, lengths))
    return tables


class _PolicySampler:
    """Sampler of completions whose first tokens may be given."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        seed: int,
    ) -> None:
        self._model: Any = model  # transformers types `generate` as a tensor
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._seed = seed

    def open_thought(self, thought: str) -> str:
        """Return the first tokens of a completion that thinks in the same mode as `thought`."""
        if not thought:
            return "<think></think>"
        first = self._tokenizer(thought)["input_ids"][:1]
        return f"<think>{self._tokenizer.decode(first)}"

    @torch.no_grad()
    def complete(
        self, problems: Sequence[Problem], openings: Sequence[str], *, greedy: bool
    ) -> tuple[list[str], list[int]]:
        """Return N completions, openings included, and their lengths with the end token."""
        torch.manual_seed(self._seed)
        end = self._tokenizer.eos_token_id
        mode = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0}
        texts: list[str] = []
        lengths: list[int] = []
        for at in range(0, len(problems), _BATCH):
            rows = slice(at, at + _BATCH)
            first_ids = [
                self._tokenizer(opening)["input_ids"] if opening else []
                for opening in openings[rows]
            ]
            starts = [
                self._tokenizer(problem.prompt)["input_ids"] + ids
                for problem, ids in zip(problems[rows], first_ids, strict=True)
            ]
            batch = self._tokenizer.pad({"input_ids": starts}, return_tensors="pt")
            ids_BT = self._model.generate(**batch, max_new_tokens=self._max_length, **mode)
            width = batch["input_ids"].shape[1]
            for ids, row in zip(first_ids, ids_BT[:, width:].tolist(), strict=True):
                stop = row.index(end) + 1 if end in row else len(row)
                completion = (ids + row[:stop])[: self._max_length]
                lengths.append(len(completion))
                texts.append(str(self._tokenizer.decode(completion, skip_special_tokens=True)))
        return texts, lengths


def _build_table(problems: Sequence[Problem], scores: Scores) -> _Table:
    families = [problem.family for problem in problems]
    table: _Table = {}
    for row in ("all", *sorted(set(families))):
        indices = [i for i, family in enumerate(families) if row in ("all", family)]
        table[row] = {
            metric: round(sum(values[i] or 0.0 for i in indices) / len(indices), 3)
            for metric, values in scores.metrics.items()
        }
    return table
