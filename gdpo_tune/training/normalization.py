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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gdpo_tune.core import registry
from gdpo_tune.core.errors import NonFiniteError


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
    batch_means: Tensor
    """[K] mean over every scored completion; NaN if there is none."""
    batch_std: Tensor
    """[K] unbiased standard deviation over every scored completion; 0 for fewer than two."""
    ranges: Tensor
    """[K, 2] lowest and highest value that the reward can have; infinite where not known."""


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
    """Advantages of one generation batch.

    Args:
        rewards: [N, K], the completions of one prompt adjacent; NaN = not scored.
        weights: [K], finite, not negative, at least one above 0; only ratios matter.
        group_size: G, completions of one prompt; divides N.
        mode: a key of `registry.NORMALIZATIONS`.
        eps: added to every standard deviation that divides; above 0.
        gamma: saturation exponent in [0, 1], see `unsaturated_weights`.
        baseline: `group_mean`, or `leave_one_out`, see `leave_one_out_factor`. This and `gamma`
            have no effect under a mode whose `ModeInfo.ignores` names them.
        ranges: K pairs (lowest, highest) of what a reward can be, infinite where it is not known;
            None: no range is known.

    Returns:
        [N] in the dtype and on the device of `rewards`; always finite; an empty batch gives [0].

    Raises:
        NonFiniteError: a reward is infinite.
        ValueError: shapes, group size or weights that make no sense, or `gamma` above 0 while the
            range of a reward is not known.
        KeyError: unknown mode.
    """
    info = registry.NORMALIZATIONS[mode]
    mode_function: Callable[[GroupedRewards, float], Tensor] = registry.load(info.target)
    _check(rewards, weights, group_size, eps)
    if rewards.shape[0] == 0:
        return rewards.new_zeros(0)
    groups = _group(rewards, weights, group_size, ranges)
    if gamma > 0 and "gamma" not in info.ignores:
        groups = replace(groups, weights=unsaturated_weights(groups, gamma))
    advantages = mode_function(groups, eps)
    if baseline == "leave_one_out" and "baseline" not in info.ignores:
        advantages = advantages * leave_one_out_factor(groups)
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


def dvao(groups: GroupedRewards, eps: float) -> Tensor:
    """GDPO's terms, averaged by their spread in the group: `sum_k w_k s_k A_k / sum_l w_l s_l`.

    `A_k = (r_k - mean_group(r_k)) / (s_k + eps)`, `s_k = std_group(r_k)`; nothing is whitened, and
    `eps` is added to the divisor too. An average of the A_k, hence within their bounds. Because
    `s_k A_k` is the centred reward, the direction in a group is GRPO's: only `w_k` times the
    spread counts. A group without any spread gets 0.

    Source: DVAO, arXiv 2605.25604. The weights w_k are ours; all 1 gives the paper's form.
    """
    spread = groups.std * groups.weights
    terms = groups.centred / (groups.std + eps) * spread
    return _sum(terms) / (spread.sum(dim=2) + eps)


def saw(groups: GroupedRewards, eps: float) -> Tensor:
    """GDPO with each weight multiplied by `std_k / |mean_k|` over the batch.

    That is the coefficient of variation, a sign of how much is left to learn. The mean counts from
    the bottom of the reward's range, where that is known: in [-3, 3] a reward would else weigh
    without bound as its mean crosses 0. The coefficients' sum, by which the paper divides, cancels.

    A reward that is the same in the whole batch weighs 0. `eps` is added to `|mean_k|`: a mean of 0
    with spread, which a reward of unknown range can have, gives a weight that is finite, if so
    large that the others vanish beside it.

    Source: SAW, arXiv 2606.07705, the form for GDPO; the shift of the mean is in the authors' code.
    The weights w_k are ours; all 1 gives the paper's form.
    """
    lowest = groups.ranges[:, 0]
    means = groups.batch_means - torch.where(lowest.isfinite(), lowest, 0.0)
    weights = groups.weights * groups.batch_std / (means.abs() + eps)
    return gdpo(replace(groups, weights=_rescaled(weights)), eps)


def unsaturated_weights(groups: GroupedRewards, gamma: float) -> Tensor:
    """`w_k (1 - s_k)^gamma`, [K], maximum 1: a reward loses weight as it nears its top.

    `s_k = (mean_batch(r_k) - lowest_k) / (highest_k - lowest_k)`, held within [0, 1]. A reward that
    is at its top in the whole batch weighs 0, which changes nothing, since it is constant.

    Raises:
        ValueError: the range of a reward is not known, or empty.

    Source: SA-MRPO. gamma = 0 is GDPO.
    """
    lowest, highest = groups.ranges.unbind(dim=1)
    width = highest - lowest
    if not bool((width.isfinite() & (width > 0)).all()):
        raise ValueError(f"gamma = {gamma:g} needs to know the range of every reward with a weight")
    saturation = ((groups.batch_means - lowest) / width).clamp(0.0, 1.0)
    return _rescaled(groups.weights * (1.0 - saturation) ** gamma)


def leave_one_out_factor(groups: GroupedRewards) -> Tensor:
    """What turns `r - mean of the group` into `r - mean of the others`: `n / (n - 1)`, [P, 1].

    n is the number of scored completions in the group. One factor serves every mode that does not
    whiten, because each is linear in the centred rewards of a group; whitening divides it out.

    Source: RLOO, arXiv 2402.14740.
    """
    count = groups.scored.sum(dim=1, keepdim=True).double()
    return count / (count - 1).clamp(min=1)


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


def _group(
    rewards: Tensor,
    weights: Tensor,
    group_size: int,
    ranges: Sequence[tuple[float, float]] | None,
) -> GroupedRewards:
    used = weights > 0
    known = [registry.UNKNOWN_RANGE] * len(weights) if ranges is None else ranges
    values = rewards[:, used].double().unflatten(0, (-1, group_size))
    kept = weights[used].double()
    present = ~values.isnan()
    count = present.sum(dim=1, keepdim=True)
    filled = torch.where(present, values, 0.0)
    means = filled.sum(dim=1, keepdim=True) / count
    low = torch.where(present, values, torch.inf).amin(dim=1, keepdim=True)
    high = torch.where(present, values, -torch.inf).amax(dim=1, keepdim=True)
    centred = torch.where(present & (low < high), values - means, 0.0)
    batch_means = filled.sum(dim=(0, 1)) / present.sum(dim=(0, 1))
    return GroupedRewards(
        centred=centred,
        means=torch.where(count > 0, means, batch_means.nan_to_num(nan=0.0)),
        std=_std(values, present, dim=1),
        scored=present.any(dim=2),
        weights=kept / kept.max(),
        batch_means=batch_means,
        batch_std=_std(values, present, dim=(0, 1)).reshape(-1),
        ranges=torch.tensor(known, dtype=torch.float64, device=rewards.device)[used],
    )


def _rescaled(weights: Tensor) -> Tensor:
    """Weights with a maximum of 1, if any is above 0; NaN, of a reward never scored, becomes 0."""
    known = weights.nan_to_num(nan=0.0)
    return known / known.max().clamp(min=torch.finfo(known.dtype).tiny)


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
