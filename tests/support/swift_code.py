"""The advantages and the loss of ms-swift, from its source.

Each function takes the source directory, the parsed content of an exported file and the batch, and
returns what the library computes.
"""

from __future__ import annotations

import functools
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.export_batch import Batch, N, StepResult
from tests.support.library_code import Settings, execute_definitions


@functools.cache
def load_swift(source: Path) -> dict[str, Any]:
    """Load ms-swift's advantages and the methods of its trainer that compute the loss."""
    space: dict[str, Any] = {"torch": torch}
    core = source / "swift"
    execute_definitions(core / "utils" / "torch_utils.py", space, "nanstd")
    execute_definitions(core / "rl_core" / "advantage.py", space, "compute_advantages")
    space |= {
        "gather_object": list,
        "nanmin": torch.min,
        "nanmax": torch.max,
        "WINDOW_NORMALIZED_LOSS_TYPES": ["cispo", "dapo", "fipo"],
    }
    file = core / "rlhf_trainers" / "grpo_trainer.py"
    assert "WINDOW_NORMALIZED_LOSS_TYPES = ['cispo', 'dapo', 'fipo']" in file.read_text()
    execute_definitions(
        file,
        space,
        *("_compute_loss_and_metrics", "_undo_gradient_accumulation_scaling"),
        *("_get_rollout_is_correction", "_apply_rollout_importance_sampling"),
        "_compute_sequence_level_ratios",
        inside="GRPOTrainer",
    )
    return space


def compute_swift_advantages(source: Path, written: Settings, batch: Batch, _: object) -> Tensor:
    """Return the advantages of ms-swift, [N]."""
    advantages, _ = load_swift(source)["compute_advantages"](
        batch.rewards,
        torch.tensor(written["reward_weights"]),
        written["num_generations"],
        written["advantage_estimator"],
        written["scale_rewards"],
        written["kl_in_reward"],
    )
    return advantages


def compute_swift_loss(
    source: Path, written: Settings, batch: Batch, advantages: Tensor
) -> StepResult:
    """Return the loss of ms-swift's trainer for advantages [N] of one process."""
    space = load_swift(source)
    leaf = batch.present.clone().requires_grad_()
    accumulated = written["gradient_accumulation_steps"]
    trainer = _build_swift_trainer(space, written, leaf)
    losses = torch.zeros(N // written["per_device_train_batch_size"] // accumulated)
    for number, rows in enumerate(torch.arange(N).split(written["per_device_train_batch_size"])):
        samples = types.SimpleNamespace(
            completion_mask=batch.mask[rows],
            truncated_mask=torch.zeros(len(rows), dtype=torch.bool),
            ref_per_token_logps=batch.reference[rows],
            old_per_token_logps=batch.old[rows],
            rollout_per_token_logps=batch.sampled[rows],
            advantages=advantages[rows, None].expand(-1, batch.mask.shape[1]),
            num_items_in_batch=batch.mask.sum(),
            rows=rows,
        )
        loss, _ = space["_compute_loss_and_metrics"](trainer, None, {}, samples)
        loss = loss / accumulated  # as `training_step` of Transformers does
        loss.backward()
        losses[number // accumulated] += loss.detach()
    assert leaf.grad is not None
    return StepResult(advantages, losses, leaf.grad)


def _build_swift_trainer(space: dict[str, Any], written: Settings, leaf: Tensor) -> Any:
    accumulated = written["gradient_accumulation_steps"]
    process = types.SimpleNamespace(num_processes=1, gather_for_metrics=lambda values: values)
    trainer = types.SimpleNamespace(
        **{name: written[name] for name in ("loss_type", "beta", "max_completion_length")},
        epsilon_low=written["epsilon"],
        epsilon_high=written["epsilon_high"],
        kl_in_reward=written["kl_in_reward"],
        rollout_importance_sampling_mode=written.get("rollout_importance_sampling_mode"),
        rollout_importance_sampling_threshold=written.get("rollout_importance_sampling_threshold"),
        # Defaults of GRPOConfig and of the mixin.
        args=types.SimpleNamespace(
            delta=None, top_entropy_quantile=1.0, gradient_accumulation_steps=accumulated
        ),
        model=types.SimpleNamespace(training=True),
        compute_entropy=False,
        overlong_filter=False,
        log_rollout_offpolicy_metrics=False,
        disable_rollout_importance_sampling=False,
        importance_sampling_level="token",
        off_policy_sequence_mask_delta=None,
        sdar_loss_coef=0.0,
        chord_sft_iterator=None,
        model_accepts_loss_kwargs=False,
        compute_loss_func=None,
        current_gradient_accumulation_steps=accumulated,
        accelerator=process,
        _has_teacher=False,
        _get_per_token_logps_and_entropies=lambda _, __, batch, **___: (leaf[batch.rows], None),
        _compute_rollout_offpolicy_metrics=lambda *_: {},
        _compute_is_correction_metrics=lambda *_: {},
    )
    for name in (
        *("_undo_gradient_accumulation_scaling", "_get_rollout_is_correction"),
        *("_apply_rollout_importance_sampling", "_compute_sequence_level_ratios"),
    ):
        setattr(trainer, name, types.MethodType(space[name], trainer))
    return trainer
