"""Packages of other libraries, downloaded for a test or skipped with the reason."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

VERSIONS = {
    "verl": "0.9.1",
    "ms-swift": "4.6.0",
    "axolotl": "0.19.0",
    "trl": "1.9.0",  # the one that Axolotl pins
    "mergekit": "0.1.5",
}


def run_pip(*words: str) -> None:
    """Run pip; if it fails, skip the test with its message."""
    command = [sys.executable, "-m", "pip", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"pip {' '.join(words)}: {done.stderr.strip().splitlines()[-1:]}")


def download_source(library: str, directory: Path) -> Path:
    """Download the package of a library without its dependencies; return its source."""
    requirement = f"{library}=={VERSIONS[library]}"
    run_pip("download", "-q", "--no-deps", "-d", str(directory), requirement)
    (wheel,) = directory.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(directory / "source")
    return directory / "source"


def install_packages(directory: Path, *requirements: str) -> Path:
    """Install packages without their dependencies; return the directory to import them from."""
    run_pip("install", "-q", "--no-deps", "--target", str(directory), *requirements)
    return directory
