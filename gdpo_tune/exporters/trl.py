"""TRL: a directory that starts with `trl grpo --config`.

Source: trl/trainer/grpo_config.py, grpo_trainer.py and scripts/grpo.py of TRL 1.16.0.
"""

from __future__ import annotations

from typing import Any

from gdpo_tune.exporters import base, common_differences
from gdpo_tune.exporters.glue.trl_rewards import build_row
from gdpo_tune.exporters.recipe import Recipe

LIBRARY = "TRL 1.16.0"
SCALE = {"grpo": "group", "grpo_no_std": "none", "grpo_batch": "batch"}
"""Mode that sums first -> `scale_rewards`."""
LOSSES = ("dapo", "dr_grpo", "grpo", "bnpo", "cispo")
SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}
CORRECTED_KL = {"use_bias_correction_kl": True}
"""Key that Axolotl shares: it pins a TRL before 1.10, whose default is false."""
STEP_LOSSES = ("dapo", "cispo")
"""Losses that are divided by tokens of a whole step. The TRL of Axolotl, and ms-swift, do not count
that an optimizer step has only a part of them."""
NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("min_p", "epsilon_cutoff", "eta_cutoff"), 0.0),
    **dict.fromkeys(("typical_p", "encoder_repetition_penalty", "guidance_scale"), 1.0),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0),
    **dict.fromkeys(("min_length", "min_new_tokens"), 0),
    **dict.fromkeys(("num_beams", "num_return_sequences"), 1),
    **{key: [] for key in ("suppress_tokens", "begin_suppress_tokens")},
    **dict.fromkeys(("top_h", "bad_words_ids", "sequence_bias", "forced_eos_token_id")),
    **dict.fromkeys(("exponential_decay_length_penalty", "stop_strings", "max_time")),
}
"""Setting that `generate` of Transformers reads from the policy if a call leaves it out -> its
neutral value; None if it has none."""
MISSING = "counts as a raw 0, which is biased: advantages differ by up to 0.5 (measured)"
MICRO_BATCHES = "tokens of a micro-batch: the gradient differs by 11 % (measured)"


def export(recipe: Recipe) -> base.Exported:
    """Return the recipe as arguments of TRL's script for GRPO."""
    base.check_support(recipe, LIBRARY, modes=("gdpo", *SCALE), losses=LOSSES)
    kwargs = dict(recipe.model.chat_template_kwargs)
    settings: dict[str, object] = {
        "model_name_or_path": recipe.policy,
        **({"model_revision": recipe.model.revision} if recipe.model.revision else {}),
        "dtype": "float32",
        "bf16": recipe.model.dtype != "float32",
        "gradient_checkpointing": recipe.model.gradient_checkpointing != "off",
        **({"chat_template_kwargs": kwargs} if kwargs else {}),
        "datasets": [{"path": "parquet", "data_files": base.PROMPTS_FILE, "split": "train"}],
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
    return base.Exported(
        library=LIBRARY,
        file="grpo.yaml",
        text=base.format_yaml(settings, recipe.note, base.START),
        install=base.format_install("trl==1.16.0", recipe.list_extras("peft", "vllm")),
        run=format_run(recipe, "trl grpo --config grpo.yaml --num_processes 1"),
        differences=_list_differences(recipe),
        to_supply={},
        result=recipe.name,
        training=build_training_files(recipe),
    )


def list_reward_functions(recipe: Recipe) -> list[str]:
    """Return the names of the reward functions, which Axolotl shares."""
    return [f"rewards.{reward.name}_reward" for reward in recipe.rewards]


def build_training_files(recipe: Recipe) -> base.TrainingFiles:
    """Return how TRL, and what trains with it, gets rewards and prompts."""
    names = [reward.name for reward in recipe.rewards]
    return base.TrainingFiles(
        glue={"trl_rewards": ("build_reward_function",)},
        ending="\n".join(f'{name}_reward = build_reward_function("{name}")' for name in names),
        build_row=build_row,
    )


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


def list_own_settings(recipe: Recipe) -> list[str]:
    """Return the keys of `NEUTRAL` that the policy's files set, or may set; vLLM takes none."""
    own = recipe.own_decoding
    if recipe.rollout.engine == "vllm":
        return []
    return [k for k, v in NEUTRAL.items() if own is None or own.get(k) not in (None, v)]


def build_generation_kwargs(recipe: Recipe, *, ends: bool = False) -> dict[str, object]:
    """Return what turns off the policy's own settings, with all `ends` for the TRL of Axolotl."""
    own = list_own_settings(recipe)
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


def describe_small_gradients(recipe: Recipe) -> str:
    """Describe what divides the loss of an optimizer step with a part of the samples."""
    return (
        f"tokens of the whole step, so gradients are {recipe.training.mini_batches} times smaller. "
        "`max_grad_norm` is divided by that, too: Adam takes the same steps, but for its eps"
    )


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


def _list_differences(recipe: Recipe) -> list[base.Difference]:
    rows = [
        *list_shared_differences(recipe),
        *list_process_differences(recipe, "per_device_train_batch_size"),
        *common_differences.list_order_differences(recipe),
    ]
    if recipe.mode == "gdpo":
        ours = "no such key"
        theirs = "has no effect beside `multi_objective_aggregation`, without a warning"
        rows.append(base.Difference("`scale_rewards`", ours, theirs))
    return rows


def list_process_differences(recipe: Recipe, key: str) -> list[base.Difference]:
    """Return the difference of a library whose `key` is the micro-batch of one process."""
    ours = f"{recipe.training.completions_per_step} in one process"
    theirs = (
        f"{key} x gradient_accumulation_steps x processes: divide the first by the number of "
        "processes"
    )
    return [base.Difference("completions of a step", ours, theirs)]


def list_shared_differences(recipe: Recipe, step_tokens: str = "") -> list[base.Difference]:
    """Return the differences of TRL and of libraries that train with it.

    `step_tokens` is as in `list_common_differences`.
    """
    forced = [f"`{key}`" for key in list_own_settings(recipe) if NEUTRAL[key] is None]
    theirs = f"applies {', '.join(forced)}: remove them from its `generation_config.json`"
    row = base.Difference("sampling by the policy's own files", "ignored", theirs)
    rows = [row] if forced and recipe.own_decoding else []
    return rows + common_differences.list_common_differences(
        recipe,
        eps="",
        whitening="",
        missing=MISSING if recipe.sums_first else "",
        bnpo=MICRO_BATCHES,
        step_tokens=step_tokens,
        follows_device=True,
        unanimous="0.0004",
    )
