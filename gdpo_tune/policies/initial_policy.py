"""Identity of the policy from which a training started, as its checkpoints record it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

INITIAL_FILE = "initial_policy.json"
"""File in a policy's directory with the digest of the policy from which its training started."""
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
