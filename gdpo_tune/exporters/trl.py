"""TRL: a directory that starts with `trl grpo --config`.

Source: trl/trainer/grpo_config.py, grpo_trainer.py and scripts/grpo.py of TRL 1.16.0.
"""

from __future__ import annotations

from gdpo_tune.exporters import library
from gdpo_tune.exporters.library import Exported, Library, TrainingFiles
from gdpo_tune.exporters.recipe import NEUTRAL, Recipe
from gdpo_tune.exporters.runtime_prompts import build_trl_row

SCALE = {"grpo": "group", "grpo_no_std": "none", "grpo_batch": "batch"}
"""Mode that sums first -> `scale_rewards`."""
LOSSES = ("dapo", "dr_grpo", "grpo", "bnpo", "cispo")
SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}
CORRECTED_KL = {"use_bias_correction_kl": True}
"""Key that Axolotl shares: it pins a TRL before 1.10, whose default is false."""
STEP_LOSSES = ("dapo", "cispo")
"""Losses that are divided by tokens of a whole step. The TRL of Axolotl, and ms-swift, do not count
that an optimizer step has only a part of them."""
LIBRARY = Library("TRL 1.16.0", ("gdpo", *SCALE), LOSSES)


def export(recipe: Recipe) -> Exported:
    """Return the recipe as arguments of TRL's script for GRPO."""
    LIBRARY.check(recipe)
    kwargs = dict(recipe.model.chat_template_kwargs)
    settings: dict[str, object] = {
        "model_name_or_path": recipe.policy,
        **({"model_revision": recipe.model.revision} if recipe.model.revision else {}),
        "dtype": "float32",
        "bf16": recipe.model.dtype != "float32",
        "gradient_checkpointing": recipe.model.gradient_checkpointing != "off",
        **({"chat_template_kwargs": kwargs} if kwargs else {}),
        "datasets": [{"path": "parquet", "data_files": library.PROMPTS_FILE, "split": "train"}],
        "shuffle_dataset": False,
        "reward_funcs": list_reward_functions(recipe),
        "reward_weights": recipe.weights,
        **build_aggregation(recipe),
        **build_algorithm(recipe),
        **build_generation_kwargs(recipe),
        **CORRECTED_KL,
        **build_schedule(recipe),
        **_build_adapters(recipe),
        **build_sampler(recipe, recipe.rollout.vllm_server, "vllm_max_model_length"),
        **build_correction(recipe),
        "output_dir": recipe.name,
    }
    return Exported(
        library=LIBRARY.name,
        file="grpo.yaml",
        text=library.format_yaml(settings, recipe.note, library.START),
        install=library.format_install("trl==1.16.0", recipe.list_extras("peft", "vllm")),
        run=format_run(recipe, "trl grpo --config grpo.yaml --num_processes 1"),
        result=recipe.name,
        training=build_training_files(recipe),
    )


def list_reward_functions(recipe: Recipe) -> list[str]:
    """Return the names of the reward functions, which Axolotl shares."""
    return [f"rewards.{reward.name}_reward" for reward in recipe.rewards]


def build_training_files(recipe: Recipe) -> TrainingFiles:
    """Return how TRL, and what trains with it, gets rewards and prompts."""
    names = [reward.name for reward in recipe.rewards]
    lines = ["REWARDS = build_reward_functions(JUDGE)"]
    lines += [f'{name}_reward = REWARDS["{name}"]' for name in names]
    return TrainingFiles(("build_reward_functions",), "\n".join(lines), build_trl_row)


def format_run(
    recipe: Recipe,
    command: str,
    bf16: str = "--bf16",
    gradient_checkpointing: str = "--gradient_checkpointing",
) -> str:
    """Return the lines that start a command, whose switches are named, in float32 on a CPU."""
    lines = ["gpu=$(python -c 'import torch; print(torch.cuda.is_available())')"]
    flags = ""
    if recipe.model.dtype == "auto":
        flags += f' {bf16} "$gpu"'
    if recipe.model.gradient_checkpointing == "auto":
        flags += f' {gradient_checkpointing} "$gpu"'
    command = f'exec {command}{flags} "$@"'
    return "\n".join([*lines, command] if flags else [command])


def build_aggregation(recipe: Recipe) -> dict[str, object]:
    """Return how rewards become advantages, by names that Axolotl shares."""
    if recipe.mode == "gdpo":  # under which `scale_rewards` has no effect
        return {"multi_objective_aggregation": "normalize_then_sum"}
    return {
        "multi_objective_aggregation": "sum_then_normalize",
        "scale_rewards": SCALE[recipe.mode],
    }


def build_algorithm(recipe: Recipe) -> dict[str, object]:
    """Return samples, loss and lengths, by names that ms-swift and Axolotl share."""
    distance = recipe.get_number("epsilon_high")
    return {
        "num_generations": recipe.group_size,
        "num_iterations": recipe.passes_per_step,
        "beta": recipe.get_number("beta"),
        "epsilon": recipe.get_number("epsilon"),
        # TRL's CISPO takes the bound itself, not its distance from 1.
        "epsilon_high": 1 + distance if recipe.loss == "cispo" else distance,
        "loss_type": recipe.loss,
        "max_completion_length": recipe.training.max_completion_length,
        "temperature": recipe.get_number("temperature"),
        "top_p": 1.0,
    }


def build_generation_kwargs(recipe: Recipe, *, ends: bool = False) -> dict[str, object]:
    """Return what turns off the policy's own settings, with all `ends` for the TRL of Axolotl."""
    own = recipe.own_settings
    kwargs = {k: v for k, v in NEUTRAL.items() if k in own and v is not None}
    if ends and len(recipe.end_tokens) > 1 and recipe.rollout.engine != "vllm":
        kwargs["eos_token_id"] = list(recipe.end_tokens)
    return {"generation_kwargs": kwargs} if kwargs else {}


def build_schedule(recipe: Recipe) -> dict[str, object]:
    """Return steps, batches and the optimizer, by names that ms-swift shares."""
    size = recipe.micro_batches * recipe.training.mini_batches
    return {
        "seed": recipe.seed,
        "max_steps": recipe.updates,
        "per_device_train_batch_size": recipe.micro_batch,
        "gradient_accumulation_steps": recipe.micro_batches,
        # Micro-batches for which samples are drawn at once, if not one optimizer step's.
        **({"steps_per_generation": size} if recipe.training.mini_batches > 1 else {}),
        "learning_rate": recipe.get_number("learning_rate"),
        "lr_scheduler_type": SCHEDULES[recipe.training.lr_schedule],
        "warmup_steps": recipe.warmup,
        "max_grad_norm": recipe.training.max_grad_norm,
        "weight_decay": 0.0,
    }


def build_clip_of_small_gradients(recipe: Recipe) -> dict[str, object]:
    """Return the clip of gradients that are divided by the optimizer steps of a pass.

    Adam takes the same step for gradients of any scale, if they are clipped alike.
    """
    if recipe.loss not in STEP_LOSSES or recipe.training.mini_batches == 1:
        return {}
    return {"max_grad_norm": recipe.training.max_grad_norm / recipe.training.mini_batches}


def _build_adapters(recipe: Recipe) -> dict[str, object]:
    if not recipe.model.lora_rank:
        return {}
    return {
        "use_peft": True,
        "lora_r": recipe.model.lora_rank,
        "lora_alpha": recipe.lora_alpha,
        "lora_dropout": 0.0,
        "lora_target_modules": list(recipe.model.lora_targets),
    }


def build_sampler(recipe: Recipe, server: object, length_key: str) -> dict[str, object]:
    """Return what samples completions, by names that ms-swift shares but for one."""
    rollout = recipe.rollout
    if rollout.engine != "vllm":
        return {"use_vllm": False}
    if rollout.vllm_mode == "server":
        return {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server}
    return {
        "use_vllm": True,
        "vllm_mode": rollout.vllm_mode,
        "vllm_gpu_memory_utilization": rollout.vllm_memory_share,
        length_key: recipe.max_sequence_length,
    }


def build_correction(recipe: Recipe) -> dict[str, object]:
    """Return the treatment of what vLLM rounds differently, by names that Axolotl shares."""
    settings = recipe.rollout
    if settings.engine != "vllm":
        return {}
    key = "vllm_importance_sampling_"
    if settings.importance_sampling == "off":
        return {f"{key}correction": False}
    return {
        f"{key}correction": True,
        f"{key}mode": settings.importance_sampling,
        f"{key}clip_max": settings.importance_sampling_cap,
    }
