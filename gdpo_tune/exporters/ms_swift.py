"""ms-swift: a YAML file for `swift rlhf`.

Source: swift/arguments/, swift/rlhf_trainers/ and swift/rl_core/advantage.py of ms-swift 4.6.0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gdpo_tune.core.registry import POLICIES
from gdpo_tune.exporters import library, trl
from gdpo_tune.exporters.library import Exported, Library, TrainingFiles
from gdpo_tune.exporters.recipe import Recipe
from gdpo_tune.exporters.runtime_prompts import build_message_row

INSTALL = "pip install ms-swift==4.6.0 msgspec"
SCALE = {"gdpo": "gdpo", **trl.SCALE}
LIBRARY = Library(
    "ms-swift 4.6.0", SCALE, trl.LOSSES, leave_one_out=tuple(trl.SCALE), fractions=False
)
EVERY_TOKEN = 10**9
"""`top_k` above every vocabulary: with 0 or -1, Transformers would take that of the policy, or 50.
Source: `prepare_generation_config` in swift/infer_engine/utils.py."""
CORRECTIONS = ("token_truncate", "token_mask")
"""Kinds of `importance_sampling` that it computes alike."""


def export(recipe: Recipe) -> Exported:
    """Return the recipe as arguments of `swift rlhf`."""
    LIBRARY.check(recipe)
    settings: dict[str, object] = {
        "rlhf_type": "grpo",
        **_build_model(recipe),
        "dataset": [library.PROMPTS_FILE],
        "dataset_shuffle": False,
        "external_plugins": [library.REWARDS_FILE],
        "reward_funcs": [f"{reward.name}_reward" for reward in recipe.rewards],
        "reward_weights": recipe.weights,
        "scale_rewards": SCALE[recipe.mode],
        "advantage_estimator": "rloo" if recipe.leaves_one_out else "grpo",
        # Its default is true under rloo, and GDPO takes the KL in the loss alone.
        "kl_in_reward": False,
        "dynamic_sample": False,
        **trl.build_algorithm(recipe),
        "top_k": -1 if recipe.rollout.engine == "vllm" else EVERY_TOKEN,
        **({"callbacks": ["plain_sampling"]} if _build_sampling(recipe) else {}),
        "max_length": recipe.max_sequence_length,
        **trl.build_schedule(recipe),
        **trl.build_clip_of_small_gradients(recipe),
        **_build_correction(recipe),
        # Its own defaults are 0.95, and 0.1 for the weight decay.
        "adam_beta2": 0.999,
        "torch_dtype": "float32",
        "bf16": recipe.model.dtype != "float32",
        "gradient_checkpointing": recipe.model.gradient_checkpointing != "off",
        **_build_adapters(recipe),
        **trl.build_sampler(recipe, [recipe.rollout.vllm_server], "vllm_max_model_len"),
        "output_dir": recipe.name,
        "add_version": False,
    }
    return Exported(
        library=LIBRARY.name,
        file="ms_swift.yaml",
        text=library.format_yaml(settings, recipe.note, library.START),
        install=" ".join([INSTALL, *recipe.list_extras(vllm="vllm")]),
        run=trl.format_run(recipe, "swift rlhf ms_swift.yaml"),
        to_supply=_list_supplies(recipe),
        result=f"{recipe.name}/checkpoint-{recipe.updates}",
        training=_build_training_files(recipe),
    )


def _build_training_files(recipe: Recipe) -> TrainingFiles:
    names = [reward.name for reward in recipe.rewards]
    lines = ["from swift.rewards import orms", "", "REWARDS = build_reward_classes(JUDGE)"]
    lines += [f'orms["{name}_reward"] = REWARDS["{name}"]' for name in names]
    ending = "\n".join(lines) + _build_sampling(recipe)
    return TrainingFiles(("build_reward_classes",), ending, build_message_row)


def _build_sampling(recipe: Recipe) -> str:
    """Return a callback by which the policy's files say no more than its end tokens; or nothing."""
    changed: dict[str, Any] = dict.fromkeys(recipe.own_settings)
    if len(recipe.end_tokens) > 1 and recipe.rollout.engine != "vllm":
        changed["eos_token_id"] = list(recipe.end_tokens)
    if not changed:
        return ""
    return f"""

from swift.callbacks import TrainerCallback, callbacks_map


class PlainSampling(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **kwargs):
        for key, value in {changed}.items():
            setattr(model.generation_config, key, value)


callbacks_map["plain_sampling"] = PlainSampling"""


def _build_correction(recipe: Recipe) -> dict[str, object]:
    """Return the treatment of what vLLM rounds differently, if it is by token."""
    settings = recipe.rollout
    if settings.engine != "vllm" or settings.importance_sampling not in CORRECTIONS:
        return {}
    return {
        "rollout_importance_sampling_mode": settings.importance_sampling,
        "rollout_importance_sampling_threshold": settings.importance_sampling_cap,
    }


def _list_supplies(recipe: Recipe) -> dict[str, str]:
    """Return what ms-swift asks for: it knows the architecture of a Hub model by its name alone."""
    if recipe.policy_name in POLICIES or not Path(recipe.policy).is_absolute():
        return {}
    start = f"{library.START} --model_type qwen2"
    return {"model_type": f"its name for the architecture of your policy, as in `{start}`"}


def _build_model(recipe: Recipe) -> dict[str, object]:
    """Return the policy; its prompts stay as they are if it has no chat template."""
    model: dict[str, object] = {"model": recipe.policy, "use_hf": True, "check_model": False}
    if recipe.model.revision:
        model["model_revision"] = recipe.model.revision
    if recipe.policy_name in POLICIES:
        model["model_type"] = "llama"
    return model if recipe.is_chat else {**model, "template": "dummy", "use_chat_template": False}


def _build_adapters(recipe: Recipe) -> dict[str, object]:
    if not recipe.model.lora_rank:
        return {"tuner_type": "full"}
    return {
        "tuner_type": "lora",
        "lora_rank": recipe.model.lora_rank,
        "lora_alpha": recipe.lora_alpha,
        "lora_dropout": 0.0,
        "target_modules": list(recipe.model.lora_targets),
    }
