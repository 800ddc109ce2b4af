"""prime-rl: a TOML file. It knows one reward a completion, and divides by no standard deviation.

Source: packages/prime-rl-configs/src/prime_rl/configs/ of prime-rl at commit 559b447 (21 August
2026).
"""

from __future__ import annotations

from gdpo_tune.exporters.base import Difference, Exported, Refusals, same_everywhere, sum_of
from gdpo_tune.exporters.recipe import Recipe
from gdpo_tune.exporters.text import toml_text

LIBRARY = "prime-rl 559b447"
MODES = ("grpo_no_std",)
LOSSES = ("dapo", "bnpo")


def export(recipe: Recipe) -> Exported:
    """The recipe as a file for `uv run rl @ rl.toml`.

    Raises:
        ExportError: prime-rl would change or ignore a part of it.
    """
    refusals = Refusals(recipe, LIBRARY)
    refusals.check(modes=MODES, losses=LOSSES)
    if recipe.number("beta") > 0:
        refusals.add(
            "beta",
            recipe.number("beta"),
            "its loss has no KL to the untrained policy",
            "take a trial with beta: 0",
        )
    if recipe.passes > 1:
        reason = "prime-rl passes once over each step's samples"
        refusals.add("num_iterations", recipe.passes, reason, "take a trial with 1")
    if recipe.training.lr_schedule == "constant" and recipe.warmup:
        refusals.add(
            "training.warmup_share",
            recipe.training.warmup_share,
            "its constant learning rate has no warm-up",
            "--set training.warmup_share=0",
        )
    if recipe.model.lora_rank:
        refusals.add(
            "model.lora_rank",
            recipe.model.lora_rank,
            "adapters are not exported to prime-rl, which shares them between trainer and server",
            "--set model.lora_rank=0",
        )
    if recipe.model.revision:
        refusals.add(
            "model.revision",
            recipe.model.revision,
            "prime-rl loads the newest revision",
            "download that revision, and give its folder with --set policy=",
        )
    refusals.raise_if_any()
    tree: dict[str, object] = {
        "max_steps": recipe.training.steps,
        "seq_len": recipe.longest,
        "model": {"name": recipe.policy},
        "trainer": {
            "optim": {
                "type": "adamw",
                "lr": recipe.number("learning_rate"),
                "weight_decay": 0.0,
                "max_norm": recipe.training.max_grad_norm,
            },
            "scheduler": _scheduler(recipe),
            # Its default adds a KL between sampler and trainer.
            "loss": {"type": "default", "kl_tau": 0.0},
        },
        "orchestrator": {
            "batch_size": recipe.training.completions_per_step,
            "group_size": recipe.group_size,
            "algo": {"type": "grpo"},
            "train": {
                # Else they would not count among the tokens that the loss is averaged over.
                "filter_zero_advantages": False,
                "sampling": {
                    "temperature": recipe.number("temperature"),
                    "max_completion_tokens": recipe.training.max_completion_length,
                },
            },
        },
        "inference": {"vllm": {"gpu_memory_utilization": recipe.rollout.vllm_memory_share}},
    }
    return Exported(
        library=LIBRARY,
        file="rl.toml",
        text=toml_text(tree, (recipe.note, "uv run rl @ rl.toml")),
        command="uv run rl @ rl.toml",
        differences=tuple(_differences(recipe)),
        yours={
            "orchestrator.train.source": "an environment of verifiers whose rubric gives "
            f"{sum_of(recipe)}",
            "orchestrator.renderer.name": "`default`, unless prime-rl knows the policy by its "
            "name: for any other it stops and asks",
        },
    )


def _scheduler(recipe: Recipe) -> dict[str, object]:
    shape = recipe.training.lr_schedule
    if shape == "constant":
        return {"type": "constant"}
    decay = {"decay_steps": recipe.updates - recipe.warmup} if shape == "linear" else {}
    return {"type": shape, "warmup_steps": recipe.warmup, **decay}


def _differences(recipe: Recipe) -> list[Difference]:
    clip = f"{recipe.number('epsilon'):g} below and {recipe.number('epsilon_high'):g} above 1"
    return [
        *same_everywhere(
            recipe,
            eps="",
            whitening="",
            missing="not known: the sum has to be a number",
            precision="bfloat16, its default",
        ),
        Difference(
            "clip of the ratio",
            clip,
            "none: tokens whose probability moved too far are masked (`dppo_mask_low`, "
            "`dppo_mask_high`, in other units, left at their defaults)",
        ),
        Difference(
            "samples of an older policy",
            "none: each step samples from the policy that it trains",
            "up to `max_off_policy_steps` old, 8 by default",
        ),
    ]
