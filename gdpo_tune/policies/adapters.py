"""LoRA adapters of policies on disk, in PEFT's format.

A directory with `adapter_config.json` is a policy without the weights below its adapter. It also
has a tokenizer and the small files of a policy. Its base is named in that file; in a sweep it is
the policy of the sweep, or that after its start.
"""

from __future__ import annotations

import hashlib
import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdpo_tune.core.errors import PolicyError
from gdpo_tune.core.files import is_directory
from gdpo_tune.core.trial_files import ADAPTER_CONFIG, find_adapter

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

INITIAL_FILE = "initial_policy.json"
"""File in a policy's directory that tells from which policy its training started."""
DTYPE = "dtype"
"""Key in it with the type of the weights that the trial computed with."""
NAME = "default"
"""Name that `peft` gives the only adapter."""
_HASHED = 256
"""Leading values of each weight that the digest covers: enough to tell trained policies apart."""


def hash_policy(model: PreTrainedModel) -> str:
    """Return a digest of names, shapes and leading values of a policy's weights.

    Values are rounded to bfloat16, so that it does not depend on the type in which it is loaded.
    """
    import torch

    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        leading = weight.detach().flatten()[:_HASHED].to("cpu", torch.bfloat16)
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(leading.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def save_initial_policy(directory: Path, digest: str, dtype: str) -> None:
    """Record from which policy a training started, and the type of the weights it computed with."""
    text = json.dumps({"sha256": digest, DTYPE: dtype})
    (directory / INITIAL_FILE).write_text(text, encoding="utf-8")


def read_initial_policy(directory: Path, key: str = "sha256") -> str:
    """Return what a policy's directory records; empty if it is unknown, as in older checkpoints."""
    file = directory / INITIAL_FILE
    return json.loads(file.read_text(encoding="utf-8")).get(key, "") if file.is_file() else ""


def read_base(adapter: Path) -> tuple[str, str]:
    """Return name and revision of the policy below an adapter, as its own file states them."""
    try:
        config: dict[str, Any] = json.loads((adapter / ADAPTER_CONFIG).read_text("utf-8"))
        name, revision = str(config["base_model_name_or_path"]), str(config.get("revision") or "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PolicyError(f"{adapter / ADAPTER_CONFIG} names no base: {error}") from error
    return name, "" if is_directory(Path(name)) else revision  # that of a start is a directory


def load_adapter(model: PreTrainedModel, directory: Path) -> Any:
    """Put the adapter of a policy's directory around its base; the result is a `PeftModel`.

    It computes exactly what the trained policy computed; joined weights are rounded.

    Raises:
        PolicyError: it was trained from another policy than `model`, or PEFT is not installed.
    """
    adapter = find_adapter(directory)
    assert adapter is not None, "the caller knows that there is one"
    if find_spec("peft") is None:
        raise PolicyError(f"{adapter} is an adapter: pip install 'gdpo-tune[peft]'")
    recorded = read_initial_policy(directory)
    base = f"the base of {adapter} is another policy than {model.name_or_path}"
    if recorded and recorded != hash_policy(model):
        raise PolicyError(f"{base}: give the one from which it was trained")
    peft: Any = import_module("peft")
    try:
        adapted = peft.PeftModel.from_pretrained(model, str(adapter))
        built = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
        differing = built.keys() ^ peft.load_peft_weights(str(adapter), device="cpu").keys()
        if factors := sorted(name for name in differing if "lora_" in name):  # PEFT only warns
            raise ValueError(f"{len(factors)} factors have no counterpart, such as {factors[0]}")
        return adapted
    except Exception as error:  # PEFT and safetensors have types of every kind
        reason = str(error).strip().rpartition("\n")[2].strip()
        raise PolicyError(f"{base}, or its files are damaged: {reason}") from error


def join_adapter(model: PreTrainedModel, directory: Path) -> PreTrainedModel:
    """Return the policy of an adapter, with the adapter's change in its weights.

    `model` is its base. Weights that it shares with other policies stay as they are.
    """
    from torch import nn

    adapted = load_adapter(model, directory)
    for module in adapted.modules():
        if hasattr(module, "get_delta_weight"):
            layer = module.get_base_layer()
            joined = compute_joined_weight(module, layer.weight.detach()).detach()
            layer.weight = nn.Parameter(joined, requires_grad=layer.weight.requires_grad)
    return adapted.unload()


def compute_joined_weight(module: Any, weight: Tensor) -> Tensor:
    """Return a weight with the change of PEFT's module around it, rounded to its type."""
    return (weight + module.get_delta_weight(NAME)).to(weight.dtype)
