"""How several rewards of a completion become one advantage, one small function a mode.

Shapes: N completions, P prompts, G completions of one prompt (N = P * G), K rewards.

Rules that hold in every mode, so that modes differ in their formula alone:

- Statistics are in float64 and use the unbiased standard deviation (ddof 1).
- NaN means "not scored". A missing reward counts as its group's mean, that is, it neither helps nor
  hurts; a completion without any scored reward gets 0 and enters no statistic.
- A group whose scored rewards are all equal says nothing: its advantages are exactly 0. Rounding
  error must not leak through, because it would be divided by `eps` and then whitened.
- Weights are rescaled to a maximum of 1, because only their ratios are meant and `eps` would
  otherwise see their overall scale. A weight of 0 equals dropping the reward.

Source: GDPO, arXiv 2601.05242, equations 4 to 8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gdpo_tune import registry
from gdpo_tune.errors import NonFiniteError


@dataclass(frozen=True)
class GroupedRewards:
    """Rewards of one generation batch, centred within their groups; all float64."""

    centred: Tensor
    """[P, G, K] reward minus its group's mean; 0 where missing or where the group is unanimous."""
    means: Tensor
    """[P, 1, K] mean of the group; of the whole batch where the group has no scored reward."""
    std: Tensor
    """[P, 1, K] unbiased standard deviation over the group's scored rewards."""
    scored: Tensor
    """[P, G] bool: whether the completion has any scored reward."""
    weights: Tensor
    """[K], maximum 1."""


def compute_advantages(
    rewards: Tensor,
    weights: Tensor,
    group_size: int,
    mode: str,
    eps: float = 1e-4,
) -> Tensor:
    """Advantages of one generation batch.

    Args:
        rewards: [N, K], the completions of one prompt adjacent; NaN = not scored.
        weights: [K], finite, not negative, at least one above 0; only ratios matter.
        group_size: G, completions of one prompt; divides N.
        mode: a key of `registry.NORMALIZATIONS`.
        eps: added to every standard deviation that divides; above 0.

    Returns:
        [N] in the dtype and on the device of `rewards`; always finite; an empty batch gives [0].

    Raises:
        NonFiniteError: a reward is infinite.
        ValueError: shapes, group size or weights that make no sense.
        KeyError: unknown mode.
    """
    mode_function: Callable[[GroupedRewards, float], Tensor] = registry.load(
        registry.NORMALIZATIONS[mode].target
    )
    _check(rewards, weights, group_size, eps)
    if rewards.shape[0] == 0:
        return rewards.new_zeros(0)
    groups = _group(rewards, weights, group_size)
    advantages = mode_function(groups, eps)
    alive = (groups.centred != 0).any(dim=2).any(dim=1, keepdim=True) & groups.scored
    return torch.where(alive, advantages, 0.0).reshape(-1).to(rewards.dtype)


def gdpo(groups: GroupedRewards, eps: float) -> Tensor:
    """Each reward normalised in its group, weighted sum, then whitened over the batch.

    `A = sum_k w_k (r_k - mean_group(r_k)) / (std_group(r_k) + eps)`,
    `(A - mean_batch(A)) / (std_batch(A) + eps)`.

    Source: arXiv 2601.05242, equations 5 to 8; TRL's `normalize_then_sum`.
    """
    return _whiten(gdpo_no_batch_norm(groups, eps), groups.scored, eps)


def gdpo_no_batch_norm(groups: GroupedRewards, eps: float) -> Tensor:
    """GDPO without its last step: `sum_k w_k (r_k - mean_group(r_k)) / (std_group(r_k) + eps)`.

    Source: ablation in arXiv 2601.05242, which reports that it sometimes fails to converge.
    """
    return _sum(groups.centred / (groups.std + eps) * groups.weights)


def gdpo_no_std(groups: GroupedRewards, eps: float) -> Tensor:
    """GDPO without the group's standard deviation: `sum_k w_k (r_k - mean_group(r_k))`, whitened.

    Source: ablation in arXiv 2601.05242.
    """
    return _whiten(grpo_no_std(groups, eps), groups.scored, eps)


def grpo(groups: GroupedRewards, eps: float) -> Tensor:
    """Weighted sum first, then normalised in the group.

    `R = sum_k w_k r_k`, `(R - mean_group(R)) / (std_group(R) + eps)`.

    Source: arXiv 2402.03300; equation 4 of arXiv 2601.05242; TRL's `sum_then_normalize`.
    """
    total = grpo_no_std(groups, eps)
    return total / (_std(total, groups.scored, dim=1) + eps)


def grpo_no_std(groups: GroupedRewards, eps: float) -> Tensor:
    """Weighted sum, centred in the group, divided by nothing: `R - mean_group(R)`.

    The centred rewards are summed instead of centring the sum: the same number, and exactly 0 for a
    unanimous group. `eps` has no effect.

    Source: Dr. GRPO, arXiv 2503.20783; TRL's `scale_rewards="none"`.
    """
    del eps
    return _sum(groups.centred * groups.weights)


def grpo_batch(groups: GroupedRewards, eps: float) -> Tensor:
    """Centred in the group, divided by the batch: `(R - mean_group(R)) / (std_batch(R) + eps)`.

    Source: arXiv 2508.08221; TRL's `scale_rewards="batch"`.
    """
    total = (groups.centred + groups.means) @ groups.weights
    return grpo_no_std(groups, eps) / (_std(total, groups.scored, dim=(0, 1)) + eps)


def _check(rewards: Tensor, weights: Tensor, group_size: int, eps: float) -> None:
    if rewards.dim() != 2 or weights.shape != rewards.shape[1:]:
        raise ValueError(
            f"rewards {tuple(rewards.shape)} and weights {tuple(weights.shape)} "
            "are not [N, K] and [K]"
        )
    if group_size < 1 or rewards.shape[0] % group_size:
        raise ValueError(f"{rewards.shape[0]} completions are not whole groups of {group_size}")
    if not bool(torch.isfinite(weights).all() and (weights >= 0).all() and (weights > 0).any()):
        raise ValueError(
            f"reward weights {weights.tolist()} must be finite, not negative, not all 0"
        )
    if not eps > 0:
        raise ValueError(f"eps = {eps} must be above 0, or unanimous rewards would be divided by 0")
    if bool(torch.isinf(rewards).any()):
        row, column = torch.isinf(rewards).nonzero()[0].tolist()
        raise NonFiniteError(f"reward {column} of completion {row} is infinite")


def _group(rewards: Tensor, weights: Tensor, group_size: int) -> GroupedRewards:
    used = weights > 0
    values = rewards[:, used].double().unflatten(0, (-1, group_size))
    kept = weights[used].double()
    present = ~values.isnan()
    count = present.sum(dim=1, keepdim=True)
    filled = torch.where(present, values, 0.0)
    means = filled.sum(dim=1, keepdim=True) / count
    low = torch.where(present, values, torch.inf).amin(dim=1, keepdim=True)
    high = torch.where(present, values, -torch.inf).amax(dim=1, keepdim=True)
    centred = torch.where(present & (low < high), values - means, 0.0)
    batch_means = filled.sum(dim=(0, 1)) / present.sum(dim=(0, 1)).clamp(min=1)
    return GroupedRewards(
        centred=centred,
        means=torch.where(count > 0, means, batch_means),
        std=_std(values, present, dim=1),
        scored=present.any(dim=2),
        weights=kept / kept.max(),
    )


def _sum(terms: Tensor) -> Tensor:
    """Sum over the last dimension, in which rewards that cancel give exactly 0."""
    total = terms.sum(dim=-1)
    rounding_error = 1e-12 * terms.abs().sum(dim=-1)
    return torch.where(total.abs() > rounding_error, total, 0.0)


def _std(values: Tensor, present: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Unbiased standard deviation over `dim` where `present`; 0 for fewer than two values."""
    count = present.sum(dim=dim, keepdim=True)
    filled = torch.where(present, values, 0.0)
    mean = filled.sum(dim=dim, keepdim=True) / count.clamp(min=1)
    squares = torch.where(present, values - mean, 0.0).square().sum(dim=dim, keepdim=True)
    return (squares / (count - 1).clamp(min=1)).sqrt()


def _whiten(values: Tensor, present: Tensor, eps: float) -> Tensor:
    count = present.sum().clamp(min=1)
    mean = torch.where(present, values, 0.0).sum() / count
    return (values - mean) / (_std(values, present, dim=(0, 1)) + eps)
