"""Axolotl: a YAML file for `axolotl train`. It trains with TRL.

Source: axolotl/utils/schemas/ and core/trainers/grpo/ of Axolotl 0.19.0, which pins TRL 1.9.0.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from gdpo_tune.core.settings import EVERY_LINEAR
from gdpo_tune.exporters import trl
from gdpo_tune.exporters.base import REWARDS_FILE, Difference, Exported, Refusals
from gdpo_tune.exporters.recipe import Recipe
from gdpo_tune.exporters.text import yaml_text

LIBRARY = "Axolotl 0.19.0"
SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}


def export(recipe: Recipe) -> Exported:
    """The recipe as Axolotl's configuration.

    Raises:
        ExportError: Axolotl would change or ignore a part of it.
    """
    refusals = Refusals(recipe, LIBRARY)
    refusals.check(modes=("gdpo", *trl.SCALE), losses=trl.LOSSES)
    refusals.raise_if_any()
    tree: dict[str, object] = {
        "base_model": recipe.policy,
        **({"revision_of_model": recipe.model.revision} if recipe.model.revision else {}),
        "rl": "gdpo" if recipe.mode == "gdpo" else "grpo",
        "trl": {
            "reward_funcs": [f"rewards.{reward.name}" for reward in recipe.rewards],
            "reward_weights": recipe.weights,
            **trl.aggregation(recipe),
            **trl.algorithm(recipe),
            **_sampler(recipe),
        },
        **_engine(recipe),
        "datasets": [{"path": "your/prompts", "split": "train", "type": "rewards.transform"}],
        "sequence_len": recipe.longest,
        "micro_batch_size": recipe.micro_batch,
        "gradient_accumulation_steps": recipe.micro_batches,
        "max_steps": recipe.updates,
        "learning_rate": recipe.number("learning_rate"),
        "lr_scheduler": SCHEDULES[recipe.training.lr_schedule],
        "warmup_steps": recipe.warmup,
        "optimizer": "adamw_torch",
        "weight_decay": 0.0,
        "max_grad_norm": recipe.training.max_grad_norm,
        "bf16": recipe.model.dtype != "float32",
        "gradient_checkpointing": recipe.model.gradient_checkpointing != "off",
        **_adapters(recipe),
        "seed": recipe.seed,
        "output_dir": recipe.name,
    }
    rows = trl.differences(recipe)
    rows.append(
        Difference(
            "context_parallel_size above 1",
            "several processes compute what one does",
            "a trainer of its own adds the weighted rewards up before it normalises, whatever "
            "`rl` says: leave it at 1"
            if recipe.mode == "gdpo"
            else "the same sum, normalised by "
            "the group whatever `scale_rewards` says, unless that is none: leave it at 1",
        )
    )
    rows.append(
        Difference("trainer underneath", "TRL 1.16", "TRL 1.9.0, whose other defaults may differ")
    )
    return Exported(
        library=LIBRARY,
        file="axolotl.yaml",
        text=yaml_text(tree, (recipe.note, "axolotl train axolotl.yaml")),
        command="axolotl train axolotl.yaml",
        differences=tuple(rows),
        yours={
            "datasets": "your prompts, and a function that maps a row to a `prompt`",
            "trl.reward_funcs": f"one function a reward, in this order, in `{REWARDS_FILE}`",
        },
    )


def _sampler(recipe: Recipe) -> dict[str, object]:
    """What samples completions, as `trl:` is told."""
    if recipe.rollout.engine != "vllm":
        return {"use_vllm": False}
    if recipe.rollout.vllm_mode == "colocate":
        return {"use_vllm": True, "vllm_mode": "colocate"}
    address = urlsplit(recipe.rollout.vllm_server)
    return {
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_host": address.hostname,
        "vllm_server_port": address.port,
    }


def _engine(recipe: Recipe) -> dict[str, object]:
    """The section `vllm:`, which concerns an engine beside the trainer."""
    if recipe.rollout.engine != "vllm" or recipe.rollout.vllm_mode == "server":
        return {}
    share = recipe.rollout.vllm_memory_share
    return {"vllm": {"gpu_memory_utilization": share, "max_model_len": recipe.longest}}


def _adapters(recipe: Recipe) -> dict[str, object]:
    if not recipe.model.lora_rank:
        return {}
    everywhere = recipe.model.lora_targets == (EVERY_LINEAR,)
    targets: dict[str, object] = {"lora_target_linear": True}
    named: dict[str, object] = {"lora_target_modules": list(recipe.model.lora_targets)}
    return {
        "adapter": "lora",
        "lora_r": recipe.model.lora_rank,
        "lora_alpha": round(recipe.lora_alpha),
        "lora_dropout": 0.0,
        **(targets if everywhere else named),
    }
