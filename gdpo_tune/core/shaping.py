"""Shaping of a task's rewards for training: partial credit, shape of the length reward, conditions.

Held-out objectives are never shaped: they are the task's own metrics.

Shapes: N completions; None is a reward that was not scored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Values = Sequence[float | None]
"""N values of one reward."""
Rewards = Mapping[str, Values]
"""Reward name -> N values."""


@dataclass(frozen=True)
class RewardCondition:
    """Threshold that another reward has to reach."""

    on: str
    threshold: float


@dataclass(frozen=True)
class LengthFall:
    """Shape of a length reward that falls in a line from 1 to 0; see `compute_fall`."""

    longest: int
    fall: float


@dataclass(frozen=True)
class Shaping:
    """Reward shaping of one trial; the default changes no reward."""

    partial_credit: bool = False
    """Take the task's partial credit in place of all or nothing."""
    length_reward: str | None = None
    length: LengthFall | None = None
    """Shape of its length reward; None keeps the task's own."""
    conditions: Mapping[str, RewardCondition] = field(default_factory=dict[str, RewardCondition])
    """Reward name -> its condition."""

    def apply(
        self, rewards: Rewards, lengths: Sequence[int], partial: Rewards | None = None
    ) -> Rewards:
        """Return the rewards to train on, from the task's own and its partial credit, if any.

        Every condition reads the task's rewards, with partial credit if that is on, before any
        shape or condition changes them. So the order of conditions does not matter, and a circle of
        them is allowed. If a is conditioned on b and b on c, then c does not affect a. `lengths`
        are N token counts, the end token included.
        """
        if self.partial_credit:
            rewards = {**rewards, **(partial or {})}
        shaped = dict(rewards)
        if self.length_reward is not None and self.length is not None:
            own = rewards[self.length_reward]
            shaped[self.length_reward] = [
                None
                if value is None
                else compute_fall(length, self.length.longest, self.length.fall)
                for value, length in zip(own, lengths, strict=True)
            ]
        for name, condition in self.conditions.items():
            shaped[name] = apply_condition(shaped[name], rewards[condition.on], condition.threshold)
        return shaped


def apply_condition(values: Values, on: Values, threshold: float) -> Values:
    """Return `r_k * 1[r_l >= threshold]`; None where a reward was not scored (None, NaN in r_l).

    Source: arXiv 2601.05242, conditioned rewards.
    """
    return [
        None
        if value is None or other is None or math.isnan(other)
        else (value if other >= threshold else 0.0)
        for value, other in zip(values, on, strict=True)
    ]


def compute_fall(tokens: int, longest: int, fall: float) -> float:
    """Return `(longest - tokens) / fall`, clamped to [0, 1]: it falls over the last `fall` tokens.

    This is DAPO's soft overlong punishment plus 1. The punishment is 0 up to `longest - fall`,
    `(longest - fall - tokens) / fall` up to `longest`, and -1 beyond. Adding 1 changes no centred
    reward. It makes the highest value 1, as in the other shapes, and the lowest 0, as where a
    condition is not met.

    Source: arXiv 2503.14476, equation 13.
    """
    return min(1.0, max(0.0, (longest - tokens) / fall))
