"""Virtual environments in which a training library runs, for tests of exported folders."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest


def install_library(install: str, directory: Path) -> Path:
    """Run the command that installs a library, in an environment at `directory`.

    The environment also sees the packages of this one, so that pip fetches only what differs. One
    that exists is taken as it is. Returns the directory of its programs; skips the test with pip's
    message where the packages cannot be had.
    """
    programs = directory / "bin"
    if (programs / "python").exists():
        return programs
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    own = next((directory / "lib").glob("python*/site-packages"))
    (own / "outer.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    # boto3, which tests use, has to be of the version that a library's botocore allows.
    packages = [*install.split()[2:], "boto3"]
    command = [str(programs / "python"), "-m", "pip", "install", "-q", *packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        (programs / "python").unlink()  # it is not complete
        pytest.skip(f"{install}: {done.stderr.strip().splitlines()[-1:]}")
    return programs
