"""Advantages: one number per completion from several rewards, by one small function per mode.

Shapes: N completions, P prompts, G group size (completions of one prompt, N = P * G), K rewards.

These rules hold in every mode, so that modes differ in their formula alone:

- Statistics are in float64 and use the unbiased standard deviation (ddof 1).
- NaN means "not scored". A missing reward counts as its group's mean: it neither helps nor hurts. A
  completion without any scored reward gets 0 and enters no statistic.
- A group whose scored rewards are all equal is dead: its advantages are exactly 0. Otherwise its
  rounding error would be divided by `eps` and then whitened.
- Weights are rescaled to a maximum of 1, so that only their ratios count, whatever `eps` is. A
  weight of 0 drops the reward.
- To whiten a value is to subtract its mean over the batch and to divide by its standard deviation.

Source: GDPO, arXiv 2601.05242, equations 4 to 8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gdpo_tune.core import registry
from gdpo_tune.core.errors import NonFiniteError
from gdpo_tune.core.task_info import UNKNOWN_RANGE

ROUNDING_ERROR = 1e-8
"""A normalised reward this close to 0 has no sign. Source: the authors' code of GD2PO."""


@dataclass(frozen=True)
class GroupedRewards:
    """Rewards of one generation batch, centred within their groups; all float64."""

    centred: Tensor
    """[P, G, K] reward minus its group's mean; 0 where missing or where the group is dead."""
    means: Tensor
    """[P, 1, K] mean of the group; of the batch where the group has no scored reward."""
    std: Tensor
    """[P, 1, K] unbiased standard deviation over the group's scored rewards."""
    scored: Tensor
    """[P, G] bool, True if the completion has any scored reward."""
    weights: Tensor
    """[K], maximum 1."""
    batch_means: Tensor
    """[K] mean over every scored completion; NaN if there is none."""
    batch_std: Tensor
    """[K] unbiased standard deviation over every scored completion; 0 for fewer than two."""
    ranges: Tensor
    """[K, 2] lowest and highest possible value; infinite where unknown."""


def compute_advantages(
    rewards: Tensor,
    weights: Tensor,
    group_size: int,
    mode: str,
    eps: float = 1e-4,
    *,
    gamma: float = 0.0,
    baseline: str = "group_mean",
    ranges: Sequence[tuple[float, float]] | None = None,
) -> Tensor:
    """Compute the advantages of one generation batch.

    Args:
        rewards: [N, K], the completions of one prompt adjacent; NaN = not scored.
        weights: [K], finite, not negative, at least one above 0; only ratios matter.
        group_size: G, completions of one prompt; divides N.
        mode: a key of `registry.NORMALIZATIONS`, whose `ignores` may name `gamma` or `baseline`.
        eps: added to every standard deviation that divides; above 0.
        gamma: saturation exponent in [0, 1], see `reduce_saturated_weights`.
        baseline: `group_mean`, or `leave_one_out`, see `compute_leave_one_out_factor`.
        ranges: K pairs (lowest, highest) of possible values, infinite where unknown; None: unknown.

    Returns:
        [N] in the dtype and on the device of `rewards`; always finite.

    Raises:
        NonFiniteError: a reward is infinite.
        ValueError: invalid shapes, group size, weights or `eps`; or `gamma` above 0 while the range
            of a reward is unknown.
        KeyError: unknown mode.
    """
    info = registry.NORMALIZATIONS[mode]
    mode_function: Callable[[GroupedRewards, float], Tensor] = registry.load(info.target)
    _check(rewards, weights, group_size, eps)
    if rewards.shape[0] == 0:
        return rewards.new_zeros(0)
    groups = _group(rewards, weights, group_size, ranges)
    if gamma > 0 and "gamma" not in info.ignores:
        groups = replace(groups, weights=reduce_saturated_weights(groups, gamma))
    advantages = mode_function(groups, eps)
    if baseline == "leave_one_out" and "baseline" not in info.ignores:
        advantages = advantages * compute_leave_one_out_factor(groups)
    alive = (groups.centred != 0).any(dim=2).any(dim=1, keepdim=True) & groups.scored  # [P, G]
    return torch.where(alive, advantages, 0.0).reshape(-1).to(rewards.dtype)


def find_informative_groups(advantages: Tensor, group_size: int) -> Tensor:
    """Return which groups teach something, [P] bool: their advantages [N] are not all equal.

    Whitening shifts every completion alike, so it makes no group informative.
    """
    groups = advantages.unflatten(0, (-1, group_size))
    return groups.amin(dim=1) < groups.amax(dim=1)


def gdpo(groups: GroupedRewards, eps: float) -> Tensor:
    """Normalise each reward in its group, sum by weight, then whiten over the batch.

    `A = sum_k w_k (r_k - mean_group(r_k)) / (std_group(r_k) + eps)`,
    `(A - mean_batch(A)) / (std_batch(A) + eps)`.

    Source: arXiv 2601.05242, equations 5 to 8; TRL's `normalize_then_sum`.
    """
    return _whiten(gdpo_no_batch_norm(groups, eps), groups.scored, eps)


def gdpo_no_batch_norm(groups: GroupedRewards, eps: float) -> Tensor:
    """Apply GDPO without whitening: `sum_k w_k (r_k - mean_group(r_k)) / (std_group(r_k) + eps)`.

    Source: ablation in arXiv 2601.05242, which reports that it sometimes fails to converge.
    """
    return add_terms(groups.centred / (groups.std + eps) * groups.weights)


def gdpo_no_std(groups: GroupedRewards, eps: float) -> Tensor:
    """Apply GDPO without group deviations: `sum_k w_k (r_k - mean_group(r_k))`, then whiten.

    Source: ablation in arXiv 2601.05242.
    """
    return _whiten(grpo_no_std(groups, eps), groups.scored, eps)


def grpo(groups: GroupedRewards, eps: float) -> Tensor:
    """Sum the rewards by weight, then normalise the sum in its group.

    `R = sum_k w_k r_k`, `(R - mean_group(R)) / (std_group(R) + eps)`.

    Source: arXiv 2402.03300; equation 4 of arXiv 2601.05242; TRL's `sum_then_normalize`.
    """
    total = grpo_no_std(groups, eps)
    return total / (_compute_std(total, groups.scored, dim=1) + eps)


def grpo_no_std(groups: GroupedRewards, eps: float) -> Tensor:
    """Sum the rewards by weight, then centre the sum in its group: `R - mean_group(R)`.

    Summing centred rewards gives the same, and exactly 0 for a dead group. `eps` has no effect.

    Source: Dr. GRPO, arXiv 2503.20783; TRL's `scale_rewards="none"`.
    """
    del eps
    return add_terms(groups.centred * groups.weights)


def grpo_batch(groups: GroupedRewards, eps: float) -> Tensor:
    """Centre the sum by group, scale by batch: `(R - mean_group(R)) / (std_batch(R) + eps)`.

    Source: arXiv 2508.08221; TRL's `scale_rewards="batch"`.
    """
    total = (groups.centred + groups.means) @ groups.weights
    return grpo_no_std(groups, eps) / (_compute_std(total, groups.scored, dim=(0, 1)) + eps)


def dvao(groups: GroupedRewards, eps: float) -> Tensor:
    """Average GDPO's terms by their spread in the group: `sum_k w_k s_k A_k / sum_l w_l s_l`.

    `A_k = (r_k - mean_group(r_k)) / (s_k + eps)`, `s_k = std_group(r_k)`. Nothing is whitened, and
    `eps` is added to the last divisor too. The result stays within the bounds of the A_k, and its
    direction in a group is that of GRPO, because `s_k A_k` is the centred reward. A group without
    any spread gets 0.

    Source: DVAO, arXiv 2605.25604. The paper has no weights w_k; all 1 gives its form.
    """
    spread = groups.std * groups.weights
    terms = groups.centred / (groups.std + eps) * spread
    return add_terms(terms) / (spread.sum(dim=2) + eps)


def saw(groups: GroupedRewards, eps: float) -> Tensor:
    """Apply GDPO with each weight multiplied by `std_k / |mean_k|` over the batch.

    This coefficient of variation estimates how much is left to learn. The mean counts from the
    lowest value of a known range; else a reward in [-3, 3] would weigh without bound as its mean
    crosses 0. The paper divides by the sum of the coefficients, which cancels here.

    A reward that is constant over the batch weighs 0. `eps` is added to `|mean_k|`, so that a mean
    of 0 gives a finite weight, but one beside which the other rewards vanish.

    Source: SAW, arXiv 2606.07705, the form for GDPO; the shift of the mean is in the authors' code.
    The paper has no weights w_k; all 1 gives its form.
    """
    lowest = groups.ranges[:, 0]
    means = groups.batch_means - torch.where(lowest.isfinite(), lowest, 0.0)
    weights = groups.weights * groups.batch_std / (means.abs() + eps)
    return gdpo(replace(groups, weights=_rescale(weights)), eps)


def gd2po(groups: GroupedRewards, eps: float) -> Tensor:
    """Apply GDPO without the completions whose rewards disagree; weigh a group by those it keeps.

    A completion disagrees if one of its terms `A_k = (r_k - mean_group(r_k)) / (std_group(r_k) +
    eps)` is above 0 and another one below; a term of 0 disagrees with none. It gets 0. The others
    get `sum_k w_k A_k` times the share of their group that is kept, whitened over those kept.

    Source: GD2PO-Hard, arXiv 2606.16771, as the authors' code has it: `gdpo_filter_group_ratio` in
    github.com/Qwen-Applications/GD2PO, which applies the share before it whitens. It whitens over
    tokens and has no weights w_k; here every completion counts once, as in `gdpo`.
    """
    terms = groups.centred / (groups.std + eps)
    disagrees = (terms > ROUNDING_ERROR).any(dim=2) & (terms < -ROUNDING_ERROR).any(dim=2)
    kept = groups.scored & ~disagrees
    scored = groups.scored.sum(dim=1, keepdim=True).clamp(min=1)
    share = kept.sum(dim=1, keepdim=True) / scored.double()
    return torch.where(kept, _whiten(add_terms(terms * groups.weights) * share, kept, eps), 0.0)


def reduce_saturated_weights(groups: GroupedRewards, gamma: float) -> Tensor:
    """Return `w_k (1 - s_k)^gamma`, [K], maximum 1: a reward near its highest value weighs less.

    `s_k = (mean_batch(r_k) - lowest_k) / (highest_k - lowest_k)`, clamped to [0, 1]. A reward that
    is at its highest value in the whole batch weighs 0; it is constant, so nothing is lost.

    Raises:
        ValueError: the range of a reward is unknown or empty.

    Source: SA-MRPO, arXiv 2608.16072, Learn What's Left, Not What's Mastered. gamma = 0 is GDPO.
    """
    lowest, highest = groups.ranges.unbind(dim=1)
    width = highest - lowest
    if not bool((width.isfinite() & (width > 0)).all()):
        raise ValueError(f"gamma = {gamma:g} needs to know the range of every reward with a weight")
    saturation = ((groups.batch_means - lowest) / width).clamp(0.0, 1.0)
    return _rescale(groups.weights * (1.0 - saturation) ** gamma)


def compute_leave_one_out_factor(groups: GroupedRewards) -> Tensor:
    """Return `n / (n - 1)`, [P, 1], n the scored completions of a group.

    It turns `r - mean of the group` into `r - mean of the others` in every mode that does not
    whiten, because each is linear in the centred rewards of a group. Whitening divides it out.

    Source: RLOO, arXiv 2402.14740.
    """
    count = groups.scored.sum(dim=1, keepdim=True).double()
    return count / (count - 1).clamp(min=1)


def _check(rewards: Tensor, weights: Tensor, group_size: int, eps: float) -> None:
    if rewards.dim() != 2 or weights.shape != rewards.shape[1:]:
        shapes = f"rewards {tuple(rewards.shape)} and weights {tuple(weights.shape)}"
        raise ValueError(f"{shapes} are not [N, K] and [K]")
    if group_size < 1 or rewards.shape[0] % group_size:
        raise ValueError(f"{rewards.shape[0]} completions are not whole groups of {group_size}")
    if not bool(torch.isfinite(weights).all() and (weights >= 0).all() and (weights > 0).any()):
        raise ValueError(f"weights {weights.tolist()} must be finite, not negative, not all 0")
    if not eps > 0:
        raise ValueError(f"eps = {eps} must be above 0, or dead groups would be divided by 0")
    if bool(torch.isinf(rewards).any()):
        row, column = torch.isinf(rewards).nonzero()[0].tolist()
        raise NonFiniteError(f"reward {column} of completion {row} is infinite")


def _group(
    rewards: Tensor, weights: Tensor, group_size: int, ranges: Sequence[tuple[float, float]] | None
) -> GroupedRewards:
    used = weights > 0
    bounds = [UNKNOWN_RANGE] * len(weights) if ranges is None else ranges
    values = rewards[:, used].double().unflatten(0, (-1, group_size))
    present = ~values.isnan()
    count = present.sum(dim=1, keepdim=True)
    filled = torch.where(present, values, 0.0)
    means = filled.sum(dim=1, keepdim=True) / count
    low = torch.where(present, values, torch.inf).amin(dim=1, keepdim=True)
    high = torch.where(present, values, -torch.inf).amax(dim=1, keepdim=True)
    batch_means = filled.sum(dim=(0, 1)) / present.sum(dim=(0, 1))
    return GroupedRewards(
        centred=torch.where(present & (low < high), values - means, 0.0),
        means=torch.where(count > 0, means, batch_means.nan_to_num(nan=0.0)),
        std=_compute_std(values, present, dim=1),
        scored=present.any(dim=2),
        weights=_rescale(weights[used].double()),
        batch_means=batch_means,
        batch_std=_compute_std(values, present, dim=(0, 1)).reshape(-1),
        ranges=torch.tensor(bounds, dtype=torch.float64, device=rewards.device)[used],
    )


def _rescale(weights: Tensor) -> Tensor:
    """Rescale weights to a maximum of 1, if any is above 0; NaN (never scored) becomes 0."""
    finite = weights.nan_to_num(nan=0.0)
    return finite / finite.max().clamp(min=torch.finfo(finite.dtype).tiny)


def add_terms(terms: Tensor) -> Tensor:
    """Sum over the last dimension; terms that cancel up to rounding give exactly 0."""
    total = terms.sum(dim=-1)
    rounding_error = 1e-12 * terms.abs().sum(dim=-1)
    return torch.where(total.abs() > rounding_error, total, 0.0)


def _compute_std(values: Tensor, present: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Return the unbiased standard deviation over `dim` where `present`; 0 below two values."""
    count = present.sum(dim=dim, keepdim=True)
    filled = torch.where(present, values, 0.0)
    mean = filled.sum(dim=dim, keepdim=True) / count.clamp(min=1)
    squares = torch.where(present, values - mean, 0.0).square().sum(dim=dim, keepdim=True)
    return (squares / (count - 1).clamp(min=1)).sqrt()


def _whiten(values: Tensor, present: Tensor, eps: float) -> Tensor:
    count = present.sum().clamp(min=1)
    mean = torch.where(present, values, 0.0).sum() / count
    return (values - mean) / (_compute_std(values, present, dim=(0, 1)) + eps)
