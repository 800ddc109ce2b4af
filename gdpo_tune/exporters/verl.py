"""verl: a directory whose YAML file Hydra composes with verl's own configuration.

Source: verl/trainer/config/_generated_ppo_trainer.yaml, trainer/config/algorithm.py,
trainer/ppo/core_algos.py, trainer/ppo/ray_trainer.py, utils/dataset/rl_dataset.py and
experimental/{agent,reward}_loop/ of verl 0.9.1.
"""

from __future__ import annotations

import math
from pathlib import Path
from shlex import quote

from gdpo_tune.core.errors import SpecProblem
from gdpo_tune.core.settings import EVERY_LINEAR
from gdpo_tune.exporters import library
from gdpo_tune.exporters.library import Exported, Library, TrainingFiles
from gdpo_tune.exporters.runtime_prompts import build_verl_row
from gdpo_tune.exporters.training_setup import TrainingSetup
from gdpo_tune.policies.prompt_choice import find_text_prefix

AGGREGATION = {
    "dapo": "token-mean",
    "bnpo": "token-mean",
    "cispo": "token-mean",
    "grpo": "seq-mean-token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}
MANAGER = "RewardManager"
"""Class of `rewards.py` that gives the rewards."""
PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Chat template that changes no text, for policies without one of their own."""
MERGE = "python -m verl.model_merger merge --backend fsdp --local_dir {saved} --target_dir {policy}"
"""Its converter of the shards of FSDP, by verl/model_merger/__main__.py."""
AGENTS = 8
"""Largest number of its processes that sample."""
LIBRARY = Library(
    "verl 0.9.1",
    ("gdpo", "grpo", "grpo_no_std"),
    AGGREGATION,
    schedules=("constant", "cosine"),
    leave_one_out=("grpo_no_std",),
    loads_revisions=False,
    notes={
        "gdpo_no_std": "does not pass norm_adv_by_std_in_grpo on to its GDPO",
        "gd2po": "lacks GD2PO, which only its authors' fork of verl has",
    },
)


def export_verl(setup: TrainingSetup) -> Exported:
    """Return the training as a configuration that inherits from verl's `ppo_trainer`."""
    size, group = setup.mini_batch_size, setup.group_size
    reason = f"verl counts in prompts, and this is no multiple of group_size {group}"
    fix = f"--set training.mini_batch_size={math.lcm(size, group)}"
    problem = SpecProblem(setup.note, "training.mini_batch_size", str(size), reason, fix)
    LIBRARY.check(setup, *((problem,) if size % group else ()))
    kwargs = dict(setup.spec.model.chat_template_kwargs)
    longest = setup.spec.training.max_completion_length
    settings: dict[str, object] = {
        "hydra": {"searchpath": ["pkg://verl.trainer.config"]},
        "defaults": ["ppo_trainer", "_self_"],
        "algorithm": {**_build_algorithm(setup), **_build_correction(setup)},
        "reward": {
            "reward_manager": {
                "source": "importlib",
                "name": MANAGER,
                # A file that it loads by a path is no module, in which dataclasses could be.
                "module": {"path": f"pkg://{Path(library.REWARDS_FILE).stem}"},
            }
        },
        "data": {
            "train_files": library.PROMPTS_FILE,
            # It requires one, and reads it only where `trainer.test_freq` is set.
            "val_files": library.PROMPTS_FILE,
            **({"apply_chat_template_kwargs": kwargs} if kwargs else {}),
            "shuffle": False,
            "train_batch_size": setup.prompts_per_step,
            "max_prompt_length": setup.max_sequence_length - longest,
            "filter_overlong_prompts": True,
            "max_response_length": longest,
            "seed": setup.request.seed,
        },
        "actor_rollout_ref": {
            "model": _build_model(setup),
            "actor": _build_actor(setup),
            "ref": {"log_prob_micro_batch_size_per_gpu": setup.micro_batch_size},
            "rollout": _build_rollout(setup),
        },
        "trainer": _build_trainer(setup),
    }
    return Exported(
        library=LIBRARY.name,
        file="verl.yaml",
        text=library.format_yaml(settings, setup.note, library.START),
        install=library.format_install("verl==0.9.1", ("vllm", "fsdp")),
        run=_format_run(setup),
        # The model in `converted` alone is the base, if it trained an adapter.
        result=library.CONVERTED + ("/lora_adapter" if setup.spec.model.lora_rank else ""),
        conversion=MERGE.format(
            saved=f"checkpoints/{quote(setup.name)}/global_step_{setup.spec.training.steps}/actor",
            policy=library.CONVERTED,
        ),
        training=TrainingFiles(
            ("VerlRewardManager",),
            f"class {MANAGER}(VerlRewardManager):\n    scorer = SCORER",
            build_verl_row,
        ),
    )


def _format_run(setup: TrainingSetup) -> str:
    paths = {
        "data.train_files": library.PROMPTS_FILE,
        "data.val_files": library.PROMPTS_FILE,
        "trainer.default_local_dir": f"checkpoints/{setup.name}",
    }
    if setup.policy == library.POLICY_COPY:
        paths["actor_rollout_ref.model.path"] = library.POLICY_COPY
    overrides = [f"{key}='$here/{path}'" for key, path in paths.items()]
    overrides.append("+ray_kwargs.ray_init.runtime_env.env_vars.PYTHONPATH='$modules'")
    return "\n".join(
        [
            f'export PYTHONPATH="$PWD:$PWD/{library.MODULES}${{PYTHONPATH:+:$PYTHONPATH}}"',
            "# As Hydra reads them between single quotes.",
            "here=${PWD//\\'/\\\\\\'} modules=${PYTHONPATH//\\'/\\\\\\'}",
            'exec python -m verl.trainer.main_ppo --config-path "$PWD" --config-name verl \\',
            *(f'    "{override}" \\' for override in overrides),
            '    "$@"',
        ]
    )


def _build_rollout(setup: TrainingSetup) -> dict[str, object]:
    return {
        "name": "vllm",
        "n": setup.group_size,
        "temperature": setup.get_number("temperature"),
        "top_p": 1.0,
        "top_k": -1,
        "tensor_model_parallel_size": 1,
        "gpu_memory_utilization": setup.spec.rollout.vllm_memory_share,
        "log_prob_micro_batch_size_per_gpu": setup.micro_batch_size,
        # Without those of the sampler there is nothing to correct by.
        "calculate_log_probs": setup.spec.rollout.importance_sampling != "off",
        # They share the completions of a step equally.
        "agent": {"num_workers": math.gcd(setup.spec.training.completions_per_step, AGENTS)},
    }


def _build_trainer(setup: TrainingSetup) -> dict[str, object]:
    return {
        # Its newer trainer does not carry the single rewards that GDPO needs.
        "use_v1": setup.mode != "gdpo",
        "total_training_steps": setup.spec.training.steps,
        "total_epochs": setup.spec.training.steps,
        "n_gpus_per_node": 1,
        "val_before_train": False,
        # It saves nothing by default, and would continue from what another run saved.
        "save_freq": setup.spec.training.steps,
        "resume_mode": "disable",
        "project_name": "gdpo_tune",
        "experiment_name": setup.name,
        "logger": ["console"],
    }


def _build_algorithm(setup: TrainingSetup) -> dict[str, object]:
    if setup.mode == "gdpo":
        return {
            "adv_estimator": "gdpo",
            "gdpo_reward_keys": [reward.name for reward in setup.rewards],
            "gdpo_reward_weights": setup.weights,
            "use_kl_in_reward": False,
        }
    return {
        "adv_estimator": "rloo" if setup.leaves_one_out else "grpo",
        "norm_adv_by_std_in_grpo": setup.mode == "grpo",
        "use_kl_in_reward": False,
    }


def _build_correction(setup: TrainingSetup) -> dict[str, object]:
    if setup.spec.rollout.importance_sampling == "off":
        return {}
    unit, _, treatment = setup.spec.rollout.importance_sampling.partition("_")
    cap = setup.spec.rollout.importance_sampling_cap
    # One number lowers a weight to it; a range, from above 0, makes the weights outside 0.
    threshold = cap if treatment == "truncate" else f"1e-30_{cap}"
    return {"rollout_correction": {"rollout_is": unit, "rollout_is_threshold": threshold}}


def _build_model(setup: TrainingSetup) -> dict[str, object]:
    model: dict[str, object] = {
        "path": setup.policy,
        "enable_gradient_checkpointing": setup.spec.model.gradient_checkpointing != "off",
    }
    if not setup.is_chat:
        prefix = find_text_prefix(setup.spec.policy, setup.spec.model.revision)
        model["custom_chat_template"] = prefix + PLAIN_TEMPLATE
    if setup.spec.model.lora_rank:
        everywhere = setup.spec.model.lora_targets == (EVERY_LINEAR,)
        model |= {
            "lora_rank": setup.spec.model.lora_rank,
            "lora_alpha": setup.lora_alpha,
            "target_modules": EVERY_LINEAR if everywhere else list(setup.spec.model.lora_targets),
        }
    return model


def _build_actor(setup: TrainingSetup) -> dict[str, object]:
    beta, cispo = setup.get_number("beta"), setup.loss == "cispo"
    scale = {"loss_scale_factor": setup.spec.training.max_completion_length}
    return {
        "ppo_mini_batch_size": setup.mini_batch_size // setup.group_size,
        "ppo_micro_batch_size_per_gpu": setup.micro_batch_size,
        "ppo_epochs": setup.passes_per_step,
        # It sorts completions by length before it divides them.
        "shuffle": setup.spec.training.mini_batches > 1,
        "policy_loss": {"loss_mode": "cispo" if cispo else "vanilla"},
        "clip_ratio": setup.get_number("epsilon"),
        # CISPO had no lower clip in training; 1 - 1 is the lowest ratio.
        "clip_ratio_low": 1.0 if cispo else setup.get_number("epsilon"),
        "clip_ratio_high": setup.get_number("epsilon_high"),
        "clip_ratio_c": 1.0e9,  # verl sets it to 3: a second clip that the training did not have
        "loss_agg_mode": AGGREGATION[setup.loss],
        **(scale if setup.loss == "dr_grpo" else {}),
        "use_kl_loss": beta > 0,
        "kl_loss_coef": beta,
        # The plain name has another gradient, that of k3.
        "kl_loss_type": "low_var_kl+",
        "entropy_coeff": 0,
        "grad_clip": setup.spec.training.max_grad_norm,
        "optim": {
            "lr": setup.get_number("learning_rate"),
            "lr_scheduler_type": setup.spec.training.lr_schedule,
            # It moves once for all samples of a step, whatever the number of optimizer steps.
            "lr_warmup_steps": setup.spec.training.warmup_steps,
            "weight_decay": 0.0,
        },
    }
