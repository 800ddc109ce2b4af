"""LoRA adapters: the modules that get one, and the files that a checkpoint holds of them.

A checkpoint holds the adapter alone. Where a trial writes whole policies, the last one is the
merged model, and the adapter in the directory `adapter`. vLLM gets the adapter itself, from files
in memory.

Source: Hu et al. 2021, LoRA: Low-Rank Adaptation of Large Language Models, arXiv 2106.09685.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from gdpo_tune.core.errors import PolicyError
from gdpo_tune.core.policy_shapes import find_expert_problem
from gdpo_tune.core.settings import EVERY_LINEAR, ModelSettings
from gdpo_tune.core.trial_files import ADAPTER, ADAPTER_CONFIG
from gdpo_tune.policies.adapters import compute_joined_weight
from gdpo_tune.training.distributed import gather_on_first, gather_tensor, is_sharded

MEMORY = Path("/dev/shm")
"""File system in memory."""
_TARGETS = (nn.Linear, Conv1D, nn.Embedding)
"""Modules that get an adapter, as in PEFT; Conv1D is the linear module of GPT-2."""


def build_adapter_config(model: PreTrainedModel, settings: ModelSettings, policy: str) -> Any:
    """Build the `LoraConfig` with which TRL wraps the model; None without a rank.

    Raises:
        PolicyError: a target matches no module of the model, whose name is `policy`.
    """
    if not settings.lora_rank:
        return None
    names = [name for name, _ in model.named_parameters()]
    if problem := find_expert_problem(names, settings.lora_targets):
        raise PolicyError(problem)
    # A target has to match a module with weights of its own besides the output head: an embedding
    # whose weights are also the head's would change the head once it is merged.
    head: Any = model.get_output_embeddings()
    modules: list[tuple[str, Any]] = list(model.named_modules())
    names = [n for n, m in modules if isinstance(m, _TARGETS) and m.weight is not head.weight]
    targets = settings.lora_targets
    unknown = [
        target
        for target in targets
        if target != EVERY_LINEAR and not any(f".{name}".endswith(f".{target}") for name in names)
    ]
    if unknown:
        endings = sorted({name.rpartition(".")[2] for name in names})
        raise PolicyError(
            f"model.lora_targets = [{', '.join(targets)}]: policy {policy!r} has no linear module "
            f"{', '.join(unknown)}: use {EVERY_LINEAR}, or some of {', '.join(endings)}"
        )
    peft: Any = import_module("peft")
    # Readers of the adapter get these weights even when the base's main branch has moved on.
    commit = getattr(model.config, "_commit_hash", None)
    return peft.LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha or 2 * settings.lora_rank,
        target_modules=EVERY_LINEAR if targets == (EVERY_LINEAR,) else list(targets),
        task_type="CAUSAL_LM",
        fan_in_fan_out=any(isinstance(module, Conv1D) for _, module in modules),
        revision=settings.revision or commit,
    )


def read_form(adapter: Path, settings: ModelSettings) -> ModelSettings:
    """Return the settings of a model with the rank and the scale of an adapter on disk."""
    config = json.loads((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    return settings.replace(lora_rank=config["r"], lora_alpha=float(config["lora_alpha"]))


def fill_adapter(model: Any, adapter: Path) -> None:
    """Replace the adapter of a `PeftModel` by one on disk of the same form.

    Raises:
        PolicyError: it has other modules.
    """
    peft: Any = import_module("peft")
    weights = peft.load_peft_weights(str(adapter), device="cpu")
    loaded = peft.set_peft_model_state_dict(model, weights)
    missing = [name for name in loaded.missing_keys if "lora_" in name]
    if missing or loaded.unexpected_keys:
        other = [*missing, *loaded.unexpected_keys][0]
        raise PolicyError(f"{adapter} differs from the adapters of this policy in {other}")


Weights = dict[str, Tensor]
"""Name of a weight -> the whole weight."""


@dataclass(frozen=True)
class GatheredPolicy:
    """Weights of a sharded policy in the memory of the first process; empty in the others."""

    trained: Weights
    """Those of the policy, or of its adapter alone."""
    merged: Weights
    """Those of the policy with its adapter's change, if they are to be written."""


def gather_policy(model: Any, *, whole: bool) -> GatheredPolicy | None:
    """Gather what `save_policy` writes of a sharded policy; None for one that is not sharded."""
    if not is_sharded(model):
        return None
    if not hasattr(model, "peft_config"):
        return GatheredPolicy(gather_on_first(model.state_dict(keep_vars=True).items()), {})
    return GatheredPolicy(
        gather_on_first(list_adapter_weights(model)), _merge_weights(model) if whole else {}
    )


def save_policy(
    model: Any,
    directory: Path,
    *,
    whole: bool = False,
    dtype: torch.dtype = torch.float32,
    gathered: GatheredPolicy | None = None,
) -> None:
    """Write a policy, or its adapter alone; with `whole`, the merged policy and the adapter.

    Of a sharded policy these are the `gathered` weights. Those of an adapter are rounded to
    `dtype`: one that computes in bfloat16 rounds them in every step.
    """
    if whole and hasattr(model, "peft_config"):
        merged = gathered.merged if gathered else _merge_weights(model)
        model.get_base_model().save_pretrained(directory, state_dict=merged)
        directory /= ADAPTER
    weights = gathered.trained if gathered else None
    if hasattr(model, "peft_config") and dtype != torch.float32:
        weights = dict(list_adapter_weights(model)) if weights is None else weights
        weights = {name: weight.detach().to(dtype) for name, weight in weights.items()}
    model.save_pretrained(directory, state_dict=weights)


def list_adapter_weights(model: Any) -> list[tuple[str, Tensor]]:
    """List the weights of a `PeftModel` that are trained, by name."""
    return [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]


@contextmanager
def write_adapter_to_memory(model: Any) -> Generator[Path]:
    """Write the adapter of a `PeftModel` to a directory that is deleted after the block.

    The directory is in memory where there is room for it, else a temporary one on disk.
    """
    trained = {name: gather_tensor(weight.detach()) for name, weight in list_adapter_weights(model)}
    size = sum(weight.numel() * weight.element_size() for weight in trained.values())
    with tempfile.TemporaryDirectory(prefix="gdpo-tune-", dir=choose_memory(size)) as directory:
        # With "auto", peft would look the base model up on the Hub.
        model.save_pretrained(directory, save_embedding_layers=False, state_dict=trained)
        yield Path(directory)


def choose_memory(size: int, memory: Path = MEMORY) -> Path | None:
    """Return the file system in memory if `size` bytes fit twice, else None."""
    writable = memory.is_dir() and os.access(memory, os.W_OK)
    return memory if writable and shutil.disk_usage(memory).free >= 2 * size else None


@torch.no_grad()
def _merge_weights(model: Any) -> Weights:
    """Map each name in the policy without adapters to its weight with the adapter's change.

    The model stays as it is. Of a sharded one the first process gets them, one weight at a time.
    """
    base = model.get_base_model()
    changed = {
        f"{name}.weight": module
        for name, module in base.named_modules()
        if hasattr(module, "get_delta_weight")
    }
    plain = (
        (name.replace(".base_layer.", "."), value)
        for name, value in base.state_dict(keep_vars=True).items()
        if ".lora_" not in name
    )
    return gather_on_first(
        (name, compute_joined_weight(changed[name], value) if name in changed else value)
        for name, value in plain
    )
