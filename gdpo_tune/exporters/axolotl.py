"""Axolotl: a YAML file for `axolotl train`. It trains with TRL.

Source: axolotl/utils/schemas/ and core/trainers/grpo/ of Axolotl 0.19.0, which pins TRL 1.9.0.
"""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import urlsplit

from gdpo_tune.core.settings import EVERY_LINEAR
from gdpo_tune.exporters import library, trl
from gdpo_tune.exporters.library import Exported, Library
from gdpo_tune.exporters.recipe import Recipe

LIBRARY = Library("Axolotl 0.19.0", ("gdpo", *trl.SCALE), trl.LOSSES, fractions=False)
PLUGIN = "keep_order"
"""Module of an export with a plugin of Axolotl, which has no key for this."""


def export(recipe: Recipe) -> Exported:
    """Return the recipe as Axolotl's configuration."""
    LIBRARY.check(recipe)
    total, rollout = recipe.training.completions_per_step, recipe.rollout
    share, longest = rollout.vllm_memory_share, recipe.max_sequence_length
    engine = {"gpu_memory_utilization": share, "max_model_len": longest}
    sampling = trl.build_generation_kwargs(recipe, ends=True)
    plugin = {f"{PLUGIN}.py": _ORDER + _SAMPLING if sampling else _ORDER}
    settings: dict[str, object] = {
        "base_model": recipe.policy,
        **({"revision_of_model": recipe.model.revision} if recipe.model.revision else {}),
        # `rl: gdpo` does not start with adapters; the aggregation below is all that it adds.
        "rl": "grpo",
        "trl": {
            "reward_funcs": trl.list_reward_functions(recipe),
            "reward_weights": recipe.weights,
            **trl.build_aggregation(recipe),
            **trl.build_algorithm(recipe),
            **sampling,
            # Completions that are sampled at once, if they are not one optimizer step's.
            **({"generation_batch_size": total} if recipe.training.mini_batches > 1 else {}),
            **trl.CORRECTED_KL,
            **_build_sampler(recipe),
        },
        # An engine beside the trainer.
        **({"vllm": engine} if rollout.engine == "vllm" and rollout.vllm_mode != "server" else {}),
        "datasets": [{"path": library.PROMPTS_FILE, "ds_type": "parquet", "split": "train"}],
        "skip_prepare_dataset": True,
        "shuffle_merged_datasets": False,
        "plugins": [f"{PLUGIN}.KeepOrder"],
        "sequence_len": recipe.max_sequence_length,
        "micro_batch_size": recipe.micro_batch,
        "gradient_accumulation_steps": recipe.micro_batches,
        "max_steps": recipe.updates,
        "learning_rate": recipe.get_number("learning_rate"),
        "lr_scheduler": trl.SCHEDULES[recipe.training.lr_schedule],
        "warmup_steps": recipe.warmup,
        "optimizer": "adamw_torch",
        "weight_decay": 0.0,
        "max_grad_norm": recipe.training.max_grad_norm,
        **trl.build_clip_of_small_gradients(recipe),
        "bf16": recipe.model.dtype != "float32",
        "gradient_checkpointing": recipe.model.gradient_checkpointing != "off",
        **_build_adapters(recipe),
        "seed": recipe.seed,
        "output_dir": recipe.name,
    }
    return Exported(
        library=LIBRARY.name,
        file="axolotl.yaml",
        text=library.format_yaml(settings, recipe.note, library.START),
        install=library.format_install("axolotl==0.19.0", recipe.list_extras(vllm="vllm")),
        run=_format_run(recipe),
        result=recipe.name,
        training=replace(trl.build_training_files(recipe), others=plugin),
    )


_ORDER = '''"""Plugin of Axolotl."""

from axolotl.integrations.base import BasePlugin


class KeepOrder(BasePlugin):
    """Leave the prompts in the order of their file."""

    def get_training_args(self, cfg):
        return {"shuffle_dataset": False}
'''
_SAMPLING = '''
    def post_trainer_create(self, cfg, trainer):
        """Sample with `trl.generation_kwargs`; TRL 1.9 cuts at the tokenizer's end token alone."""
        settings, generate = dict(cfg.trl.generation_kwargs), trainer._generate_single_turn
        trainer.generation_config.update(**settings)
        trainer.generation_kwargs.update(settings)
        ends = settings.get("eos_token_id", [])

        def generate_and_cut(*args):
            completions, *rest = generate(*args)
            stops = [[n for n, t in enumerate(c, 1) if t in ends] for c in completions]
            return [c[: s[0] if s else None] for c, s in zip(completions, stops)], *rest

        trainer._generate_single_turn = generate_and_cut
'''


def _format_run(recipe: Recipe) -> str:
    """Return the lines that start Axolotl in one process, which finds the modules beside it."""
    command = "axolotl train axolotl.yaml --launcher python"
    started = trl.format_run(recipe, command, "--bf16", "--gradient-checkpointing")
    return f'export PYTHONPATH="$PWD:${{PYTHONPATH-}}"\n{started}'


def _build_sampler(recipe: Recipe) -> dict[str, object]:
    """Return the keys of the sampler in the section `trl:`."""
    if recipe.rollout.engine != "vllm":
        return {"use_vllm": False}
    sampler: dict[str, object] = {
        "use_vllm": True,
        "vllm_mode": recipe.rollout.vllm_mode,
        **trl.build_correction(recipe),
    }
    if recipe.rollout.vllm_mode == "server":
        address = urlsplit(recipe.rollout.vllm_server)
        sampler |= {"vllm_server_host": address.hostname, "vllm_server_port": address.port}
    return sampler


def _build_adapters(recipe: Recipe) -> dict[str, object]:
    if not recipe.model.lora_rank:
        return {}
    adapters: dict[str, object] = {
        "adapter": "lora",
        "lora_r": recipe.model.lora_rank,
        "lora_alpha": recipe.lora_alpha,
        "lora_dropout": 0.0,
    }
    if recipe.model.lora_targets == (EVERY_LINEAR,):
        return adapters | {"lora_target_linear": True}
    return adapters | {"lora_target_modules": list(recipe.model.lora_targets)}
