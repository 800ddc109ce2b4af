"""What a sweep ran on: source revision, package versions, hardware."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("gdpo-tune", "torch", "transformers", "trl", "vllm", "ray", "optuna", "numpy")


def provenance() -> dict[str, Any]:
    """As JSON: `git`, `packages`, `python`, `machine`, `cpus`, `memory_bytes`."""
    return {
        "git": git_revision(),
        "packages": {name: found for name in PACKAGES if (found := package_version(name))},
        "python": platform.python_version(),
        "machine": platform.platform(),
        "cpus": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
    }


def package_version(name: str) -> str | None:
    """An installed package's version."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def git_revision() -> str:
    """Commit of this package's source, with `+` if it was changed; empty outside of a checkout."""
    source = Path(__file__).resolve().parents[2]
    if not (source / ".git").exists():
        return ""
    try:
        described = subprocess.run(
            ["git", "-C", str(source), "describe", "--always", "--abbrev=40", "--dirty=+"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return described.stdout.strip()
