"""verl: a YAML file that its own configuration is composed with by Hydra.

Source: verl/trainer/config/_generated_ppo_trainer.yaml, trainer/config/algorithm.py,
trainer/ppo/core_algos.py and trainer/ppo/ray_trainer.py of verl 0.9.1.
"""

from __future__ import annotations

from gdpo_tune.core.settings import EVERY_LINEAR
from gdpo_tune.exporters.base import (
    REWARDS_FILE,
    Difference,
    Exported,
    Refusals,
    same_everywhere,
    sum_of,
)
from gdpo_tune.exporters.recipe import Recipe
from gdpo_tune.exporters.text import yaml_text

LIBRARY = "verl 0.9.1"
MODES = ("gdpo", "grpo", "grpo_no_std")
AGGREGATION = {
    "dapo": "token-mean",
    "bnpo": "token-mean",
    "cispo": "token-mean",
    "grpo": "seq-mean-token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}
NO_DUAL_CLIP = 1.0e9
"""Of `clip_ratio_c`, which verl sets to 3: a second clip that the training did not have."""
_COMMAND = 'python -m verl.trainer.main_ppo --config-path "$PWD" --config-name verl'


def export(recipe: Recipe) -> Exported:
    """The recipe as a configuration that inherits from verl's `ppo_trainer`.

    Raises:
        ExportError: verl would change or ignore a part of it.
    """
    refusals = Refusals(recipe, LIBRARY)
    refusals.check(
        modes=MODES,
        losses=AGGREGATION,
        schedules=("constant", "cosine"),
        leave_one_out=("grpo_no_std",),
        why_not={"gdpo_no_std": "does not pass norm_adv_by_std_in_grpo on to its GDPO"},
    )
    if recipe.model.revision:
        refusals.add(
            "model.revision",
            recipe.model.revision,
            "verl loads the newest revision, whatever is asked",
            "download that revision, and give its folder with --set policy=",
        )
    refusals.raise_if_any()
    gdpo = recipe.mode == "gdpo"
    reward: dict[str, object] = {
        "custom_reward_function": {"path": REWARDS_FILE, "name": "compute_score"}
    }
    if gdpo:
        reward["reward_manager"] = {"name": "gdpo"}
    tree: dict[str, object] = {
        "hydra": {"searchpath": ["pkg://verl.trainer.config"]},
        "defaults": ["ppo_trainer", "_self_"],
        "algorithm": _algorithm(recipe),
        "reward": reward,
        "data": {
            "train_files": "train.parquet",
            "val_files": "validation.parquet",
            "train_batch_size": recipe.prompts,
            "max_prompt_length": recipe.data.max_prompt_length,
            "max_response_length": recipe.training.max_completion_length,
            "seed": recipe.seed,
        },
        "actor_rollout_ref": {
            "model": _model(recipe),
            "actor": _actor(recipe),
            "ref": {"log_prob_micro_batch_size_per_gpu": recipe.micro_batch},
            "rollout": {
                "name": "vllm",
                "n": recipe.group_size,
                "temperature": recipe.number("temperature"),
                "top_p": 1.0,
                "top_k": -1,
                "tensor_model_parallel_size": 1,
                "gpu_memory_utilization": recipe.rollout.vllm_memory_share,
                "log_prob_micro_batch_size_per_gpu": recipe.micro_batch,
            },
        },
        "trainer": {
            # Its newer trainer does not carry the single rewards that GDPO needs.
            "use_v1": not gdpo,
            "total_training_steps": recipe.training.steps,
            "total_epochs": recipe.training.steps,
            "n_gpus_per_node": 1,
            "val_before_train": False,
            "project_name": "gdpo_tune",
            "experiment_name": recipe.name,
            "logger": ["console"],
        },
    }
    names = ", ".join(f"`{reward.name}`" for reward in recipe.rewards)
    score = (
        f"`compute_score` that returns {names} and their `score` in one dict; `score` is logged, "
        "and GDPO reads the others"
        if gdpo
        else f"`compute_score` that returns {sum_of(recipe)}"
    )
    return Exported(
        library=LIBRARY,
        file="verl.yaml",
        text=yaml_text(tree, (recipe.note, _COMMAND)),
        command=_COMMAND,
        differences=tuple(_differences(recipe)),
        yours={
            "data.train_files, data.val_files": "Parquet files in verl's layout",
            "reward.custom_reward_function.path": f"`{REWARDS_FILE}` with a {score}",
            "trainer.n_gpus_per_node": "your GPUs; they have to divide the completions of a step",
        },
    )


def _algorithm(recipe: Recipe) -> dict[str, object]:
    if recipe.mode == "gdpo":
        return {
            "adv_estimator": "gdpo",
            "gdpo_reward_keys": [reward.name for reward in recipe.rewards],
            "gdpo_reward_weights": recipe.weights,
            "use_kl_in_reward": False,
        }
    return {
        "adv_estimator": "rloo" if recipe.leaves_one_out else "grpo",
        "norm_adv_by_std_in_grpo": recipe.mode == "grpo",
        "use_kl_in_reward": False,
    }


def _actor(recipe: Recipe) -> dict[str, object]:
    beta, cispo = recipe.number("beta"), recipe.loss == "cispo"
    scale = {"loss_scale_factor": recipe.training.max_completion_length}
    return {
        "ppo_mini_batch_size": recipe.prompts,
        "ppo_micro_batch_size_per_gpu": recipe.micro_batch,
        "ppo_epochs": recipe.passes,
        "policy_loss": {"loss_mode": "cispo" if cispo else "vanilla"},
        "clip_ratio": recipe.number("epsilon"),
        # CISPO has no lower clip where it was measured; 1 - 1 is the ratio's own bound.
        "clip_ratio_low": 1.0 if cispo else recipe.number("epsilon"),
        "clip_ratio_high": recipe.upper_clip(absolute_for_cispo=False),
        "clip_ratio_c": NO_DUAL_CLIP,
        "loss_agg_mode": AGGREGATION[recipe.loss],
        **(scale if recipe.loss == "dr_grpo" else {}),
        "use_kl_loss": beta > 0,
        "kl_loss_coef": beta,
        "kl_loss_type": "low_var_kl",
        "entropy_coeff": 0,
        "grad_clip": recipe.training.max_grad_norm,
        "optim": {
            "lr": recipe.number("learning_rate"),
            "lr_scheduler_type": recipe.training.lr_schedule,
            "lr_warmup_steps": recipe.warmup,
            "weight_decay": 0.0,
        },
    }


def _model(recipe: Recipe) -> dict[str, object]:
    model: dict[str, object] = {
        "path": recipe.policy,
        "enable_gradient_checkpointing": recipe.model.gradient_checkpointing != "off",
    }
    if recipe.model.lora_rank:
        everywhere = recipe.model.lora_targets == (EVERY_LINEAR,)
        model |= {
            "lora_rank": recipe.model.lora_rank,
            "lora_alpha": round(recipe.lora_alpha),
            "target_modules": EVERY_LINEAR if everywhere else list(recipe.model.lora_targets),
        }
    return model


def _differences(recipe: Recipe) -> list[Difference]:
    rows = same_everywhere(
        recipe,
        eps="1e-6" if recipe.mode != "grpo_no_std" else "",
        whitening="whitened over tokens: a long completion counts more in mean and deviation than "
        "a short one, so a length reward shifts both; eps 1e-8 under the root",
        missing="not known: give every reward a number",
        precision="bfloat16: `fsdp_config.dtype` and `rollout.dtype` are left at their defaults",
        correction="algorithm.rollout_correction",
    )
    if recipe.mode == "gdpo":
        rows.append(
            Difference(
                "trainer.use_v1",
                "-",
                "false, though it is announced to go: the newer trainer does not pass the single "
                "rewards on, and stops at the first step",
            )
        )
        row = Difference("algorithm.use_kl_in_reward", "-", "has no effect under gdpo: it is false")
        rows.append(row)
    if recipe.number("beta") > 0:
        there = "the same estimator (k3), its logarithm and value clamped at 20 and 10"
        rows.append(Difference("KL to the untrained policy", "k3, not clamped", there))
    return rows
