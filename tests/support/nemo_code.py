"""The advantages and the loss of NeMo-RL, from its source.

Each function takes the source directory, the parsed content of an exported file and the batch, and
returns what the library computes.
"""

from __future__ import annotations

import enum
import functools
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pydantic
import torch
from torch import Tensor

from tests.support.export_batch import NAMES, Batch, N, StepResult
from tests.support.library_code import Settings, execute_definitions, sum_rewards


@functools.cache
def load_nemo(source: Path) -> dict[str, Any]:
    """Load NeMo-RL's advantage estimators and its loss."""
    algorithms = source / "nemo_rl" / "algorithms"
    space: dict[str, Any] = {
        "torch": torch,
        "enum": enum,
        "Enum": enum.Enum,
        "Optional": typing.Optional,
        "BaseModel": pydantic.BaseModel,
        "LossFunction": object,
        "__name__": __name__,
    }
    functions = ("get_gdpo_reward_component_keys", "calculate_kl", "masked_mean")
    file = algorithms / "utils.py"
    execute_definitions(file, space, *functions, "calculate_baseline_and_std_per_prompt")
    names = ("LossType", "LossInputType", "MetricNormalizer")
    execute_definitions(algorithms / "loss" / "interfaces.py", space, *names)
    names = ("ClippedPGLossConfig", "ClippedPGLossFn")
    execute_definitions(algorithms / "loss" / "loss_functions.py", space, *names)
    names = ("AdvEstimatorConfig", "GRPOAdvantageEstimator", "GDPOAdvantageEstimator")
    execute_definitions(algorithms / "advantage_estimator.py", space, *names)
    return space


def compute_nemo_advantages(
    source: Path, written: Settings, batch: Batch, weights: Iterable[float]
) -> Tensor:
    """Return the advantages of NeMo-RL, [N]; `weights` are those of the rewards."""
    space = load_nemo(source)
    config = space["AdvEstimatorConfig"](**written["grpo"]["adv_estimator"])
    estimator = {"gdpo": "GDPOAdvantageEstimator", "grpo": "GRPOAdvantageEstimator"}[config.name]
    rewards = {f"reward/{name}": batch.rewards[:, k].clone() for k, name in enumerate(NAMES)}
    result = space[estimator](config, None).compute_advantage(
        prompt_ids=torch.arange(N)[:, None] // written["grpo"]["num_generations_per_prompt"],
        rewards=sum_rewards(weights, batch),
        mask=batch.mask.float(),
        repeated_batch=rewards,
    )
    return result[:, 0]


def compute_nemo_loss(
    source: Path, written: Settings, batch: Batch, advantages: Tensor
) -> StepResult:
    """Return the loss of NeMo-RL for advantages [N] of one process."""
    space = load_nemo(source)
    function = space["ClippedPGLossFn"](space["ClippedPGLossConfig"](**written["loss_fn"]))
    policy = written["policy"]
    leaf = batch.present.clone().requires_grad_()
    size = policy["train_global_batch_size"]
    losses = torch.zeros(N // size)

    def shift(values: Tensor) -> Tensor:
        """Put a first position before the others, which the loss leaves out."""
        return torch.cat([torch.zeros(len(values), 1), values], 1)

    for number, rows in enumerate(torch.arange(N).split(size)):
        for micro in rows.split(policy["train_micro_batch_size"]):
            data = {
                "token_mask": shift(batch.mask[micro].float()),
                "sample_mask": torch.ones(len(micro)),
                "advantages": shift(advantages[micro, None].expand(-1, batch.mask.shape[1])),
                "prev_logprobs": shift(batch.old[micro]),
                "generation_logprobs": shift(batch.sampled[micro]),
                "reference_policy_logprobs": shift(batch.reference[micro]),
            }
            seqs, toks = torch.tensor(float(size)), batch.mask[rows].sum()
            loss, _ = function(leaf[micro], data, seqs, toks)
            loss.backward()
            losses[number] += loss.detach()
    assert leaf.grad is not None
    return StepResult(advantages, losses, leaf.grad)
