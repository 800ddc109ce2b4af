"""GDPOTrainer: TRL's GRPOTrainer with our advantages, our per-reward figures and a guard on NaN.

It carries tensors to `compute_advantages` and back. TRL computes advantages inline, so two private
hooks are overridden, and a third one for prompts in a format of their own.

Shapes: N completions over all processes, n of this process, G of one prompt, K rewards.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gdpo_tune.core.errors import NonFiniteError
from gdpo_tune.training.fast_cpu.accumulation import MicroBatchTrainer
from gdpo_tune.training.normalization import compute_advantages
from gdpo_tune.training.scoring import RewardFunction, require_finite


class GDPOTrainer(MicroBatchTrainer):
    """GRPOTrainer whose advantages follow `normalization`, any key of `registry.NORMALIZATIONS`.

    `gamma`, `baseline` and `ranges`, a pair for each reward, are those of `compute_advantages`.
    `reward_weights` of the arguments keep their meaning; `scale_rewards` and
    `multi_objective_aggregation` have no effect. Further step metrics, per reward:
    `reward/<name>/mean`, `.../std` (over the scored completions), `.../dead_groups` (share of
    groups whose scored rewards are all equal) and `.../share` (of |w_k sigma_k|, sigma_k the pooled
    standard deviation within groups; the shares of all rewards sum to 1).

    Raises:
        NonFiniteError: NaN or inf in the loss, or returned by a reward function (None is fine, it
            means not scored), or an infinite or NaN gradient norm.
    """

    def __init__(
        self,
        *,
        normalization: str,
        reward_funcs: Sequence[RewardFunction],
        gamma: float = 0.0,
        baseline: str = "group_mean",
        ranges: Sequence[tuple[float, float]] | None = None,
        encode: Callable[[Sequence[str]], list[list[int]]] | None = None,
        **arguments: Any,
    ) -> None:
        """
        Args:
            normalization: of the advantages.
            reward_funcs: in TRL's form.
            gamma: saturation exponent, as in `compute_advantages`.
            baseline: as there.
            ranges: lowest and highest value of each reward, in their order; None: not known.
            encode: prompts to the tokens that the policy reads; None: the tokenizer does it.
            arguments: TRL's.
        """
        self.normalization = normalization
        self.gamma = gamma
        self.baseline = baseline
        self.ranges = ranges
        self._encode = encode
        self._rewards: Tensor | None = None
        guarded: Any = [self._guarded(func) for func in reward_funcs]
        super().__init__(reward_funcs=guarded, **arguments)

    @property
    def policy(self) -> Any:
        """What is trained, without the wrapper of several processes."""
        return self.accelerator.unwrap_model(self.model)

    def _tokenize_prompts(self, prompts: list[Any]) -> tuple[Any, ...]:
        if self._encode is None:
            return super()._tokenize_prompts(prompts)
        return self._encode(prompts), None, {}  # neither images nor what goes with them

    def _calculate_rewards(self, *arguments: Any, **keywords: Any) -> Tensor:
        rewards: Tensor = super()._calculate_rewards(*arguments, **keywords)
        self._rewards = rewards
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        rewards = self._rewards
        assert rewards is not None, "TRL no longer calls _calculate_rewards"
        self._rewards = None
        network: Any = self.model
        mode = "train" if network.training else "eval"
        group_size: Any = self.num_generations if mode == "train" else self.num_generations_eval
        weights = self.reward_weights.to(rewards.device)
        advantages = compute_advantages(
            rewards,
            weights,
            group_size,
            self.normalization,
            gamma=self.gamma,
            baseline=self.baseline,
            ranges=self.ranges,
        )
        # `rewards` are those of all processes, adjacent in the order of the processes.
        first = self.accelerator.process_index * len(inputs)
        output["advantages"] = advantages[first : first + len(inputs)]
        logged: Any = self._logs["advantages"]
        logged.extend(advantages.tolist())
        for name, value in reward_metrics(
            rewards, weights, group_size, self.reward_func_names
        ).items():
            self._metrics[mode][name].append(value)
        return output

    def compute_loss(self, *arguments: Any, **keywords: Any) -> Tensor:
        """TRL's loss, refused when it is not a number."""
        loss: Tensor = super().compute_loss(*arguments, **keywords)
        if not bool(torch.isfinite(loss)):
            raise NonFiniteError(f"loss is {loss.item()} at {self._when()}")
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's log, refused when the gradient norm is not a number."""
        norm = logs.get("grad_norm", 0.0)
        if not math.isfinite(norm):
            raise NonFiniteError(f"gradient norm is {norm} at {self._when(done=1)}")
        super().log(logs, start_time)

    def _guarded(self, func: RewardFunction) -> RewardFunction:
        """The same function, refusing NaN before TRL could take it for "not scored"."""

        @functools.wraps(func)
        def guarded(*arguments: Any, **keywords: Any) -> Sequence[float | None]:
            values = func(*arguments, **keywords)
            name = getattr(func, "__name__", type(func).__name__)
            require_finite(values, f"reward {name}", f"at {self._when()}")
            return values

        return guarded

    def _when(self, done: int = 0) -> str:
        return f"step {(self.state.global_step - done) // self.num_iterations + 1}"


def reward_metrics(
    rewards: Tensor, weights: Tensor, group_size: int, names: Sequence[str]
) -> dict[str, float]:
    """Per-reward figures of one generation batch.

    Args:
        rewards: [N, K], NaN = not scored.
        weights: [K].
        group_size: G, divides N.
        names: K names.

    Returns:
        `reward/<name>/mean|std|dead_groups|share`. What is undefined, such as the mean of a reward
        that scored nothing, is left out; dead groups are a share of those with a scored reward.
    """
    values = rewards.double()
    grouped = values.unflatten(0, (-1, group_size))
    present = ~grouped.isnan()
    seen = present.any(dim=1)
    centred = torch.nan_to_num(grouped - grouped.nanmean(dim=1, keepdim=True))
    dead = seen & ~((centred != 0).any(dim=1))
    freedom = (present.sum(dim=(0, 1)) - seen.sum(dim=0)).clamp(min=1)
    pull = weights.double().abs() * (centred.square().sum(dim=(0, 1)) / freedom).sqrt()
    total = pull.sum().clamp(min=torch.finfo(torch.float64).tiny)
    metrics: dict[str, float] = {}
    for k, name in enumerate(names):
        scored = values[:, k][~values[:, k].isnan()]
        metrics[f"reward/{name}/share"] = float(pull[k] / total)
        if len(scored):
            metrics[f"reward/{name}/mean"] = float(scored.mean())
            metrics[f"reward/{name}/dead_groups"] = float(dead[:, k].sum() / seen[:, k].sum())
        if len(scored) > 1:
            metrics[f"reward/{name}/std"] = float(scored.std())
    return metrics
