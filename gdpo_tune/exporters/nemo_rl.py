"""NeMo-RL: a directory whose YAML file inherits from its `grpo_math_1B.yaml`.

Source: examples/configs/grpo_math_1B.yaml, examples/run_grpo.py, nemo_rl/data/,
experience/rollouts.py, environments/utils.py, algorithms/advantage_estimator.py, utils.py
and loss/ of NeMo-RL at commit 7ea279a (22 August 2026, after 0.7.0).
"""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote

from gdpo_tune.core.errors import SpecProblem
from gdpo_tune.core.settings import EVERY_LINEAR
from gdpo_tune.exporters import library
from gdpo_tune.exporters.library import Exported, Library, TrainingFiles
from gdpo_tune.exporters.runtime_prompts import build_message_row
from gdpo_tune.exporters.training_setup import TrainingSetup

CHECKOUT = "NEMO_RL=/path/to/RL"
INSTALL = "git clone --recursive https://github.com/NVIDIA-NeMo/RL && git -C RL checkout 7ea279a"
MODES = {"gdpo": True, "gdpo_no_std": False, "grpo": True, "grpo_no_std": False}
"""Mode -> `normalize_rewards`."""
LOSSES = ("dapo", "bnpo", "grpo", "cispo")
CORRECTIONS = {"token_truncate": "tis", "token_mask": "icepop"}
"""Kind of `importance_sampling` -> `truncated_importance_sampling_type`."""
FEWEST_REWARDS = 2  # under its GDPO
ENVIRONMENT = "gdpo"
"""Name of the environment, and of the function for prompts, that `PROGRAM` adds to NeMo-RL."""
ACTOR = "RewardEnvironment"
PROGRAM_FILE = "run_gdpo.py"
PROGRAM = f'''"""Starts NeMo-RL's GRPO with the rewards and the prompts of this directory."""

import os
import runpy

import rewards
from nemo_rl.data.processors import register_processor
from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES
from nemo_rl.environments.utils import register_env

ACTOR_ENVIRONMENT_REGISTRY["rewards.{ACTOR}"] = PY_EXECUTABLES.SYSTEM
register_env("{ENVIRONMENT}", "rewards.{ACTOR}")
register_processor("{ENVIRONMENT}", rewards.process_prompt)

if __name__ == "__main__":
    runpy.run_path(os.environ["NEMO_RL"] + "/examples/run_grpo.py", run_name="__main__")
'''
ENDING = f"""import ray


def process_prompt(*arguments):
    return process_nemo_prompt(*arguments, reading={{reading!r}})


class Environment(NemoEnvironment):
    scorer = SCORER


{ACTOR} = ray.remote(Environment)"""
"""Source at the end of `rewards.py`."""
RUN = f"""if [[ ! -f "${{NEMO_RL:-}}/examples/run_grpo.py" ]]; then
    echo "NEMO_RL has to name a checkout of NeMo-RL: {CHECKOUT} {library.START}" >&2
    exit 2
fi
export NEMO_RL PYTHONPATH="$PWD:$PWD/{library.MODULES}${{PYTHONPATH:+:$PYTHONPATH}}"
exec uv run --project "$NEMO_RL" python {PROGRAM_FILE} --config nemo_rl.yaml "$@\""""
HERE = "${oc.env:PWD}"
"""Directory of the export, for processes that work in other directories."""
CONSOLIDATE = (
    'uv run --project "$NEMO_RL" --extra automodel python '
    '"$NEMO_RL/3rdparty/Automodel-workspace/Automodel/tools/offline_hf_consolidation.py" '
    "--model-name unused --input-dir {saved} --output-dir {policy} && "
    "cp {saved}/../../tokenizer/* {policy}"
)
"""Its converter of what it saves by default, which `convert_dcp_to_hf.py` does not read."""
LIBRARY = Library(
    "NeMo-RL 7ea279a",
    MODES,
    LOSSES,
    leave_one_out=("grpo", "grpo_no_std"),
    loads_revisions=False,
    accepts_fractional_alpha=False,
)


def export_nemo_rl(setup: TrainingSetup) -> Exported:
    """Return the training as a configuration for `examples/run_grpo.py`."""
    LIBRARY.check(setup, *_find_problems(setup))
    prompts = f"{HERE}/{library.PROMPTS_FILE}"
    settings: dict[str, object] = {
        "defaults": "${oc.env:NEMO_RL}/examples/configs/grpo_math_1B.yaml",
        "grpo": _build_grpo(setup),
        "loss_fn": _build_loss(setup),
        "policy": _build_policy(setup),
        "data": {
            "_override_": True,  # in place of all of its section, which is mathematics
            "max_input_seq_length": "${policy.max_total_sequence_length}",
            "shuffle": False,
            "num_workers": 1,
            "use_multiple_dataloader": False,
            "train": {"dataset_name": "ResponseDataset", "data_path": prompts},
            "validation": None,
            "default": {"prompt_file": None, "processor": ENVIRONMENT, "env_name": ENVIRONMENT},
        },
        "env": {
            ENVIRONMENT: {
                "tokenizer": "${policy.tokenizer.name}",
                "max_completion_length": "${policy.generation.max_new_tokens}",
                "weighted_sum": setup.sums_first,
            }
        },
        "checkpointing": {
            # It resumes from checkpoints there, and its default is one directory for every run.
            "checkpoint_dir": f"{HERE}/results/{setup.name}",
            "save_period": setup.spec.training.steps,
            "metric_name": None,
        },
        "logger": {"log_dir": f"{HERE}/logs"},
    }
    saved = f"results/{setup.name}/step_{setup.spec.training.steps}/policy/weights/model"
    return Exported(
        library=LIBRARY.name,
        file="nemo_rl.yaml",
        text=library.format_yaml(settings, setup.note, f"{CHECKOUT} {library.START}"),
        install=INSTALL,
        run=RUN,
        required_inputs={"NEMO_RL": "the directory of the checkout, as an environment variable"},
        environment=CHECKOUT,
        result=saved if setup.spec.model.lora_rank else library.CONVERTED,
        conversion=""  # an adapter is saved as PEFT has it
        if setup.spec.model.lora_rank
        else CONSOLIDATE.format(saved=quote(saved), policy=library.CONVERTED),
        training=TrainingFiles(
            ("NemoEnvironment", "process_nemo_prompt"),
            ENDING.format(reading=setup.prompt_format_arguments),
            build_message_row,
            reads_as_trained=True,
            others={PROGRAM_FILE: PROGRAM},
        ),
    )


def _find_problems(setup: TrainingSetup) -> Iterator[SpecProblem]:
    if not setup.sums_first and len(setup.rewards) < FEWEST_REWARDS:
        reason = f"its GDPO needs at least {FEWEST_REWARDS} rewards, and this trial has one"
        fix = "pick a trial under grpo"
        yield SpecProblem(setup.note, "normalization", setup.mode, reason, fix)
    if setup.passes_per_step > 1:
        reason = "NeMo-RL passes once over the samples of a step, in parts if the batch is smaller"
        fix = "pick a trial with num_iterations: 1"
        yield SpecProblem(setup.note, "num_iterations", str(setup.passes_per_step), reason, fix)


def _build_grpo(setup: TrainingSetup) -> dict[str, object]:
    normalization = {
        "normalize_rewards": MODES[setup.mode],
        # Its default is true, which no published GDPO uses.
        "use_leave_one_out_baseline": setup.leaves_one_out,
    }
    estimator: dict[str, object] = {"name": "grpo", **normalization}
    if not setup.sums_first:
        rewards = sorted(setup.rewards, key=lambda reward: reward.name)
        weights = [reward.weight for reward in rewards]
        estimator |= {"name": "gdpo", "reward_weights": weights}
    return {
        "num_prompts_per_step": setup.prompts_per_step,
        "num_generations_per_prompt": setup.group_size,
        "max_num_steps": setup.spec.training.steps,
        "max_num_epochs": setup.spec.training.steps,
        **normalization,
        "use_dynamic_sampling": False,
        "val_period": 0,  # there are no prompts for it
        "seed": setup.request.seed,
        "adv_estimator": estimator,
    }


def _build_loss(setup: TrainingSetup) -> dict[str, object]:
    cispo = setup.loss == "cispo"
    return {
        "reference_policy_kl_penalty": setup.get_number("beta"),
        "reference_policy_kl_type": "k3",
        # The training clamped neither the logarithm (default 20) nor the value (10).
        "kl_input_clamp_value": None,
        "kl_output_clamp_value": None,
        # True multiplies the KL by the ratio, which is not 1 after the first optimizer step.
        "use_on_policy_kl_approximation": setup.spec.training.mini_batches > 1,
        "use_kl_in_reward": False,
        # CISPO had no lower clip in training; 1 - 1 is the lowest ratio.
        "ratio_clip_min": 1.0 if cispo else setup.get_number("epsilon"),
        "ratio_clip_max": setup.get_number("epsilon_high"),
        "ratio_clip_c": None,
        "token_level_loss": setup.loss != "grpo",
        "use_cispo": cispo,
        **_build_correction(setup),
    }


def _build_correction(setup: TrainingSetup) -> dict[str, object]:
    kind = CORRECTIONS.get(setup.spec.rollout.importance_sampling)
    if not kind:
        return {"use_importance_sampling_correction": False}
    return {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": kind,
        "truncated_importance_sampling_ratio": setup.spec.rollout.importance_sampling_cap,
        "truncated_importance_sampling_ratio_min": 0.0,
    }


def _build_policy(setup: TrainingSetup) -> dict[str, object]:
    return {
        "model_name": f"{HERE}/{setup.policy}"
        if setup.policy == library.POLICY_COPY
        else setup.policy,
        "precision": "float32" if setup.spec.model.dtype == "float32" else "bfloat16",
        "train_global_batch_size": setup.mini_batch_size,
        "train_micro_batch_size": setup.micro_batch_size,
        "max_total_sequence_length": setup.max_sequence_length,
        "max_grad_norm": setup.spec.training.max_grad_norm,
        "optimizer": {"kwargs": {"lr": setup.get_number("learning_rate"), "weight_decay": 0.0}},
        "scheduler": _build_scheduler(setup),
        "generation": {
            "max_new_tokens": setup.spec.training.max_completion_length,
            "temperature": setup.get_number("temperature"),
            "top_p": 1.0,
            "top_k": None,
            # Its default is the tokenizer's alone.
            **({"stop_token_ids": setup.end_tokens} if len(setup.end_tokens) > 1 else {}),
            "vllm_cfg": {"gpu_memory_utilization": setup.spec.rollout.vllm_memory_share},
        },
        **_build_adapters(setup),
    }


def _build_scheduler(setup: TrainingSetup) -> list[dict[str, object]]:
    """Return the shape of the learning rate as torch's schedulers and their milestones.

    A list even of one: it replaces a list, which OmegaConf cannot merge with a mapping.
    """
    # It moves once for all samples of a step, whatever the number of optimizer steps.
    rest = max(1, setup.spec.training.steps - setup.spec.training.warmup_steps)
    shapes = {
        "constant": _build_part("ConstantLR", factor=1.0, total_iters=10**9),
        "linear": _build_part("LinearLR", start_factor=1.0, end_factor=0.0, total_iters=rest),
        "cosine": _build_part("CosineAnnealingLR", T_max=rest),
    }
    shape = shapes[setup.spec.training.lr_schedule]
    if not setup.spec.training.warmup_steps:
        return [shape, {"milestones": []}]
    # It cannot begin at 0.
    rising = setup.spec.training.warmup_steps
    rise = _build_part("LinearLR", start_factor=1e-8, end_factor=1.0, total_iters=rising)
    return [rise, shape, {"milestones": [rising]}]


def _build_part(name: str, **arguments: float) -> dict[str, object]:
    return {"name": f"torch.optim.lr_scheduler.{name}", "kwargs": dict(arguments)}


def _build_adapters(setup: TrainingSetup) -> dict[str, object]:
    if not setup.spec.model.lora_rank:
        return {}
    everywhere = setup.spec.model.lora_targets == (EVERY_LINEAR,)
    adapters: dict[str, object] = {
        "enabled": True,
        "dim": setup.spec.model.lora_rank,
        "alpha": setup.lora_alpha,
        "match_all_linear": everywhere,
        "target_modules": [] if everywhere else list(setup.spec.model.lora_targets),
    }
    return {"dtensor_cfg": {"lora_cfg": adapters}}
