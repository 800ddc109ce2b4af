"""How large a policy is, read from the headers of its files: no weights, no torch, no network."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from gdpo_tune.policies.load_policy import policy_folder

_LONGEST_HEADER = 100 * 2**20
"""Bytes; the format's own limit."""


def parameters(name: str) -> int | None:
    """Numbers in the safetensors files of a policy.

    Args:
        name: as in a sweep file; of a Hub id the local cache is looked at.

    Returns:
        None where that cannot be told, such as of a policy that was not downloaded yet.
    """
    folder = _local_folder(name)
    files = [] if folder is None else sorted(folder.glob("*.safetensors"))
    if not files:
        return None
    try:
        return sum(_numbers(file) for file in files)
    except (OSError, ValueError, KeyError, struct.error):
        return None  # `load_policy` says what is wrong with them


def _local_folder(name: str) -> Path | None:
    folder = Path(policy_folder(name))
    if folder.is_dir():
        return folder
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _numbers(file: Path) -> int:
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > _LONGEST_HEADER:
            raise ValueError(f"{file} is no safetensors file")
        header: dict[str, Any] = json.loads(stream.read(length))
    return sum(
        math.prod(tensor["shape"]) for key, tensor in header.items() if key != "__metadata__"
    )
