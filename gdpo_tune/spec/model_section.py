"""Checks of `model:` and `rollout:`: how a policy is loaded, trained and sampled."""

from __future__ import annotations

import importlib.util

from gdpo_tune.core import registry
from gdpo_tune.core.settings import EVERY_LINEAR, ModelSettings, RolloutSettings
from gdpo_tune.spec.problems import Problems
from gdpo_tune.spec.sandbox_section import check_address
from gdpo_tune.spec.sections import refuse_idle


def check_model(settings: ModelSettings, policy: str, problems: Problems) -> None:
    """Refuse keys that do not fit together or to the policy."""
    if not settings.lora_rank:
        reason, fix = "without lora_rank no module gets an adapter", "add lora_rank: 16, or remove"
        keys = ("lora_alpha", "lora_targets")
        refuse_idle("model", settings, keys, reason, f"{fix} the key", problems, "model.lora_rank")
    elif importlib.util.find_spec("peft") is None:
        fix = "pip install 'gdpo-tune[peft]', or remove the key to train every weight"
        problems.refuse("model.lora_rank", "LoRA needs the package peft", fix)
    if settings.lora_rank and not settings.lora_targets:
        fix = f"write [{EVERY_LINEAR}], or names of modules such as [q_proj, v_proj]"
        problems.refuse("model.lora_targets", "empty, so nothing would be trained", fix)
    elif EVERY_LINEAR in settings.lora_targets and len(settings.lora_targets) > 1:
        reason = f"{EVERY_LINEAR} already stands for every name"
        problems.refuse("model.lora_targets", reason, f"write [{EVERY_LINEAR}], or names alone")
    if settings.revision and policy in registry.POLICIES:
        reason = f"policy {policy} ships with the package and has no revisions"
        fix = "remove the key, or give a Hub id as the policy"
        problems.refuse("model.revision", reason, fix, given=("policy", "task"))


def check_rollout(settings: RolloutSettings, problems: Problems) -> None:
    """Refuse keys without effect, and a server that could not be asked."""
    given = ("rollout.engine", "rollout.vllm_mode")

    def idle(reason: str, *keys: str) -> None:
        refuse_idle("rollout", settings, keys, reason, "remove the key", problems, *given)

    if settings.engine == "transformers":
        reason = "engine: transformers is not vLLM"
        idle(reason, "vllm_mode", "vllm_server", "vllm_memory_share")
    elif settings.vllm_mode == "colocate":
        idle("only vllm_mode: server asks a server", "vllm_server")
    else:
        idle("a server has a GPU of its own, which its command line divides", "vllm_memory_share")
        if settings.engine == "auto":
            reason = "engine: auto may take another engine, which would ask no server"
            fix = "write engine: vllm beside it"
            problems.refuse("rollout.vllm_mode", reason, fix, given=given)
        reason = "vllm_mode: server asks a server that is already running"
        check_address(settings.vllm_server, "rollout.vllm_server", reason, problems)
