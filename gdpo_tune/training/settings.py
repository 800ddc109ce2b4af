"""TRL's arguments for one trial: every parameter and every training setting finds its place here.

A step is one batch of samples and `num_iterations` optimizer passes over it, so that the budget,
counted in completions, is the same whatever the number of passes.
"""

from __future__ import annotations

from typing import Any

import torch
from trl.trainer.grpo_config import GRPOConfig

from gdpo_tune.errors import TrialFailure
from gdpo_tune.trials import TrialConfig

_SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}


def trainer_arguments(config: TrialConfig, rewards: tuple[str, ...]) -> GRPOConfig:
    """TRL's arguments; `rewards` gives the order of the weights.

    Raises:
        TrialFailure: the group size does not divide the completions of a step.
    """
    params: dict[str, Any] = dict(config.params)
    settings = config.training
    on_gpu = torch.cuda.is_available()
    passes = int(params["num_iterations"])
    weights = config.reward_weights()
    return GRPOConfig(
        output_dir=str(config.directory),
        seed=config.seed,
        # The parameters of the search.
        num_generations=int(params["group_size"]),
        learning_rate=float(params["learning_rate"]),
        temperature=float(params["temperature"]),
        beta=float(params["beta"]),
        epsilon=float(params["epsilon"]),
        epsilon_high=_upper_clip(params),
        loss_type=str(params["loss_type"]),
        num_iterations=passes,
        reward_weights=[weights[name] for name in rewards],
        # The settings that all trials share.
        max_steps=settings.steps * passes,
        per_device_train_batch_size=settings.completions_per_step,
        max_completion_length=settings.max_completion_length,
        lr_scheduler_type=_SCHEDULES[settings.lr_schedule],
        warmup_steps=round(settings.warmup_share * settings.steps) * passes,
        max_grad_norm=settings.max_grad_norm,
        # What TRL would otherwise do: half precision and recomputation, which cost time on a CPU,
        # an order of prompts that a resumed run could not find again, files and lines of its own.
        bf16=on_gpu,
        gradient_checkpointing=on_gpu,
        use_cpu=not on_gpu,
        dataloader_pin_memory=on_gpu,
        shuffle_dataset=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
    )


def prompts_per_step(config: TrialConfig) -> int:
    """Groups in one step.

    Raises:
        TrialFailure: the group size does not divide the completions of a step.
    """
    group_size = int(config.params["group_size"])
    prompts, rest = divmod(config.training.completions_per_step, group_size)
    if rest:
        raise TrialFailure(
            f"group_size {group_size} does not divide "
            f"completions_per_step {config.training.completions_per_step}"
        )
    return prompts


def _upper_clip(params: dict[str, Any]) -> float:
    """`epsilon_high` is a distance from 1, but TRL's CISPO takes the upper bound itself."""
    distance = float(params["epsilon_high"])
    return 1 + distance if params["loss_type"] == "cispo" else distance
