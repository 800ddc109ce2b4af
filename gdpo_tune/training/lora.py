"""LoRA adapters: which modules get one, how they are saved beside the merged policy, and loaded.

A checkpoint in the middle of a training holds the adapter alone. The last one is a policy of its
own: the merged model, and the adapter that it came from in the folder `adapter`.

Source: Hu et al. 2021, LoRA: Low-Rank Adaptation of Large Language Models, arXiv 2106.09685.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gdpo_tune.core.errors import PolicyError
from gdpo_tune.core.settings import EVERY_LINEAR, ModelSettings

ADAPTER = "adapter"
"""Folder of the adapter inside a checkpoint that holds the merged policy."""
_NAME = "default"
"""Of the one adapter of a trial, in the words of `peft`."""
_SCALE = 2
"""Of the rank, where `lora_alpha` does not say."""


def adapter_config(model: PreTrainedModel, settings: ModelSettings, policy: str) -> Any:
    """What TRL is to put around the model: a `LoraConfig`, or None without a rank.

    Args:
        model: the policy, without adapters.
        settings: rank, scale and targets.
        policy: its name, for the message.

    Raises:
        PolicyError: a target matches no linear module of the policy.
    """
    if not settings.lora_rank:
        return None
    peft: Any = import_module("peft")
    check_targets(model, settings.lora_targets, policy)
    everywhere = settings.lora_targets == (EVERY_LINEAR,)
    return peft.LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha or _SCALE * settings.lora_rank,
        target_modules=EVERY_LINEAR if everywhere else list(settings.lora_targets),
        task_type="CAUSAL_LM",
    )


def check_targets(model: PreTrainedModel, targets: tuple[str, ...], policy: str) -> None:
    """Refuse targets that no linear module answers to; the output head is no target.

    Raises:
        PolicyError: with the names that there are.
    """
    known = linear_modules(model)
    endings = {name.rpartition(".")[2] for name in known}
    unknown = [
        target
        for target in targets
        if target != EVERY_LINEAR and not any(f".{name}".endswith(f".{target}") for name in known)
    ]
    if unknown:
        raise PolicyError(
            f"model.lora_targets = [{', '.join(targets)}]: policy {policy!r} has no linear module "
            f"{', '.join(unknown)}: use {EVERY_LINEAR}, or some of {', '.join(sorted(endings))}"
        )


def linear_modules(model: PreTrainedModel) -> list[str]:
    """Dotted names of the linear modules, the output head aside."""
    head = model.get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    ]


def has_adapter(model: Any) -> bool:
    """Whether this is a policy with an adapter around it."""
    return hasattr(model, "peft_config")


def save_merged(model: Any, folder: Path) -> None:
    """Write the policy with its adapter merged in, and the adapter beside it.

    Sums are rounded to the type of the weights; the model in memory stays as it is.
    """
    model.get_base_model().save_pretrained(folder, state_dict=merged_weights(model))
    model.save_pretrained(folder / ADAPTER)


@torch.no_grad()
def merged_weights(model: Any) -> dict[str, Tensor]:
    """Name in the policy without adapters -> weight with the adapter's change, on the CPU."""
    base = model.get_base_model()
    changes = {
        f"{name}.weight": module.get_delta_weight(_NAME)
        for name, module in base.named_modules()
        if hasattr(module, "get_delta_weight")
    }
    weights: dict[str, Tensor] = {}
    for name, value in base.state_dict().items():
        if ".lora_" in name:
            continue
        plain = name.replace(".base_layer.", ".")
        total = value if plain not in changes else (value + changes[plain]).to(value.dtype)
        weights[plain] = total.detach().cpu()
    return weights


def with_adapter(model: PreTrainedModel, folder: Path) -> Any:
    """The untrained policy with the adapter that `save_merged` wrote: what was trained, exactly."""
    peft: Any = import_module("peft")
    return peft.PeftModel.from_pretrained(model, str(folder / ADAPTER))
