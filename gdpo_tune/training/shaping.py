"""What a trial makes of its task's rewards in training: credit, the length's shape, conditions.

Held-out objectives never pass through here: they are the task's own metrics, whatever a trial
trained on. Nor does the task, which trials share. N completions; None is a reward not scored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gdpo_tune.core.parameters import NO_CONDITION
from gdpo_tune.core.registry import TaskInfo
from gdpo_tune.core.trials import TrialConfig

Values = Sequence[float | None]
"""N values of one reward."""
Rewards = Mapping[str, Values]
"""Reward name -> N values."""

TOLERANCE = 1e-9
"""Share of its range by which a reward may miss a threshold: rounding is not a failure."""


@dataclass(frozen=True)
class Condition:
    """What another reward has to reach."""

    on: str
    threshold: float


@dataclass(frozen=True)
class Shaping:
    """The shapes of one trial; without arguments, rewards stay as the task gave them."""

    partial_credit: bool = False
    """Take the partial credit that the task gives in place of all or nothing."""
    length_reward: str | None = None
    length: Callable[[int], float] | None = None
    """Tokens of a completion -> its length reward; None keeps the task's own."""
    conditions: Mapping[str, Condition] = field(default_factory=dict[str, Condition])
    """Reward name -> its condition."""

    def apply(
        self, rewards: Rewards, lengths: Sequence[int], partial: Rewards | None = None
    ) -> Rewards:
        """The rewards to train on.

        Every condition looks at the rewards as the task gave them, with partial credit or without,
        not at what a shape or another condition makes of them. So the order of conditions does not
        matter, a circle of them is sound, and in a chain, where a is conditioned on b and b on c, c
        has no say in a.

        Args:
            rewards: the task's own, N values each.
            lengths: N token counts, the end token included.
            partial: those that the task gives with partial credit too, N values each.
        """
        if self.partial_credit:
            rewards = {**rewards, **(partial or {})}
        shaped = dict(rewards)
        if self.length_reward is not None and self.length is not None:
            own = rewards[self.length_reward]
            shaped[self.length_reward] = [
                None if value is None else self.length(length)
                for value, length in zip(own, lengths, strict=True)
            ]
        for name, condition in self.conditions.items():
            shaped[name] = conditioned(shaped[name], rewards[condition.on], condition.threshold)
        return shaped


def shaping_of(config: TrialConfig, info: TaskInfo) -> Shaping:
    """What a trial's parameters ask for.

    Raises:
        ValueError: a condition on a reward without a known range.
    """
    params = config.params
    conditions: dict[str, Condition] = {}
    for reward in info.rewards:
        on = str(params.get(f"conditioning.{reward}", NO_CONDITION))
        if on != NO_CONDITION:
            share = float(params[f"conditioning_threshold.{reward}"])
            conditions[reward] = Condition(on, threshold(info.rewards[on], share))
    partial = bool(params.get("partial_credit", False))
    if info.length_reward is None:
        return Shaping(partial, conditions=conditions)
    return Shaping(partial, info.length_reward, _length_shape(config), conditions)


def threshold(values: tuple[float, float], share: float) -> float:
    """What a reward with these lowest and highest `values` has to reach: 0 any, 1 the highest.

    A share, because one parameter serves every reward that may be conditioned on, each with a range
    of its own.

    Raises:
        ValueError: the range is not known.
    """
    low, high = values
    if not math.isfinite(high - low):
        raise ValueError("a condition needs to know the range of the reward that it looks at")
    return (1 - share) * low + share * high - TOLERANCE * (high - low)


def conditioned(values: Values, on: Values, threshold: float) -> Values:
    """`r_k * 1[r_l >= threshold]`; not scored where either reward is not (None, or NaN in r_l).

    Source: arXiv 2601.05242, conditioned rewards.
    """
    return [
        None
        if value is None or other is None or math.isnan(other)
        else (value if other >= threshold else 0.0)
        for value, other in zip(values, on, strict=True)
    ]


def ramp(tokens: int, limit: int, longest: int) -> float:
    """`(longest - tokens) / (longest - limit)`, held within [0, 1].

    1 up to the limit, then falling in a line to 0 at the longest completion that can be sampled: a
    completion that is a little too long still earns most of the reward.
    """
    if tokens <= limit:
        return 1.0
    return (longest - tokens) / (longest - limit) if tokens < longest else 0.0


def soft_overlong(tokens: int, longest: int, cache: float) -> float:
    """DAPO's soft overlong punishment, plus 1: 1, then over `cache` tokens falling to 0.

    That is 0 up to `longest - cache`, `(longest - cache - tokens) / cache` up to `longest`, -1
    beyond. The 1 that is added changes no centred reward; it makes the best 1 as in the other
    shapes, and the worst the 0 that an unmet condition gives. What sets this shape apart from
    `ramp` is where it begins to fall: with a cache that begins at the limit, they are equal.

    Source: arXiv 2503.14476, equation 13.
    """
    return min(1.0, max(0.0, (longest - tokens) / cache))


def _length_shape(config: TrialConfig) -> Callable[[int], float] | None:
    settings = config.training
    longest = settings.max_completion_length
    match config.params["length_shape"]:
        case "ramp":
            return lambda tokens: ramp(tokens, settings.length_limit, longest)
        case "overlong":
            cache = float(config.params["length_cache"]) * longest
            return lambda tokens: soft_overlong(tokens, longest, cache)
        case _:
            return None
