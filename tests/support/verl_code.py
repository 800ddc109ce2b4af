"""The advantages and the loss of verl, from its source.

Each function takes the source directory, the parsed content of an exported file and the batch, and
returns what the library computes.
"""

from __future__ import annotations

import functools
import types
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.support.export_batch import NAMES, Batch, N, StepResult
from tests.support.library_code import Settings, execute_definitions, sum_rewards


class _Padded(dict[str, Any]):
    """Stand-in for verl's container of tensors, which are padded already."""

    def select(self, *names: str) -> _Padded:
        return _Padded({name: self[name] for name in names})

    def to_padded_tensor(self) -> _Padded:
        return self


class _Metric:
    """Stand-in for a value that verl logs."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    @staticmethod
    def from_dict(*_: Any, **__: Any) -> dict[str, Any]:
        return {}


@functools.cache
def load_verl(source: Path) -> dict[str, Any]:
    """Load verl's advantages, loss and the correction of what its engine sampled."""
    numbers: dict[str, Any] = {"torch": torch}
    file = source / "verl" / "utils" / "torch_functional.py"
    masked = ("masked_sum", "masked_mean", "masked_var", "masked_whiten")
    execute_definitions(file, numbers, *masked)
    space: dict[str, Any] = {
        "torch": torch,
        "np": np,
        "defaultdict": defaultdict,
        "verl_F": types.SimpleNamespace(**numbers),
        "ActorConfig": types.SimpleNamespace,
        "AlgoConfig": type("AlgoConfig", (), {}),
        "tu": None,
        "no_padding_2_padding": lambda values, _: values,
        "AggregationType": types.SimpleNamespace(SUM=0, MEAN=1),
        "Metric": _Metric,
    }
    algorithms = source / "verl" / "trainer" / "ppo" / "core_algos.py"
    execute_definitions(
        algorithms,
        space,
        *("compute_grpo_outcome_advantage", "compute_gdpo_outcome_advantage"),
        *("compute_rloo_outcome_advantage", "agg_loss", "kl_penalty", "kl_penalty_forward"),
        *("compute_policy_loss_vanilla", "compute_policy_loss_cispo"),
    )
    losses = {"vanilla": "compute_policy_loss_vanilla", "cispo": "compute_policy_loss_cispo"}
    space["get_policy_loss_fn"] = lambda name: space[losses[name]]
    execute_definitions(source / "verl" / "workers" / "utils" / "losses.py", space, "ppo_loss")
    space |= {"SAFETY_BOUND": 20.0, "compute_is_metrics": lambda **_: {}}
    correction = source / "verl" / "trainer" / "ppo" / "rollout_corr_helper.py"
    names = ("_parse_rollout_is_threshold", "compute_rollout_correction_weights")
    execute_definitions(correction, space, *names)
    return space


def compute_verl_advantages(
    source: Path, written: Settings, batch: Batch, weights: Iterable[float]
) -> Tensor:
    """Return the advantages of verl, [N]; `weights` are those of the rewards."""
    space, algorithm = load_verl(source), written["algorithm"]
    mask = batch.mask.float()
    total = torch.zeros(mask.shape)
    total[torch.arange(N), batch.lengths - 1] = sum_rewards(weights, batch)
    group_size = written["actor_rollout_ref"]["rollout"]["n"]
    groups = [row // group_size for row in range(N)]
    match algorithm["adv_estimator"]:
        case "gdpo":
            result = space["compute_gdpo_outcome_advantage"](
                torch.zeros_like(mask),
                mask,
                groups,
                config=algorithm,
                non_tensor_batch={
                    name: batch.rewards[:, NAMES.index(name)].numpy()
                    for name in algorithm["gdpo_reward_keys"]
                },
                batch={
                    "prompts": torch.zeros(N, 1),
                    "attention_mask": torch.cat([torch.ones(N, 1), mask], 1).long(),
                },
            )
        case "rloo":
            result = space["compute_rloo_outcome_advantage"](total, mask, groups)
        case _:
            divides = algorithm["norm_adv_by_std_in_grpo"]
            function = space["compute_grpo_outcome_advantage"]
            result = function(total, mask, groups, norm_adv_by_std_in_grpo=divides)
    return result[0][:, 0]


def compute_verl_loss(
    source: Path, written: Settings, batch: Batch, advantages: Tensor
) -> StepResult:
    """Return the loss of verl's actor for advantages [N] of one process."""
    space = load_verl(source)
    actor = written["actor_rollout_ref"]["actor"]
    config = types.SimpleNamespace(**{"loss_scale_factor": None, **actor, "global_batch_info": {}})
    config.get = actor.get
    size = actor["ppo_mini_batch_size"] * written["actor_rollout_ref"]["rollout"]["n"]
    leaf = batch.present.clone().requires_grad_()
    losses = torch.zeros(N // size)
    correction = written["algorithm"].get("rollout_correction")
    weights: dict[str, Tensor] = {}
    if correction:
        ratio = batch.old - batch.sampled
        computed = space["compute_rollout_correction_weights"](ratio, batch.mask, **correction)
        weights = {"rollout_is_weights": computed[0]}
    for number, rows in enumerate(torch.arange(N).split(size)):
        for micro in rows.split(actor["ppo_micro_batch_size_per_gpu"]):
            data = _Padded(
                response_mask=batch.mask[micro],
                old_log_probs=batch.old[micro],
                ref_log_prob=batch.reference[micro],
                advantages=advantages[micro, None] * batch.mask[micro],
                dp_size=1,
                batch_num_tokens=int(batch.mask[rows].sum()),
                global_batch_size=size,
                **{name: value[micro] for name, value in weights.items()},
            )
            loss, _ = space["ppo_loss"](config, {"log_probs": leaf[micro]}, data)
            loss.backward()
            losses[number] += loss.detach()
    assert leaf.grad is not None
    return StepResult(advantages, losses, leaf.grad)
