"""OpenRLHF: a shell script. It knows one reward a completion, hence sum modes only.

Source: openrlhf/cli/train_ppo_ray.py and trainer/ppo_utils/experience_maker.py of OpenRLHF 0.11.2.
"""

from __future__ import annotations

from gdpo_tune.exporters.base import (
    REWARDS_FILE,
    Difference,
    Exported,
    Refusals,
    same_everywhere,
    sum_of,
)
from gdpo_tune.exporters.recipe import Recipe
from gdpo_tune.exporters.text import flags

LIBRARY = "OpenRLHF 0.11.2"
ESTIMATORS = {"grpo": "group_norm", "grpo_no_std": "dr_grpo"}
AGGREGATION = {"dapo": "token-mean", "bnpo": "token-mean", "grpo": "seq-mean-token-mean"}
SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}


def export(recipe: Recipe) -> Exported:
    """The recipe as a command line of OpenRLHF.

    Raises:
        ExportError: OpenRLHF would change or ignore a part of it.
    """
    refusals = Refusals(recipe, LIBRARY)
    refusals.check(modes=ESTIMATORS, losses=AGGREGATION, leave_one_out=("grpo_no_std",))
    if recipe.model.revision:
        refusals.add(
            "model.revision",
            recipe.model.revision,
            "OpenRLHF loads the newest revision",
            "download that revision, and give its folder with --set policy=",
        )
    refusals.raise_if_any()
    tree: dict[str, object] = {
        "actor": {
            "model_name_or_path": recipe.policy,
            "loss_agg_mode": AGGREGATION[recipe.loss],
            "eps_clip_low_high": [
                recipe.number("epsilon"),
                recipe.upper_clip(absolute_for_cispo=False),
            ],
            "adam": {
                "lr": recipe.number("learning_rate"),
                "betas": [0.9, 0.999],  # its own default is 0.95
                "weight_decay": 0.0,
            },
            "lr_scheduler": SCHEDULES[recipe.training.lr_schedule],
            "lr_warmup_ratio": recipe.training.warmup_share,
            "max_norm": recipe.training.max_grad_norm,
            "gradient_checkpointing_enable": recipe.model.gradient_checkpointing != "off",
        },
        "algo": {
            "advantage": {
                "estimator": "rloo" if recipe.leaves_one_out else ESTIMATORS[recipe.mode]
            },
            "kl": {"init_coef": recipe.number("beta"), "use_loss": True, "estimator": "k3"},
        },
        "rollout": {
            "n_samples_per_prompt": recipe.group_size,
            "batch_size": recipe.prompts,
            "max_new_tokens": recipe.training.max_completion_length,
            "temperature": recipe.number("temperature"),
            "top_p": 1.0,
        },
        "train": {
            "batch_size": recipe.training.completions_per_step,
            "micro_batch_size": recipe.micro_batch,
            "max_epochs": recipe.passes,
            "seed": recipe.seed,
        },
        "data": {
            "max_len": recipe.longest,
            "max_samples": recipe.training.steps * recipe.prompts,
            "prompt_dataset": "your/prompts",
        },
        "reward": {"remote_url": REWARDS_FILE, "clip_range": [-1e9, 1e9]},
        "ckpt": {"output_dir": recipe.name},
        **_adapters(recipe),
    }
    lines = ["python3 -m openrlhf.cli.train_ppo_ray", *(f"  {flag}" for flag in flags(tree))]
    text = f"#!/bin/sh\n# {recipe.note}\n" + " \\\n".join(lines) + "\n"
    return Exported(
        library=LIBRARY,
        file="openrlhf.sh",
        text=text,
        command="sh openrlhf.sh",
        differences=tuple(_differences(recipe)),
        yours={
            "--data.prompt_dataset": "your prompts, at least as many as --data.max_samples "
            "says: one episode passes over them once",
            "--reward.remote_url": f"`{REWARDS_FILE}` whose reward function returns "
            f"{sum_of(recipe)}",
            "GPUs": "how many nodes, GPUs and vLLM engines there are",
        },
    )


def _adapters(recipe: Recipe) -> dict[str, object]:
    if not recipe.model.lora_rank:
        return {}
    return {
        "ds": {
            "lora": {
                "rank": recipe.model.lora_rank,
                "alpha": round(recipe.lora_alpha),
                "dropout": 0.0,
                "target_modules": list(recipe.model.lora_targets),
            }
        }
    }


def _differences(recipe: Recipe) -> list[Difference]:
    rows = same_everywhere(
        recipe,
        eps="1e-9" if recipe.mode == "grpo" else "",
        whitening="",
        missing="not known: the sum has to be a number",
        precision="bfloat16: it knows no float32",
        correction="--algo.advantage.is_correction_level",
    )
    there = "its default cuts rewards to [-10, 10]; the script lifts that"
    rows.append(Difference("bounds of the reward", "none", there))
    if recipe.loss == "grpo" and recipe.number("beta") > 0:
        there = "over tokens, whatever the policy loss is averaged over"
        rows.append(Difference("KL averaged", "over completions, as the policy loss", there))
    return rows
