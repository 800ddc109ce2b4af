"""Packages of other libraries, downloaded for a test or skipped with the reason."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
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


def run_pip(*words: str, python: str = sys.executable) -> None:
    """Run the pip of a Python; if it fails, skip the test with its message."""
    command = [python, "-m", "pip", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"pip {' '.join(words)}: {done.stderr.strip().splitlines()[-1:]}")


def download_source(library: str, directory: Path) -> Path:
    requirement = f"{library}=={VERSIONS[library]}"
    run_pip("download", "-q", "--no-deps", "-d", str(directory), requirement)
    (wheel,) = directory.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(directory / "source")
    return directory / "source"


def install_library(install: str, directory: Path) -> Path:
    """Run the command that installs a library, in an environment at `directory`, unless it is done.

    The environment also sees the packages of this one, so that pip fetches only what differs.
    Returns the directory of its programs.
    """
    programs = directory / "bin"
    done = directory / "installed.txt"
    if done.exists() and done.read_text() == install:
        return programs
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(directory)], check=True)
    (own,) = (directory / "lib").glob("python*/site-packages")
    (own / "outer.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    # Axolotl pins a botocore that does not fit the newer boto3 of this environment.
    packages = [*install.split()[2:], *(["boto3==1.41.5"] if "axolotl" in install else [])]
    run_pip("install", "-q", *packages, python=str(programs / "python"))
    done.write_text(install)
    return programs


def install_packages(directory: Path, *requirements: str) -> Path:
    """Install packages without their dependencies; return the directory to import them from."""
    run_pip("install", "-q", "--no-deps", "--target", str(directory), *requirements)
    return directory
