"""TRL: a YAML file for `trl grpo --config`.

Source: trl/trainer/grpo_config.py, grpo_trainer.py and scripts/grpo.py of TRL 1.16.0.
"""

from __future__ import annotations

from gdpo_tune.exporters.base import REWARDS_FILE, Difference, Exported, Refusals, same_everywhere
from gdpo_tune.exporters.recipe import Recipe
from gdpo_tune.exporters.text import yaml_text

LIBRARY = "TRL 1.16.0"
SCALE = {"grpo": "group", "grpo_no_std": "none", "grpo_batch": "batch"}
"""Mode that sums first -> `scale_rewards`."""
LOSSES = ("dapo", "dr_grpo", "grpo", "bnpo", "cispo")
SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}


def export(recipe: Recipe) -> Exported:
    """The recipe as arguments of TRL's script for GRPO.

    Raises:
        ExportError: TRL would change or ignore a part of it.
    """
    refusals = Refusals(recipe, LIBRARY)
    refusals.check(modes=("gdpo", *SCALE), losses=LOSSES)
    refusals.raise_if_any()
    tree: dict[str, object] = {
        "model_name_or_path": recipe.policy,
        **({"model_revision": recipe.model.revision} if recipe.model.revision else {}),
        "dtype": "float32",
        "bf16": recipe.model.dtype != "float32",
        "gradient_checkpointing": recipe.model.gradient_checkpointing != "off",
        "dataset_name": "your/prompts",
        "reward_funcs": [f"rewards.{reward.name}" for reward in recipe.rewards],
        "reward_weights": recipe.weights,
        **aggregation(recipe),
        **algorithm(recipe),
        **schedule(recipe),
        **_adapters(recipe),
        **engine(recipe),
        "output_dir": recipe.name,
    }
    return Exported(
        library=LIBRARY,
        file="grpo.yaml",
        text=yaml_text(tree, (recipe.note, "trl grpo --config grpo.yaml")),
        command="trl grpo --config grpo.yaml",
        differences=(*differences(recipe), *_advice(recipe)),
        yours={
            "dataset_name": "a data set with a column `prompt`, and what your rewards read",
            "reward_funcs": f"one function a reward, in this order, in `{REWARDS_FILE}`",
        },
    )


def aggregation(recipe: Recipe) -> dict[str, object]:
    """How rewards become advantages. `scale_rewards` has no effect under GDPO and is left out."""
    if recipe.mode == "gdpo":
        return {"multi_objective_aggregation": "normalize_then_sum"}
    return {
        "multi_objective_aggregation": "sum_then_normalize",
        "scale_rewards": SCALE[recipe.mode],
    }


def algorithm(recipe: Recipe) -> dict[str, object]:
    """What the libraries that are built on TRL call by the same names."""
    return {
        "num_generations": recipe.group_size,
        "num_iterations": recipe.passes,
        "beta": recipe.number("beta"),
        "epsilon": recipe.number("epsilon"),
        # TRL's CISPO takes the bound itself, not its distance from 1.
        "epsilon_high": recipe.upper_clip(absolute_for_cispo=True),
        "loss_type": recipe.loss,
        "max_completion_length": recipe.training.max_completion_length,
        "temperature": recipe.number("temperature"),
        "top_p": 1.0,
    }


def schedule(recipe: Recipe) -> dict[str, object]:
    """What transformers' TrainingArguments are told: steps, batches, optimizer."""
    return {
        "seed": recipe.seed,
        "max_steps": recipe.updates,
        "per_device_train_batch_size": recipe.micro_batch,
        "gradient_accumulation_steps": recipe.micro_batches,
        "learning_rate": recipe.number("learning_rate"),
        "lr_scheduler_type": SCHEDULES[recipe.training.lr_schedule],
        "warmup_steps": recipe.warmup,
        "max_grad_norm": recipe.training.max_grad_norm,
        "weight_decay": 0.0,
    }


def engine(recipe: Recipe) -> dict[str, object]:
    """What samples completions."""
    if recipe.rollout.engine != "vllm":
        return {"use_vllm": False}
    share: dict[str, object] = {
        "vllm_gpu_memory_utilization": recipe.rollout.vllm_memory_share,
        "vllm_max_model_length": recipe.longest,
    }
    server: dict[str, object] = {"vllm_server_base_url": recipe.rollout.vllm_server}
    return {
        "use_vllm": True,
        "vllm_mode": recipe.rollout.vllm_mode,
        **(server if recipe.rollout.vllm_mode == "server" else share),
    }


def differences(recipe: Recipe) -> list[Difference]:
    """What TRL computes otherwise, and so do those that are built on it."""
    missing = "counts as a raw 0, which is biased" if recipe.sums_first else ""
    return same_everywhere(recipe, eps="", whitening="", missing=missing)


def _advice(recipe: Recipe) -> list[Difference]:
    rows = [
        Difference(
            "completions of a step",
            f"{recipe.training.completions_per_step} in one process",
            "per_device_train_batch_size x gradient_accumulation_steps x processes: divide the "
            "first by the number of processes",
        ),
        Difference("order of the prompts", "fixed by the seed", "shuffled by the seed"),
    ]
    if recipe.mode == "gdpo":
        own = "one of the modes, which excludes the others"
        there = "a switch of its own; `scale_rewards` beside it has no effect, and nothing says so"
        rows.append(Difference("normalization", own, there))
    if recipe.loss == "bnpo":
        own = "tokens of the whole step"
        rows.append(Difference("loss_type bnpo averages over", own, "tokens of a micro-batch"))
    return rows


def _adapters(recipe: Recipe) -> dict[str, object]:
    if not recipe.model.lora_rank:
        return {}
    return {
        "use_peft": True,
        "lora_r": recipe.model.lora_rank,
        "lora_alpha": round(recipe.lora_alpha),
        "lora_dropout": 0.0,
        "lora_target_modules": list(recipe.model.lora_targets),
    }
