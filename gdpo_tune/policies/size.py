"""Size of a policy, read from the headers of its files: no weights, no torch, no network."""

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
    """Return how many parameters a policy has.

    Args:
        name: as in a sweep file; a Hub id is looked up in the local cache.

    Returns:
        None if that is unknown, such as for a policy that was not downloaded yet.
    """
    directory = _find_local_directory(name)
    files = [] if directory is None else sorted(directory.glob("*.safetensors"))
    if not files:
        return None
    try:
        return sum(_count_in_file(file) for file in files)
    except (OSError, ValueError, KeyError, struct.error):
        return None  # `load_policy` reports broken files


def _find_local_directory(name: str) -> Path | None:
    directory = Path(policy_folder(name))
    if directory.is_dir():
        return directory
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(config).parent if isinstance(config, str) else None


def _count_in_file(file: Path) -> int:
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > _LONGEST_HEADER:
            raise ValueError(f"{file} is not a safetensors file")
        header: dict[str, Any] = json.loads(stream.read(length))
    return sum(
        math.prod(tensor["shape"]) for key, tensor in header.items() if key != "__metadata__"
    )
