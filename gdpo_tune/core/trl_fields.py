"""Fields of TRL's GRPOConfig: those that `space: {trl: ...}` takes, and why it takes no others.

The spec imports neither torch nor TRL, so their names stand here; a test compares them with TRL's
own class.
"""

from __future__ import annotations

from gdpo_tune.core.parameters import LOSSES, ParameterInfo
from gdpo_tune.core.text import join_names, suggest
from gdpo_tune.core.trials import Params, ParamValue

TRL_PREFIX = "trl."
NO_LIMIT = 1e30
"""Value of a bound that nothing reaches, where TRL has None."""
ITERATIONS = f"{TRL_PREFIX}max_tool_calling_iterations"
TRL_FIELDS: dict[str, ParameterInfo] = {
    "trl.delta": ParameterInfo(
        "float",
        NO_LIMIT,
        "upper bound of the ratio where the advantage is negative; at less than "
        "1 + `epsilon_high` where it is positive",
        low=1,
        open_low=True,
        needs=("loss_type", tuple(loss for loss in LOSSES if loss != "cispo")),
    ),
    "trl.importance_sampling_level": ParameterInfo(
        "choice",
        "token",
        "what has a ratio: each token, or a completion as in GSPO",
        choices=("token", "sequence"),
    ),
    "trl.off_policy_mask_threshold": ParameterInfo(
        "float",
        NO_LIMIT,
        "mean difference of log-probabilities from which a completion with a negative "
        "advantage is left out of the loss",
        low=0,
        open_low=True,
    ),
    "trl.use_bias_correction_kl": ParameterInfo(
        "choice", True, "multiply the KL by the ratio", choices=(False, True)
    ),
    "trl.mask_truncated_completions": ParameterInfo(
        "choice", False, "take no loss of completions that were cut", choices=(False, True)
    ),
    "trl.top_entropy_quantile": ParameterInfo(
        "float",
        1.0,
        "share of tokens, those of the highest entropy in a micro-batch, that are in the loss",
        low=0,
        high=1,
        open_low=True,
    ),
    "trl.entropy_coef": ParameterInfo(
        "float", 0.0, "weight of a bonus on the mean entropy of a micro-batch", low=0
    ),
    "trl.weight_decay": ParameterInfo("float", 0.0, "decay of weights in AdamW", low=0),
    "trl.adam_beta1": ParameterInfo(
        "float", 0.9, "decay of AdamW's first moment", low=0, high=0.9999
    ),
    "trl.adam_beta2": ParameterInfo(
        "float", 0.999, "decay of AdamW's second moment", low=0, high=0.99999
    ),
    "trl.adam_epsilon": ParameterInfo(
        "float", 1e-8, "epsilon of AdamW's denominator", low=0, open_low=True
    ),
    ITERATIONS: ParameterInfo(
        "int", 10**9, "most turns of calls that tools answer in a completion", low=0
    ),
}
"""Fields that are not parameters of our own, `trl.<field>`: part of a sweep only where its file
names them."""
CORRECTED_KL = {"use_bias_correction_kl": True}
"""TRL's default since 1.10: the KL's gradient is that of the reverse KL, not that of k3."""

OWN_KEYS: dict[str, str] = {
    "storage": "output_dir",
    "name": "run_name",
    "tracking": "report_to project",
    "objectives": "load_best_model_at_end metric_for_best_model greater_is_better",
    "search.seed": "seed data_seed",
    "training.steps": "max_steps num_train_epochs",
    "training.micro_batch_size": "per_device_train_batch_size",
    "training.mini_batch_size": "gradient_accumulation_steps steps_per_generation",
    "training.completions_per_step": "generation_batch_size",
    "training.max_completion_length": "max_completion_length",
    "training.lr_schedule": "lr_scheduler_type",
    "training.warmup_share": "warmup_steps",
    "training.max_grad_norm": "max_grad_norm",
    "training.optimizer": "optim",
    "training.evaluate_every": "eval_strategy eval_steps",
    "training.checkpoint_every": "save_strategy save_steps",
    "model": "model_init_kwargs",
    "model.dtype": "bf16 fp16",
    "model.gradient_checkpointing": "gradient_checkpointing activation_checkpointing",
    "model.dropout": "disable_dropout",
    "model.chat_template_kwargs": "chat_template_kwargs",
    "resources.gpus": "use_cpu",
    "resources.sharding": "fsdp fsdp_config",
    "rollout.engine": "use_vllm",
    "rollout.vllm_mode": "vllm_mode",
    "rollout.vllm_server": "vllm_server_base_url vllm_server_host vllm_server_port",
    "rollout.vllm_memory_share": "vllm_gpu_memory_utilization",
    "rollout.importance_sampling": (
        "vllm_importance_sampling_correction vllm_importance_sampling_mode "
        "vllm_importance_sampling_clip_min"
    ),
    "rollout.importance_sampling_cap": (
        "vllm_importance_sampling_clip_max vllm_importance_sampling_cap"
    ),
    "space.normalization": "multi_objective_aggregation scale_rewards",
    "space.reward_weights": "reward_weights",
    "space.group_size": "num_generations",
    "space.learning_rate": "learning_rate",
    "space.temperature": "temperature",
    "space.beta": "beta",
    "space.epsilon": "epsilon",
    "space.epsilon_high": "epsilon_high",
    "space.loss_type": "loss_type",
    "space.num_iterations": "num_iterations",
}
"""Key of a sweep's file -> fields that it stands for, with blanks between."""

REFUSALS: dict[str, str] = {
    "completions would come from another distribution than the one that is trained": (
        "top_p top_k min_p repetition_penalty generation_kwargs vllm_structured_outputs_regex"
    ),
    "the sweep samples with its own engine": (
        "cache_implementation use_transformers_continuous_batching use_transformers_paged "
        "transformers_continuous_batching_config ds3_gather_for_generation use_cache "
        "vllm_model_impl vllm_enable_sleep_mode vllm_server_timeout vllm_group_port "
        "vllm_max_model_length vllm_tensor_parallel_size"
    ),
    "a sweep's checkpoints do not hold what it changes, so a resumed training would differ": (
        "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps use_adaptive_entropy "
        "entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target"
    ),
    "it belongs to a loss that loss_type does not have": (
        "sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg "
        "vespo_lambda_neg"
    ),
    "the loss of GRPO does not read it": "label_smoothing_factor average_tokens_across_devices",
    "log-probabilities would be random, so a policy would differ from itself": (
        "neftune_noise_alpha"
    ),
    "TRL casts no head that is tied to the embeddings or has an adapter": "cast_lm_head_to_fp32",
    "the policy's config.json decides it": "router_aux_loss_coef",
    "it has no single value": (
        "lr_scheduler_kwargs optim_args optim_target_modules accelerator_config "
        "gradient_checkpointing_kwargs activation_checkpointing_kwargs liger_kernel_config "
        "parallelism_config deepspeed"
    ),
    "a resumed training has to draw the same prompts": (
        "shuffle_dataset train_sampling_strategy length_column_name ignore_data_skip "
        "dataloader_drop_last dataloader_num_workers dataloader_pin_memory "
        "dataloader_persistent_workers dataloader_prefetch_factor dataloader_in_order "
        "dataloader_multiprocessing_context remove_unused_columns label_names"
    ),
    "the sweep trains and evaluates by itself": (
        "eval_delay per_device_eval_batch_size prediction_loss_only eval_on_start "
        "eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics "
        "batch_eval_metrics num_generations_eval do_eval do_train do_predict bf16_full_eval "
        "fp16_full_eval"
    ),
    "the sweep writes logs and checkpoints by itself": (
        "logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter "
        "include_num_input_tokens_seen log_level log_level_replica disable_tqdm log_completions "
        "log_multimodal num_completions_to_print log_unique_prompts log_completions_hub_repo "
        "trackio_space_id trackio_bucket_id trackio_static_space_id save_only_model "
        "save_on_each_node save_total_limit enable_jit_checkpoint resume_from_checkpoint "
        "restore_callback_states_from_checkpoint"
    ),
    "gdpo_tune.publish uploads policies": (
        "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push "
        "hub_revision"
    ),
    "code of a repository would run": "trust_remote_code",
    "it is about the speed or the memory of a machine, not about the training": (
        "tf32 torch_compile torch_compile_backend torch_compile_mode use_liger_kernel "
        "torch_empty_cache_steps auto_find_batch_size debug full_determinism skip_memory_metrics "
        "pad_to_multiple_of local_rank ddp_find_unused_parameters ddp_bucket_cap_mb "
        "ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout"
    ),
}
"""Reason -> fields that no sweep sets, with blanks between."""


def select_trl_fields(params: Params) -> dict[str, ParamValue]:
    """Return the fields of TRL's GRPOConfig among parameters, by TRL's names."""
    return {n.removeprefix(TRL_PREFIX): v for n, v in params.items() if n in TRL_FIELDS}


def is_default(params: Params, name: str) -> bool:
    """Return whether parameters have a field at its default, written or not."""
    default = TRL_FIELDS[name].default
    return params.get(name, default) == default


def explain_field(field: str) -> tuple[str, str]:
    """Return why a sweep takes no field of this name, and what to do."""
    for key, fields in OWN_KEYS.items():
        if field in fields.split():
            return f"{key} decides it", f"write {key} instead"
    for reason, fields in REFUSALS.items():
        if field in fields.split():
            return reason, "remove it"
    taken = [each.removeprefix(TRL_PREFIX) for each in TRL_FIELDS]
    fix = f"{suggest(field, taken)}fields that a sweep takes are {join_names(taken)}"
    return "no field of TRL's GRPOConfig", fix
