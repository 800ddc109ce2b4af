"""Identity and form of the policy from which a training started, as its checkpoints have them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdpo_tune.core.files import write_atomically
from gdpo_tune.policies.load_policy import find_local_directory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

INITIAL_FILE = "initial_policy.json"
"""File in a policy's directory with the digest of the policy from which its training started."""
SETTINGS_FILE, TOKENIZER_FILE = "config.json", "tokenizer_config.json"
"""Files whose keys and classes differ between versions of Transformers."""
_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt")
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
    and the chat template stay those of the directory. A base that is not at hand changes nothing.

    Source: MIGRATION_GUIDE_V5.md of Transformers; vllm#42624.
    """
    base = find_local_directory(policy, revision)
    if base is None:
        return
    for file in (file for pattern in _TOKENIZER for file in base.glob(pattern)):
        if file.is_file():
            # Replaced, not changed: a policy that is linked shares its files with a checkpoint.
            write_atomically(directory / file.name, file.read_bytes())
    template = directory / "chat_template.jinja"
    settings = _read_json(directory / TOKENIZER_FILE)
    if "chat_template" in settings and template.is_file():  # versions read one or the other
        settings["chat_template"] = template.read_text(encoding="utf-8")
        _write_json(directory / TOKENIZER_FILE, settings)
    if (directory / SETTINGS_FILE).is_file():
        written, own = (_read_json(place / SETTINGS_FILE) for place in (directory, base))
        key = "dtype" if "dtype" in own else "torch_dtype"  # version 5 reads both
        dtype = written.get("dtype") or written.get("torch_dtype")
        _write_json(directory / SETTINGS_FILE, own | {key: dtype})


def find_required_version(directory: Path) -> int | None:
    """Return the first major version of Transformers that reads a policy; None: any does."""
    is_new = "rope_parameters" in _read_json(directory / SETTINGS_FILE)
    kind = _read_json(directory / TOKENIZER_FILE).get("tokenizer_class")
    return 5 if is_new or kind == "TokenizersBackend" else None


def _read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _write_json(file: Path, content: dict[str, Any]) -> None:
    write_atomically(file, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
