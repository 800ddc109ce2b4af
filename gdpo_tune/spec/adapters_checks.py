"""What `model:` can get wrong: keys without effect, and a package that is not installed."""

from __future__ import annotations

import importlib.util

from gdpo_tune.core import registry
from gdpo_tune.core.settings import EVERY_LINEAR, ModelSettings
from gdpo_tune.spec.problems import Node, Problems


def check_model(
    settings: ModelSettings | None, policy: str, root: Node, problems: Problems
) -> None:
    """The keys of the section fit together and to the policy."""
    if settings is None or problems.about("model"):
        return
    if settings.lora_rank:
        _check_lora(settings, root, problems)
    else:
        _check_idle(settings, root, problems)
    if settings.revision and policy in registry.POLICIES:
        path = ("model", "revision")
        reason = f"policy {policy} ships with the package and has no revisions"
        problems.at(root.find(path), path, reason, "remove the key, or give a Hub id as the policy")


def _check_lora(settings: ModelSettings, root: Node, problems: Problems) -> None:
    path = ("model", "lora_rank")
    if importlib.util.find_spec("peft") is None:
        fix = "pip install 'gdpo-tune[peft]', or remove the key to train every weight"
        problems.at(root.find(path), path, "LoRA needs the package peft", fix)
    targets = ("model", "lora_targets")
    if not settings.lora_targets:
        fix = f"write [{EVERY_LINEAR}], or names of modules such as [q_proj, v_proj]"
        problems.at(root.find(targets), targets, "empty, so nothing would be trained", fix)
    elif EVERY_LINEAR in settings.lora_targets and len(settings.lora_targets) > 1:
        reason = f"{EVERY_LINEAR} already stands for every name"
        problems.at(root.find(targets), targets, reason, f"write [{EVERY_LINEAR}], or names alone")


def _check_idle(settings: ModelSettings, root: Node, problems: Problems) -> None:
    """Refuse what would have no effect without a rank."""
    default = ModelSettings()
    for name in ("lora_alpha", "lora_targets"):
        path = ("model", name)
        if getattr(settings, name) != getattr(default, name):
            reason = "without lora_rank no module gets an adapter"
            problems.at(root.find(path), path, reason, "add lora_rank: 16, or remove the key")
