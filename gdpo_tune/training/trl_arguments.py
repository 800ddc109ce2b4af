"""TRL's arguments for one trial, from every parameter and every training setting.

A step is one batch of samples and `num_iterations` passes over it, so that the budget, counted in
completions, does not depend on the number of passes. A pass is one optimizer step for each
mini-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from trl.trainer.grpo_config import GRPOConfig

from gdpo_tune.core.errors import TrialFailure
from gdpo_tune.core.parameters import TRANSFORMERS_SCHEDULES
from gdpo_tune.core.settings import ModelSettings
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.core.trl_fields import CORRECTED_KL, select_trl_fields
from gdpo_tune.policies.load_policy import measure_policy, resolve_policy
from gdpo_tune.training import distributed
from gdpo_tune.training.distributed import build_sharding_arguments, set_precision
from gdpo_tune.training.fast_cpu import MOST_PARAMETERS
from gdpo_tune.training.training_state import ADAM_8BIT


def build_trainer_arguments(
    config: TrialConfig, rewards: tuple[str, ...], engine: Mapping[str, Any] | None = None
) -> GRPOConfig:
    """Build TRL's arguments; `engine` are further ones, for the engine that samples.

    Raises:
        TrialFailure: the completions of a step do not divide into groups, into mini-batches or
            among the processes.
    """
    params: dict[str, Any] = dict(config.params)
    settings = config.training
    passes, weights = int(params["num_iterations"]), config.get_reward_weights()
    own, mini_batches = _divide_step(config)
    updates = config.updates_per_step
    arguments = GRPOConfig(
        num_generations=int(params["group_size"]),
        learning_rate=float(params["learning_rate"]),
        temperature=float(params["temperature"]),
        beta=float(params["beta"]),
        epsilon=float(params["epsilon"]),
        # A distance from 1, but for CISPO TRL takes the bound itself.
        epsilon_high=float(params["epsilon_high"]) + (params["loss_type"] == "cispo"),
        loss_type=str(params["loss_type"]),
        num_iterations=passes,
        reward_weights=[weights[name] for name in rewards],
        max_steps=settings.steps * updates,
        # TRL gets whole mini-batches, which `MicroBatchTrainer` divides.
        per_device_train_batch_size=own,
        gradient_accumulation_steps=1,
        steps_per_generation=mini_batches,
        max_completion_length=settings.max_completion_length,
        lr_scheduler_type=TRANSFORMERS_SCHEDULES[settings.lr_schedule],
        warmup_steps=settings.warmup_steps * updates,
        # Below 1, another policy would sample than the one that is trained.
        top_p=1.0,
        # TRL loads the reference of the KL from the same files. Without a map it goes where the
        # policy is; by default what the GPU has no room for would stay on the CPU, and be slow.
        model_init_kwargs={"device_map": None, "revision": config.model.revision or "main"},
        **build_common_arguments(config),
        **(CORRECTED_KL | select_trl_fields(params)),
        **(engine or {}),
    )
    set_precision(arguments)
    return arguments


def build_common_arguments(config: TrialConfig) -> dict[str, Any]:
    """Build the arguments that trainings on rewards and on demonstrations have in common.

    TRL's defaults cost time on a CPU (half precision, recomputation), shuffle prompts in a way that
    a resumed run cannot repeat, and write files and lines.
    """
    on_gpu = torch.cuda.is_available()
    return {
        "output_dir": str(config.directory),
        "seed": config.seed,
        "max_grad_norm": config.training.max_grad_norm,
        "bf16": uses_bfloat16(config),
        "gradient_checkpointing": recomputes_activations(config.model),
        "use_cpu": not on_gpu,
        "dataloader_pin_memory": on_gpu,
        "shuffle_dataset": False,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1,
        **(build_sharding_arguments() if config.sharded else {}),
        **({"optim": ADAM_8BIT} if config.training.optimizer == "adamw_8bit" else {}),
    }


def uses_bfloat16(config: TrialConfig) -> bool:
    """Return whether a trial in this process computes in bfloat16."""
    if config.model.dtype != "auto":
        return config.model.dtype == "bfloat16"
    if torch.cuda.is_available():
        # Older GPUs, such as T4 and V100, only emulate it, and Transformers and vLLM refuse them.
        return torch.cuda.is_bf16_supported(including_emulation=False)
    is_on_disk = Path(resolve_policy(config.policy)).exists()
    shapes = measure_policy(config.policy) if is_on_disk else None
    is_large = shapes is None or shapes.parameters > MOST_PARAMETERS
    return is_large and multiplies_bfloat16_faster()


def multiplies_bfloat16_faster() -> bool:
    """Return whether this CPU has instructions for bfloat16: 2.2 times as fast with AVX-512 BF16.

    A CPU without them computes in float32 and converts, which takes longer than float32 alone.
    """
    cpu: Any = torch.cpu
    return cpu._is_avx512_bf16_supported() or cpu._is_amx_tile_supported()


def choose_weights_dtype(config: TrialConfig) -> torch.dtype:
    """Choose the type of a policy's weights: bfloat16 if they are not trained, else float32."""
    frozen = bool(config.model.lora_rank)
    return torch.bfloat16 if frozen and uses_bfloat16(config) else torch.float32


def recomputes_activations(settings: ModelSettings) -> bool:
    """Return whether the backward pass of a trial in this process recomputes activations."""
    if settings.gradient_checkpointing == "auto":
        return torch.cuda.is_available()
    return settings.gradient_checkpointing == "on"


def count_prompts_per_step(config: TrialConfig) -> int:
    """Return the number of groups in one step.

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


def _divide_step(config: TrialConfig) -> tuple[int, int]:
    """Return completions of a mini-batch in one process, and mini-batches of a pass."""
    settings = config.training
    prompts, workers = count_prompts_per_step(config), distributed.count_processes()
    if prompts % workers:  # every process samples as many whole groups
        raise TrialFailure(
            f"{prompts} prompts a step (completions_per_step / group_size) do not divide among "
            f"{workers} workers"
        )
    mini_batch = settings.mini_batch_size or settings.completions_per_step
    mini_batches, rest = divmod(settings.completions_per_step, mini_batch)
    if rest or mini_batch % workers:
        raise TrialFailure(
            f"mini_batch_size {mini_batch} does not divide the {settings.completions_per_step} "
            f"completions of a step into equal parts for {workers} workers"
        )
    return mini_batch // workers, mini_batches
