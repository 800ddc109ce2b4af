"""Axolotl: a YAML file for `axolotl train`. It trains with TRL.

Source: axolotl/utils/schemas/ and core/trainers/grpo/ of Axolotl 0.19.0, which pins TRL 1.9.0.
"""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import urlsplit

from gdpo_tune.core.parameters import LOSSES, TRANSFORMERS_SCHEDULES
from gdpo_tune.core.settings import EVERY_LINEAR
from gdpo_tune.core.trl_fields import CORRECTED_KL
from gdpo_tune.exporters import library, trl
from gdpo_tune.exporters.library import Exported, Library
from gdpo_tune.exporters.training_setup import TrainingSetup

LIBRARY = Library("Axolotl 0.19.0", ("gdpo", *trl.SCALE), LOSSES, accepts_fractional_alpha=False)
PLUGIN = "keep_order"
"""Module of an export with a plugin of Axolotl, which has no key for this."""


def export_axolotl(setup: TrainingSetup) -> Exported:
    """Return the training as Axolotl's configuration."""
    LIBRARY.check(setup)
    total, rollout = setup.spec.training.completions_per_step, setup.spec.rollout
    share, longest = rollout.vllm_memory_share, setup.max_sequence_length
    engine = {"gpu_memory_utilization": share, "max_model_len": longest}
    sampling = trl.build_generation_kwargs(setup, ends=True)
    plugin = {f"{PLUGIN}.py": _ORDER + _SAMPLING if sampling else _ORDER}
    settings: dict[str, object] = {
        "base_model": setup.policy,
        **({"revision_of_model": setup.spec.model.revision} if setup.spec.model.revision else {}),
        # `rl: gdpo` does not start with adapters; the aggregation below is all that it adds.
        "rl": "grpo",
        "trl": {
            "reward_funcs": trl.list_reward_functions(setup),
            "reward_weights": setup.weights,
            **trl.build_aggregation(setup),
            **trl.build_algorithm(setup),
            **sampling,
            # Completions that are sampled at once, if they are not one optimizer step's.
            **({"generation_batch_size": total} if setup.spec.training.mini_batches > 1 else {}),
            **CORRECTED_KL,  # it pins a TRL with another default
            **_build_sampler(setup),
        },
        # An engine beside the trainer.
        **({"vllm": engine} if rollout.engine == "vllm" and rollout.vllm_mode != "server" else {}),
        "datasets": [{"path": library.PROMPTS_FILE, "ds_type": "parquet", "split": "train"}],
        "skip_prepare_dataset": True,
        "shuffle_merged_datasets": False,
        "plugins": [f"{PLUGIN}.KeepOrder"],
        "sequence_len": setup.max_sequence_length,
        "micro_batch_size": setup.micro_batch_size,
        "gradient_accumulation_steps": setup.gradient_accumulation_steps,
        "max_steps": setup.optimizer_steps,
        "learning_rate": setup.get_number("learning_rate"),
        "lr_scheduler": TRANSFORMERS_SCHEDULES[setup.spec.training.lr_schedule],
        "warmup_steps": setup.warmup_optimizer_steps,
        "optimizer": "adamw_torch",
        "weight_decay": 0.0,
        "max_grad_norm": setup.spec.training.max_grad_norm,
        **trl.build_clip_of_small_gradients(setup),
        "bf16": setup.spec.model.dtype != "float32",
        "gradient_checkpointing": setup.spec.model.gradient_checkpointing != "off",
        **_build_adapters(setup),
        "seed": setup.request.seed,
        "output_dir": setup.name,
    }
    return Exported(
        library=LIBRARY.name,
        file="axolotl.yaml",
        text=library.format_yaml(settings, setup.note, library.START),
        install=library.format_install("axolotl==0.19.0", setup.list_extras()),
        run=_format_run(setup),
        result=setup.name,
        training=replace(trl.build_training_files(setup), others=plugin),
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


def _format_run(setup: TrainingSetup) -> str:
    command = "axolotl train axolotl.yaml --launcher python"
    started = trl.format_command(setup, command, "--gradient-checkpointing")
    return f'export PYTHONPATH="$PWD:${{PYTHONPATH-}}"\n{started}'


def _build_sampler(setup: TrainingSetup) -> dict[str, object]:
    if setup.spec.rollout.engine != "vllm":
        return {"use_vllm": False}
    sampler: dict[str, object] = {
        "use_vllm": True,
        "vllm_mode": setup.spec.rollout.vllm_mode,
        **trl.build_correction(setup),
    }
    if setup.spec.rollout.vllm_mode == "server":
        address = urlsplit(setup.spec.rollout.vllm_server)
        sampler |= {"vllm_server_host": address.hostname, "vllm_server_port": address.port}
    return sampler


def _build_adapters(setup: TrainingSetup) -> dict[str, object]:
    if not setup.spec.model.lora_rank:
        return {}
    adapters: dict[str, object] = {
        "adapter": "lora",
        "lora_r": setup.spec.model.lora_rank,
        "lora_alpha": setup.lora_alpha,
        "lora_dropout": 0.0,
    }
    if setup.spec.model.lora_targets == (EVERY_LINEAR,):
        return adapters | {"lora_target_linear": True}
    return adapters | {"lora_target_modules": list(setup.spec.model.lora_targets)}
