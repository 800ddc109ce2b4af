"""ms-swift: a YAML file for `swift rlhf`.

Source: swift/arguments/, swift/rlhf_trainers/ and swift/rl_core/advantage.py of ms-swift 4.6.0.
"""

from __future__ import annotations

from gdpo_tune.exporters import trl
from gdpo_tune.exporters.base import REWARDS_FILE, Difference, Exported, Refusals, same_everywhere
from gdpo_tune.exporters.recipe import Recipe
from gdpo_tune.exporters.text import yaml_text

LIBRARY = "ms-swift 4.6.0"
SCALE = {"gdpo": "gdpo", **trl.SCALE}
SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}


def export(recipe: Recipe) -> Exported:
    """The recipe as arguments of `swift rlhf`.

    Raises:
        ExportError: ms-swift would change or ignore a part of it.
    """
    refusals = Refusals(recipe, LIBRARY)
    refusals.check(modes=SCALE, losses=trl.LOSSES, leave_one_out=tuple(trl.SCALE))
    refusals.raise_if_any()
    full = not recipe.model.lora_rank
    common = trl.schedule(recipe)
    tree: dict[str, object] = {
        "rlhf_type": "grpo",
        "model": recipe.policy,
        **({"model_revision": recipe.model.revision} if recipe.model.revision else {}),
        "dataset": ["your/prompts"],
        "external_plugins": [REWARDS_FILE],
        "reward_funcs": [reward.name for reward in recipe.rewards],
        "reward_weights": recipe.weights,
        "scale_rewards": SCALE[recipe.mode],
        "advantage_estimator": "rloo" if recipe.leaves_one_out else "grpo",
        # Its default is true under rloo, and GDPO takes the KL in the loss alone.
        "kl_in_reward": False,
        "dynamic_sample": False,
        **trl.algorithm(recipe),
        "top_k": -1,
        "max_length": recipe.longest,
        **common,
        # Its own defaults are 0.95, and 0.1 for the weight decay.
        "adam_beta2": 0.999,
        "torch_dtype": "float32",
        "bf16": recipe.model.dtype != "float32",
        "gradient_checkpointing": recipe.model.gradient_checkpointing != "off",
        "tuner_type": "full" if full else "lora",
        **({} if full else _adapters(recipe)),
        **_engine(recipe),
        "output_dir": recipe.name,
    }
    return Exported(
        library=LIBRARY,
        file="ms_swift.yaml",
        text=yaml_text(tree, (recipe.note, "swift rlhf ms_swift.yaml")),
        command="swift rlhf ms_swift.yaml",
        differences=tuple(_differences(recipe)),
        yours={
            "dataset": "your prompts, in its own format",
            "reward_funcs": f"names that `{REWARDS_FILE}` registers in `orms`, in this order",
        },
    )


def _differences(recipe: Recipe) -> list[Difference]:
    gdpo = recipe.mode == "gdpo"
    missing = "" if gdpo else "counts as a raw 0, which is biased"
    rows = same_everywhere(
        recipe,
        eps="1e-8" if gdpo else "",
        whitening="the same, eps 1e-8" if gdpo else "",
        missing=missing,
        correction="rollout_importance_sampling_mode" if recipe.rollout.engine == "vllm" else "",
    )
    if gdpo:
        rows.append(
            Difference(
                "multi-turn rollouts with a varying number of samples",
                "none",
                "a branch of its own that knows no gdpo: it centres the weighted sum and divides "
                "by nothing, without a word",
            )
        )
    if recipe.loss == "bnpo":
        own = "tokens of the whole step"
        rows.append(Difference("loss_type bnpo averages over", own, "tokens of a micro-batch"))
    return rows


def _adapters(recipe: Recipe) -> dict[str, object]:
    return {
        "lora_rank": recipe.model.lora_rank,
        "lora_alpha": recipe.lora_alpha,
        "lora_dropout": 0.0,
        "target_modules": list(recipe.model.lora_targets),
    }


def _engine(recipe: Recipe) -> dict[str, object]:
    if recipe.rollout.engine != "vllm":
        return {"use_vllm": False}
    if recipe.rollout.vllm_mode == "server":
        server: dict[str, object] = {"vllm_server_base_url": [recipe.rollout.vllm_server]}
        return {"use_vllm": True, "vllm_mode": "server", **server}
    return {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": recipe.rollout.vllm_memory_share,
        "vllm_max_model_len": recipe.longest,
    }
