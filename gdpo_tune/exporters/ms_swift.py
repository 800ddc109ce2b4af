"""ms-swift: a YAML file for `swift rlhf`.

Source: swift/arguments/, swift/rlhf_trainers/ and swift/rl_core/advantage.py of ms-swift 4.6.0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gdpo_tune.core.parameters import LOSSES
from gdpo_tune.core.registry import POLICIES
from gdpo_tune.exporters import library, trl
from gdpo_tune.exporters.library import Exported, Library, TrainingFiles
from gdpo_tune.exporters.runtime_prompts import build_message_row
from gdpo_tune.exporters.training_setup import TrainingSetup

INSTALL = "pip install ms-swift==4.6.0 msgspec"
SCALE = {"gdpo": "gdpo", **trl.SCALE}
LIBRARY = Library(
    "ms-swift 4.6.0", SCALE, LOSSES, leave_one_out=tuple(trl.SCALE), accepts_fractional_alpha=False
)
EVERY_TOKEN = 10**9
"""`top_k` above every vocabulary: with 0 or -1, Transformers would take that of the policy, or 50.
Source: `prepare_generation_config` in swift/infer_engine/utils.py."""
CORRECTIONS = ("token_truncate", "token_mask")
"""Kinds of `importance_sampling` that it computes alike."""


def export_ms_swift(setup: TrainingSetup) -> Exported:
    """Return the training as arguments of `swift rlhf`."""
    LIBRARY.check(setup)
    attention = setup.spec.model.attention
    sampling = _build_sampling(setup)
    lines = ["from swift.rewards import orms", "", "REWARDS = build_swift_rewards(SCORER)"]
    lines += [f'orms["{each.name}_reward"] = REWARDS["{each.name}"]' for each in setup.rewards]
    settings: dict[str, object] = {
        "rlhf_type": "grpo",
        **_build_model(setup),
        "dataset": [library.PROMPTS_FILE],
        "dataset_shuffle": False,
        "external_plugins": [library.REWARDS_FILE],
        "reward_funcs": [f"{reward.name}_reward" for reward in setup.rewards],
        "reward_weights": setup.weights,
        "scale_rewards": SCALE[setup.mode],
        "advantage_estimator": "rloo" if setup.leaves_one_out else "grpo",
        # Its default is true under rloo, and GDPO takes the KL in the loss alone.
        "kl_in_reward": False,
        "dynamic_sample": False,
        **trl.build_algorithm(setup),
        "top_k": -1 if setup.spec.rollout.engine == "vllm" else EVERY_TOKEN,
        **({"callbacks": ["plain_sampling"]} if sampling else {}),
        "max_length": setup.max_sequence_length,
        **trl.build_schedule(setup),
        **trl.build_clip_of_small_gradients(setup),
        **_build_correction(setup),
        # Its own defaults are 0.95, and 0.1 for the weight decay.
        "adam_beta2": 0.999,
        "torch_dtype": "float32",
        "bf16": setup.spec.model.dtype != "float32",
        "gradient_checkpointing": setup.spec.model.gradient_checkpointing != "off",
        **({"attn_impl": attention} if attention != "auto" else {}),
        **_build_adapters(setup),
        **trl.build_sampler(setup, [setup.spec.rollout.vllm_server], "vllm_max_model_len"),
        "output_dir": setup.name,
        "add_version": False,
    }
    return Exported(
        library=LIBRARY.name,
        file="ms_swift.yaml",
        text=library.format_yaml(settings, setup.note, library.START),
        install=" ".join([INSTALL, *setup.list_extras()]),
        run=trl.format_command(setup, "swift rlhf ms_swift.yaml"),
        required_inputs=_list_supplies(setup),
        result=f"{setup.name}/checkpoint-{setup.optimizer_steps}",
        training=TrainingFiles(
            ("build_swift_rewards",), "\n".join(lines) + sampling, build_message_row
        ),
    )


def _build_sampling(setup: TrainingSetup) -> str:
    """Return a callback by which the policy's files say no more than its end tokens; or nothing."""
    changed: dict[str, Any] = dict.fromkeys(setup.own_settings)
    if len(setup.end_tokens) > 1 and setup.spec.rollout.engine != "vllm":
        changed["eos_token_id"] = list(setup.end_tokens)
    if not changed:
        return ""
    return f"""

from swift.callbacks import TrainerCallback, callbacks_map


class PlainSampling(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **kwargs):
        for key, value in {changed}.items():
            setattr(model.generation_config, key, value)


callbacks_map["plain_sampling"] = PlainSampling"""


def _build_correction(setup: TrainingSetup) -> dict[str, object]:
    settings = setup.spec.rollout
    if settings.engine != "vllm" or settings.importance_sampling not in CORRECTIONS:
        return {}
    return {
        "rollout_importance_sampling_mode": settings.importance_sampling,
        "rollout_importance_sampling_threshold": settings.importance_sampling_cap,
    }


def _list_supplies(setup: TrainingSetup) -> dict[str, str]:
    """Return what ms-swift asks for: it knows the architecture of a Hub model by its name alone."""
    if setup.spec.policy in POLICIES or not Path(setup.policy).is_absolute():
        return {}
    start = f"{library.START} --model_type qwen2"
    return {"model_type": f"its name for the architecture of your policy, as in `{start}`"}


def _build_model(setup: TrainingSetup) -> dict[str, object]:
    model: dict[str, object] = {"model": setup.policy, "use_hf": True, "check_model": False}
    if setup.spec.model.revision:
        model["model_revision"] = setup.spec.model.revision
    if setup.spec.policy in POLICIES:
        model["model_type"] = "llama"
    return model if setup.is_chat else {**model, "template": "dummy", "use_chat_template": False}


def _build_adapters(setup: TrainingSetup) -> dict[str, object]:
    if not setup.spec.model.lora_rank:
        return {"tuner_type": "full"}
    return {
        "tuner_type": "lora",
        "lora_rank": setup.spec.model.lora_rank,
        "lora_alpha": setup.lora_alpha,
        "lora_dropout": 0.0,
        "target_modules": list(setup.spec.model.lora_targets),
    }
