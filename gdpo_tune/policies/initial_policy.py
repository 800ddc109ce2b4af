"""Identity and form of the policy from which a training started, as its checkpoints have them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from gdpo_tune.core.files import write_atomically
from gdpo_tune.policies.load_policy import find_local_directory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

INITIAL_FILE = "initial_policy.json"
"""File in a policy's directory with the digest of the policy from which its training started."""
_FORM = (
    *("config.json", "tokenizer*.*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.*", "merges.txt"),
)
_STRUCTURE = ("model_type", "quantization_config")
"""Settings that must agree with the weights."""
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


def save_initial_policy(directory: Path, digest: str) -> None:
    """Record in a trained policy's directory from which policy its training started."""
    (directory / INITIAL_FILE).write_text(json.dumps({"sha256": digest}), encoding="utf-8")


def read_initial_policy(directory: Path) -> str:
    """Return the digest of the initial policy; empty if it is unknown, as in older checkpoints."""
    file = directory / INITIAL_FILE
    return json.loads(file.read_text(encoding="utf-8"))["sha256"] if file.is_file() else ""


def keep_form(directory: Path, policy: str, revision: str = "") -> None:
    """Give a trained policy's directory the settings and the tokenizer of its base, as written.

    Training changes weights alone. Version 5 of Transformers would write keys and a class that
    version 4 ignores or refuses: `rope_parameters`, `TokenizersBackend`. The type of the weights
    and the chat template stay those of the directory. All its settings stay where `_STRUCTURE`
    differs: the weights that are loaded of a multimodal or quantized base are not those that its
    files describe. A base that is not at hand changes nothing.

    Source: MIGRATION_GUIDE_V5.md of Transformers; vllm#42624.
    """
    settings, template = directory / "config.json", directory / "chat_template.jinja"
    base = find_local_directory(policy, revision)
    for file in (file for pattern in _FORM for file in (base.glob(pattern) if base else ())):
        content = json.loads(file.read_bytes()) if file.name.endswith("config.json") else {}
        if file.name == settings.name:
            if not settings.is_file():  # an adapter alone
                continue
            written = json.loads(settings.read_bytes())
            if any(key in content and content[key] != written.get(key) for key in _STRUCTURE):
                continue
            key = "dtype" if "dtype" in content else "torch_dtype"  # version 5 reads both
            content[key] = written.get("dtype") or written.get("torch_dtype")
        elif "chat_template" in content and template.is_file():  # versions read one or the other
            content["chat_template"] = template.read_text(encoding="utf-8")
        text = json.dumps(content, indent=2, ensure_ascii=False) if content else file.read_bytes()
        # Replaced, not changed: a policy that is linked shares its files with a checkpoint.
        write_atomically(directory / file.name, text)


def find_required_version(directory: Path) -> int | None:
    """Return the first major version of Transformers that reads a policy; None: any does."""
    text = "".join(file.read_text(encoding="utf-8") for file in directory.glob("*config.json"))
    return 5 if "rope_parameters" in text or "TokenizersBackend" in text else None
