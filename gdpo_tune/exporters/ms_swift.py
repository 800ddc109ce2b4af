"""ms-swift: a YAML file for `swift rlhf`.

Source: swift/arguments/, swift/rlhf_trainers/ and swift/rl_core/advantage.py of ms-swift 4.6.0.
"""

from __future__ import annotations

from gdpo_tune.exporters import base, trl
from gdpo_tune.exporters.recipe import Recipe

LIBRARY = "ms-swift 4.6.0"
SCALE = {"gdpo": "gdpo", **trl.SCALE}
COMMAND = "swift rlhf ms_swift.yaml"


def export(recipe: Recipe) -> base.Exported:
    """Return the recipe as arguments of `swift rlhf`."""
    base.check_support(
        recipe, LIBRARY, modes=SCALE, losses=trl.LOSSES, leave_one_out=tuple(trl.SCALE)
    )
    settings: dict[str, object] = {
        "rlhf_type": "grpo",
        "model": recipe.policy,
        **({"model_revision": recipe.model.revision} if recipe.model.revision else {}),
        "dataset": ["your/prompts"],
        "external_plugins": [base.REWARDS_FILE],
        "reward_funcs": [reward.name for reward in recipe.rewards],
        "reward_weights": recipe.weights,
        "scale_rewards": SCALE[recipe.mode],
        "advantage_estimator": "rloo" if recipe.leaves_one_out else "grpo",
        # Its default is true under rloo, and GDPO takes the KL in the loss alone.
        "kl_in_reward": False,
        "dynamic_sample": False,
        **trl.build_algorithm(recipe),
        "top_k": -1,
        "max_length": recipe.max_sequence_length,
        **trl.build_schedule(recipe),
        # Its own defaults are 0.95, and 0.1 for the weight decay.
        "adam_beta2": 0.999,
        "torch_dtype": "float32",
        "bf16": recipe.model.dtype != "float32",
        "gradient_checkpointing": recipe.model.gradient_checkpointing != "off",
        **_build_adapters(recipe),
        **trl.build_sampler(recipe, [recipe.rollout.vllm_server], "vllm_max_model_len"),
        "output_dir": recipe.name,
    }
    return base.Exported(
        library=LIBRARY,
        file="ms_swift.yaml",
        text=base.format_yaml(settings, recipe.note, COMMAND),
        command=COMMAND,
        differences=_list_differences(recipe),
        to_supply={
            "dataset": "your prompts, in its own format",
            "reward_funcs": f"names that `{base.REWARDS_FILE}` registers in `orms`, in this order",
        },
    )


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


def _list_differences(recipe: Recipe) -> list[base.Difference]:
    gdpo = recipe.mode == "gdpo"
    rows = base.list_common_differences(
        recipe,
        eps="1e-8" if gdpo else "",
        whitening="the same, eps 1e-8" if gdpo else "",
        missing="" if gdpo else "counts as a raw 0, which is biased",
        correction="rollout_importance_sampling_mode" if recipe.rollout.engine == "vllm" else "",
        bnpo="tokens of a micro-batch",
        kl_gradient="of k3 alone, which is not that of the reverse KL; there is no switch",
        clamps_kl=True,
    )
    if gdpo:
        topic = "multi-turn rollouts with a varying number of samples"
        theirs = (
            "a separate branch without gdpo: it centres the weighted sum and divides by nothing, "
            "without a warning"
        )
        rows.append(base.Difference(topic, "none", theirs))
    return rows
