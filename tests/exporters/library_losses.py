"""The advantages and the losses of the libraries, from their sources.

Each function takes the source directory of a library, the parsed content of an exported file and
the batch, and returns what the library computes.
"""

from __future__ import annotations

import ast
import enum
import functools
import types
import typing
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import torch
from torch import Tensor

from tests.support.export_batch import NAMES, Batch, N, StepResult

Settings = Mapping[str, Any]


def execute_definitions(file: Path, space: dict[str, Any], *names: str, inside: str = "") -> None:
    """Execute functions and classes of a file in `space`, or methods of its class `inside`.

    Decorators, bases that `space` lacks and annotations of functions are left out.
    """
    body = ast.parse(file.read_text()).body
    if inside:
        (body,) = (n.body for n in body if isinstance(n, ast.ClassDef) and n.name == inside)
    taken = [node for node in body if getattr(node, "name", None) in names]
    assert {getattr(node, "name", "") for node in taken} == set(names), file
    for node in (child for definition in taken for child in ast.walk(definition)):
        if isinstance(node, ast.FunctionDef):
            node.decorator_list, node.returns = [], None
            arguments = node.args
            for argument in (*arguments.args, *arguments.kwonlyargs, *arguments.posonlyargs):
                argument.annotation = None
    exec(compile(ast.Module(taken, []), str(file), "exec", dont_inherit=True), space)


def sum_rewards(weights: Iterable[float], batch: Batch) -> Tensor:
    """Return the weighted sum [N] that a reward function returns under modes that sum first."""
    return batch.rewards @ torch.tensor(list(weights), dtype=batch.rewards.dtype)


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
