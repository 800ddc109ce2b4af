"""Selection of training prompts whose groups are likely to be informative.

A group whose advantages are all equal has no gradient, and its completions are lost. Of several
times as many candidates as a step needs, those with the highest estimate are sampled. A prompt
comes again too seldom to be remembered, so the estimate generalises: an online logistic regression
on the words of prompts, with a feature for the prompt itself.

DAPO (arXiv 2503.14476) samples further groups in place of dead ones, whose completions count here,
too. Its filter at equal completions would only make batches smaller.

Source of the updates: AdaGrad, Duchi et al. 2011.

Shapes: P prompts (groups) of a step over all processes, F features of a prompt.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gdpo_tune.core.parameters import CANDIDATES
from gdpo_tune.core.task_info import order_prompts
from gdpo_tune.core.text import join_turns

SELECTION_FILE = "prompt_selection.pt"
"""File of a checkpoint with the state of the estimate."""
UNSELECTED = 0.25
"""Share of a step, rounded up, that is drawn uniformly, so that each estimate stays up to date."""
RATE = 0.1
"""Learning rate of the estimate."""
_BUCKETS = 2**14
"""Weights of the estimate; features with the same hash share one."""


class PromptSelection:
    """Choice of the prompts of each step, the same in every process."""

    def __init__(self, prompts: Sequence[Any], steps: int, per_step: int, seed: int) -> None:
        """Begin a training of `steps` steps of P = `per_step` of `prompts`, texts or turns."""
        self.prompts = prompts
        self._per_step = per_step
        self._order = order_prompts(len(prompts), CANDIDATES * steps * per_step, seed)
        self._features: dict[int, np.ndarray] = {}
        self._state = np.zeros((2, _BUCKETS))
        """Weights, and the sum of the squared gradients of each."""

    def select(self, step: int) -> list[int]:
        """Return the indices [P] of the prompts of a step, the first of which is step 0.

        Each pass over all candidates contains every prompt once, as each pass of `uniform` does.
        """
        width = CANDIDATES * self._per_step
        window = self._order[step * width : (step + 1) * width]
        distinct = list(dict.fromkeys(window))
        if len(distinct) <= self._per_step:
            return window[: self._per_step]
        drawn = -int(-UNSELECTED * self._per_step // 1)
        rest = sorted(distinct[drawn:], key=self._estimate, reverse=True)
        return distinct[:drawn] + rest[: self._per_step - drawn]

    def learn(self, chosen: Sequence[int], informative: Sequence[bool]) -> None:
        """Update the estimate from the groups [P] of a step."""
        for index, outcome in zip(chosen, informative, strict=True):
            features = self._list_features(index)
            score = self._estimate(index)
            gradient = (1 / (1 + np.exp(-score)) - outcome) / len(features) ** 0.5
            weights, squares = self._state
            squares[features] += gradient**2
            weights[features] -= RATE * gradient / np.sqrt(squares[features])

    def _estimate(self, index: int) -> float:
        """Return the log-odds that the group of a prompt teaches something."""
        features = self._list_features(index)
        return float(self._state[0, features].sum() / len(features) ** 0.5)

    def _list_features(self, index: int) -> np.ndarray:
        """Return the weights [F] of a constant, of a prompt and of each of its words."""
        if index not in self._features:
            prompt = join_turns(self.prompts[index])
            # The hash of `str` differs from process to process.
            texts = ("", prompt, *prompt.split())
            hashes = {zlib.crc32(text.encode()) % _BUCKETS for text in texts}
            self._features[index] = np.array(sorted(hashes))
        return self._features[index]

    def save(self, checkpoint: Path) -> None:
        """Write the state of the estimate."""
        torch.save(torch.from_numpy(self._state), checkpoint / SELECTION_FILE)

    def load(self, checkpoint: Path) -> None:
        """Continue from the state of a checkpoint."""
        self._state = torch.load(checkpoint / SELECTION_FILE, weights_only=True).numpy()
