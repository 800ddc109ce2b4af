"""Versions and machine of a session, for its record."""

from __future__ import annotations

import platform
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gdpo_tune.core.system import count_local_cpus, read_machine_memory

PACKAGES = ("gdpo-tune", "torch", "transformers", "trl", "vllm", "ray", "optuna", "numpy")
"""Packages whose versions a session records."""


def describe_machine() -> dict[str, Any]:
    """Return as JSON: `git`, `packages`, `python`, `machine`, `cpus`, `memory_bytes`."""
    packages: dict[str, str] = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    return {
        "git": read_git_revision(),
        "packages": packages,
        "python": platform.python_version(),
        "machine": platform.platform(),
        "cpus": count_local_cpus(),
        "memory_bytes": read_machine_memory(),
    }


def read_git_revision() -> str:
    """Return the commit of this package's source, `+` if changed; empty outside of a checkout."""
    source = Path(__file__).resolve().parents[2]
    if not (source / ".git").exists():
        return ""
    command = ["git", "-C", str(source), "describe", "--always", "--abbrev=40", "--dirty=+"]
    try:
        return subprocess.check_output(
            command, stderr=subprocess.DEVNULL, text=True, timeout=5
        ).strip()
    except (OSError, subprocess.SubprocessError):
        return ""
