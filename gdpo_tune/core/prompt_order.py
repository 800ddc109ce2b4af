"""Choice of the prompts of a sweep, and the order in which a trial reads them."""

from __future__ import annotations

import numpy as np

PROBLEM_SEED = 0
"""Prompts belong to the sweep and not to the trial: every trial of every run has the same."""


def order_prompts(problems: int, count: int, seed: int) -> list[int]:
    """Return the indices of a trial's `count` prompts; each pass over all has its own order.

    The order is fixed in advance, because a data loader that shuffles by itself would start another
    order when a trial resumes after its first pass.
    """
    generator = np.random.default_rng(seed)
    passes = -(-count // problems)
    order = np.concatenate([generator.permutation(problems) for _ in range(passes)])
    return order[:count].tolist()
