"""NeMo-RL: a YAML file that inherits from its `grpo_math_1B.yaml`.

Source: examples/configs/grpo_math_1B.yaml, nemo_rl/algorithms/advantage_estimator.py, loss/ and
utils.py of NeMo-RL at commit 7ea279a (22 August 2026, after 0.7.0).
"""

from __future__ import annotations

from gdpo_tune.core.settings import EVERY_LINEAR
from gdpo_tune.exporters.base import Difference, Exported, Refusals, same_everywhere, sum_of
from gdpo_tune.exporters.recipe import Recipe
from gdpo_tune.exporters.text import yaml_text

LIBRARY = "NeMo-RL 7ea279a"
MODES = {"gdpo": True, "gdpo_no_std": False, "grpo": True, "grpo_no_std": False}
"""Mode -> `normalize_rewards`."""
LOSSES = ("dapo", "bnpo", "grpo", "cispo")
FEWEST = 2
"""Rewards that its GDPO asks for."""
_COMMAND = "uv run examples/run_grpo.py --config examples/configs/nemo_rl.yaml"
_FOREVER = 10**9


def export(recipe: Recipe) -> Exported:
    """The recipe as a configuration for `examples/run_grpo.py`.

    Raises:
        ExportError: NeMo-RL would change or ignore a part of it.
    """
    refusals = Refusals(recipe, LIBRARY)
    refusals.check(modes=MODES, losses=LOSSES, leave_one_out=("grpo", "grpo_no_std"))
    if not recipe.sums_first and len(recipe.rewards) < FEWEST:
        refusals.add(
            "normalization",
            recipe.mode,
            f"its GDPO wants at least {FEWEST} rewards, and this trial has one",
            "take a trial under grpo",
        )
    if recipe.passes > 1:
        refusals.add(
            "num_iterations",
            recipe.passes,
            "NeMo-RL passes once over each step's samples, in parts if the batch is smaller",
            "take a trial with num_iterations: 1",
        )
    if recipe.model.revision:
        refusals.add(
            "model.revision",
            recipe.model.revision,
            "NeMo-RL loads the newest revision",
            "download that revision, and give its folder with --set policy=",
        )
    refusals.raise_if_any()
    alphabetical = sorted(recipe.rewards, key=lambda reward: reward.name)
    estimator: dict[str, object] = {
        "name": "grpo" if recipe.sums_first else "gdpo",
        "normalize_rewards": MODES[recipe.mode],
        # Its default is true, which no published GDPO means.
        "use_leave_one_out_baseline": recipe.leaves_one_out,
    }
    if not recipe.sums_first:
        estimator["reward_weights"] = [reward.weight for reward in alphabetical]
    tree: dict[str, object] = {
        "defaults": "grpo_math_1B.yaml",
        "grpo": {
            "num_prompts_per_step": recipe.prompts,
            "num_generations_per_prompt": recipe.group_size,
            "max_num_steps": recipe.training.steps,
            "max_num_epochs": recipe.training.steps,
            "normalize_rewards": MODES[recipe.mode],
            "use_leave_one_out_baseline": recipe.leaves_one_out,
            "use_dynamic_sampling": False,
            "seed": recipe.seed,
            "adv_estimator": estimator,
        },
        "loss_fn": _loss(recipe),
        "policy": _policy(recipe),
        # It goes on from what lies there, and its default is one folder for every run.
        "checkpointing": {"checkpoint_dir": f"results/{recipe.name}"},
    }
    names = ", ".join(f"`reward/{reward.name}`" for reward in alphabetical)
    env = f"an environment that returns {names}"
    if recipe.sums_first:
        env = f"an environment that returns {sum_of(recipe)}"
    return Exported(
        library=LIBRARY,
        file="nemo_rl.yaml",
        text=yaml_text(tree, (recipe.note, "Lay it into examples/configs/, then:", _COMMAND)),
        command=_COMMAND,
        place="a checkout of NeMo-RL",
        differences=tuple(_differences(recipe)),
        yours={
            "the file's place": "`examples/configs/`, beside the file that it inherits from",
            "data": "your prompts, in place of the mathematics that it inherits",
            "env": env,
        },
    )


def _loss(recipe: Recipe) -> dict[str, object]:
    cispo = recipe.loss == "cispo"
    return {
        "reference_policy_kl_penalty": recipe.number("beta"),
        "reference_policy_kl_type": "k3",
        "use_kl_in_reward": False,
        # CISPO has no lower clip where it was measured; 1 - 1 is the ratio's own bound.
        "ratio_clip_min": 1.0 if cispo else recipe.number("epsilon"),
        "ratio_clip_max": recipe.upper_clip(absolute_for_cispo=False),
        "ratio_clip_c": None,
        "token_level_loss": recipe.loss != "grpo",
        "use_cispo": cispo,
    }


def _policy(recipe: Recipe) -> dict[str, object]:
    policy: dict[str, object] = {
        "model_name": recipe.policy,
        "precision": "float32" if recipe.model.dtype == "float32" else "bfloat16",
        "train_global_batch_size": recipe.training.completions_per_step,
        "train_micro_batch_size": recipe.micro_batch,
        "max_total_sequence_length": recipe.longest,
        "max_grad_norm": recipe.training.max_grad_norm,
        "optimizer": {
            "kwargs": {"lr": recipe.number("learning_rate"), "weight_decay": 0.0},
        },
        "scheduler": _scheduler(recipe),
        "generation": {
            "max_new_tokens": recipe.training.max_completion_length,
            "temperature": recipe.number("temperature"),
            "top_p": 1.0,
            "top_k": None,
            "vllm_cfg": {"gpu_memory_utilization": recipe.rollout.vllm_memory_share},
        },
    }
    if recipe.model.lora_rank:
        everywhere = recipe.model.lora_targets == (EVERY_LINEAR,)
        policy["dtensor_cfg"] = {
            "lora_cfg": {
                "enabled": True,
                "dim": recipe.model.lora_rank,
                "alpha": round(recipe.lora_alpha),
                "match_all_linear": everywhere,
                "target_modules": [] if everywhere else list(recipe.model.lora_targets),
            }
        }
    return policy


def _scheduler(recipe: Recipe) -> list[dict[str, object]]:
    """The shape of the learning rate in torch's schedulers, and where one follows another.

    A list even of one: the file that it replaces has a list, which OmegaConf merges with no other.
    """
    rest = max(1, recipe.updates - recipe.warmup)
    shapes: dict[str, dict[str, object]] = {
        "constant": _torch("ConstantLR", factor=1.0, total_iters=_FOREVER),
        "linear": _torch("LinearLR", start_factor=1.0, end_factor=0.0, total_iters=rest),
        "cosine": _torch("CosineAnnealingLR", T_max=rest),
    }
    shape = shapes[recipe.training.lr_schedule]
    if not recipe.warmup:
        return [shape, {"milestones": []}]
    # It cannot begin at 0.
    rising = _torch("LinearLR", start_factor=1e-8, end_factor=1.0, total_iters=recipe.warmup)
    return [rising, shape, {"milestones": [recipe.warmup]}]


def _torch(name: str, **arguments: float) -> dict[str, object]:
    return {"name": f"torch.optim.lr_scheduler.{name}", "kwargs": dict(arguments)}


def _differences(recipe: Recipe) -> list[Difference]:
    rows = same_everywhere(
        recipe,
        eps="1e-6, and nothing where the deviation is 0" if MODES[recipe.mode] else "",
        whitening="the same over the completions of a step, eps 0",
        missing="not known: give every reward a number",
        correction="loss_fn.use_importance_sampling_correction",
    )
    if not recipe.sums_first:
        rows.append(
            Difference(
                "order of the weights",
                "by name: a weight belongs to its reward",
                "alphabetical by reward, whatever order the environment has; the file follows that",
            )
        )
    if recipe.leaves_one_out and recipe.mode == "grpo":
        there = "over the others of the group: each completion has its own"
        rows.append(Difference("standard deviation of a group", "over the whole group", there))
    if recipe.number("beta") > 0:
        there = "the same estimator (k3), its logarithm and value clamped at 20 and 10"
        rows.append(Difference("KL to the untrained policy", "k3, not clamped", there))
    return rows
