"""The machine that a sweep runs on: source revision, package versions, hardware."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("gdpo-tune", "torch", "transformers", "trl", "vllm", "ray", "optuna", "numpy")


def describe_machine() -> dict[str, Any]:
    """Return as JSON: `git`, `packages`, `python`, `machine`, `cpus`, `memory_bytes`."""
    versions = {name: read_version(name) for name in PACKAGES}
    return {
        "git": read_git_revision(),
        "packages": {name: version for name, version in versions.items() if version},
        "python": platform.python_version(),
        "machine": platform.platform(),
        "cpus": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
    }


def read_version(name: str) -> str | None:
    """Return an installed package's version; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def read_git_revision() -> str:
    """Return the commit of this package's source, `+` if changed; empty outside of a checkout."""
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
