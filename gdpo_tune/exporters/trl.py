"""TRL: a directory that starts with `trl grpo --config`.

Source: trl/trainer/grpo_config.py, grpo_trainer.py and scripts/grpo.py of TRL 1.16.0.
"""

from __future__ import annotations

from gdpo_tune.core.parameters import LOSSES, STEP_LOSSES, TRANSFORMERS_SCHEDULES
from gdpo_tune.core.trl_fields import CORRECTED_KL, select_trl_fields
from gdpo_tune.exporters import library
from gdpo_tune.exporters.library import Exported, Library, TrainingFiles
from gdpo_tune.exporters.runtime_prompts import build_trl_row
from gdpo_tune.exporters.training_setup import NEUTRAL, TrainingSetup

SCALE = {"grpo": "group", "grpo_no_std": "none", "grpo_batch": "batch"}
"""Mode that sums first -> `scale_rewards`."""
LIBRARY = Library("TRL 1.16.0", ("gdpo", *SCALE), LOSSES, takes_trl_fields=True)


def export_trl(setup: TrainingSetup) -> Exported:
    """Return the training as arguments of TRL's script for GRPO."""
    LIBRARY.check(setup)
    kwargs, attention = dict(setup.spec.model.chat_template_kwargs), setup.spec.model.attention
    settings: dict[str, object] = {
        "model_name_or_path": setup.policy,
        **({"model_revision": setup.spec.model.revision} if setup.spec.model.revision else {}),
        "dtype": "float32",
        "bf16": setup.spec.model.dtype != "float32",
        "gradient_checkpointing": setup.spec.model.gradient_checkpointing != "off",
        **({"attn_implementation": attention} if attention != "auto" else {}),
        **({"chat_template_kwargs": kwargs} if kwargs else {}),
        "datasets": [{"path": "parquet", "data_files": library.PROMPTS_FILE, "split": "train"}],
        "shuffle_dataset": False,
        "reward_funcs": list_reward_functions(setup),
        "reward_weights": setup.weights,
        **build_aggregation(setup),
        **build_algorithm(setup),
        **build_generation_kwargs(setup),
        **build_schedule(setup),
        **CORRECTED_KL,
        **select_trl_fields(setup.params),
        **_build_adapters(setup),
        **build_sampler(setup, setup.spec.rollout.vllm_server, "vllm_max_model_length"),
        **build_correction(setup),
        "output_dir": setup.name,
    }
    install = library.format_install("trl==1.16.0", setup.list_extras("peft"))
    return Exported(
        library=LIBRARY.name,
        file="grpo.yaml",
        text=library.format_yaml(settings, setup.note, library.START),
        install=f"{install} pydantic",  # of the settings in `rewards.py`
        run=format_command(setup, "trl grpo --config grpo.yaml --num_processes 1"),
        result=setup.name,
        training=build_training_files(setup),
    )


def list_reward_functions(setup: TrainingSetup) -> list[str]:
    """Return the names of the reward functions, which Axolotl shares."""
    return [f"rewards.{reward.name}_reward" for reward in setup.rewards]


def build_training_files(setup: TrainingSetup) -> TrainingFiles:
    """Return how TRL, and what trains with it, gets rewards and prompts."""
    names = [reward.name for reward in setup.rewards]
    lines = ["REWARDS = build_trl_rewards(SCORER)"]
    lines += [f'{name}_reward = REWARDS["{name}"]' for name in names]
    return TrainingFiles(("build_trl_rewards",), "\n".join(lines), build_trl_row)


def format_command(
    setup: TrainingSetup, command: str, checkpointing: str = "--gradient_checkpointing"
) -> str:
    """Return the lines that start a command in float32 on a CPU; `checkpointing` is its switch."""
    flags = ""
    if setup.spec.model.dtype == "auto":
        flags += ' --bf16 "$gpu"'
    if setup.spec.model.gradient_checkpointing == "auto":
        flags += f' {checkpointing} "$gpu"'
    check = "gpu=$(python -c 'import torch; print(torch.cuda.is_available())')\n" if flags else ""
    return f'{check}exec {command}{flags} "$@"'


def build_aggregation(setup: TrainingSetup) -> dict[str, object]:
    """Return how rewards become advantages, by names that Axolotl shares."""
    if setup.mode == "gdpo":  # under which `scale_rewards` has no effect
        return {"multi_objective_aggregation": "normalize_then_sum"}
    return {"multi_objective_aggregation": "sum_then_normalize", "scale_rewards": SCALE[setup.mode]}


def build_algorithm(setup: TrainingSetup) -> dict[str, object]:
    """Return samples, loss and lengths, by names that ms-swift and Axolotl share."""
    distance = setup.get_number("epsilon_high")
    return {
        "num_generations": setup.group_size,
        "num_iterations": setup.passes_per_step,
        "beta": setup.get_number("beta"),
        "epsilon": setup.get_number("epsilon"),
        # TRL's CISPO takes the bound itself, not its distance from 1.
        "epsilon_high": 1 + distance if setup.loss == "cispo" else distance,
        "loss_type": setup.loss,
        "max_completion_length": setup.spec.training.max_completion_length,
        "temperature": setup.get_number("temperature"),
        "top_p": 1.0,
    }


def build_generation_kwargs(setup: TrainingSetup, *, ends: bool = False) -> dict[str, object]:
    """Return what turns off the policy's own settings, with all `ends` for the TRL of Axolotl."""
    own = setup.own_settings
    kwargs = {k: v for k, v in NEUTRAL.items() if k in own and v is not None}
    if ends and len(setup.end_tokens) > 1 and setup.spec.rollout.engine != "vllm":
        kwargs["eos_token_id"] = list(setup.end_tokens)
    return {"generation_kwargs": kwargs} if kwargs else {}


def build_schedule(setup: TrainingSetup) -> dict[str, object]:
    """Return steps, batches and the optimizer, by names that ms-swift shares."""
    size = setup.gradient_accumulation_steps * setup.spec.training.mini_batches
    return {
        "seed": setup.request.seed,
        "max_steps": setup.optimizer_steps,
        "per_device_train_batch_size": setup.micro_batch_size,
        "gradient_accumulation_steps": setup.gradient_accumulation_steps,
        # Micro-batches for which samples are drawn at once, if not one optimizer step's.
        **({"steps_per_generation": size} if setup.spec.training.mini_batches > 1 else {}),
        "learning_rate": setup.get_number("learning_rate"),
        "lr_scheduler_type": TRANSFORMERS_SCHEDULES[setup.spec.training.lr_schedule],
        "warmup_steps": setup.warmup_optimizer_steps,
        "max_grad_norm": setup.spec.training.max_grad_norm,
        "weight_decay": 0.0,
    }


def build_clip_of_small_gradients(setup: TrainingSetup) -> dict[str, object]:
    """Return the clip of gradients that are divided by the optimizer steps of a pass.

    The TRL of Axolotl, and ms-swift, divide by the tokens of the step in each of its optimizer
    steps, which has only a part of them. Adam takes the same step for gradients of any scale, if
    they are clipped alike.
    """
    if setup.loss not in STEP_LOSSES or setup.spec.training.mini_batches == 1:
        return {}
    return {"max_grad_norm": setup.spec.training.max_grad_norm / setup.spec.training.mini_batches}


def _build_adapters(setup: TrainingSetup) -> dict[str, object]:
    if not setup.spec.model.lora_rank:
        return {}
    return {
        "use_peft": True,
        "lora_r": setup.spec.model.lora_rank,
        "lora_alpha": setup.lora_alpha,
        "lora_dropout": 0.0,
        "lora_target_modules": list(setup.spec.model.lora_targets),
    }


def build_sampler(setup: TrainingSetup, server: object, length_key: str) -> dict[str, object]:
    """Return what samples completions, by names that ms-swift shares but for one."""
    rollout = setup.spec.rollout
    if rollout.engine != "vllm":
        return {"use_vllm": False}
    if rollout.vllm_mode == "server":
        return {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server}
    return {
        "use_vllm": True,
        "vllm_mode": rollout.vllm_mode,
        "vllm_gpu_memory_utilization": rollout.vllm_memory_share,
        length_key: setup.max_sequence_length,
    }


def build_correction(setup: TrainingSetup) -> dict[str, object]:
    """Return the treatment of what vLLM rounds differently, by names that Axolotl shares."""
    settings = setup.spec.rollout
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
