"""Sources of the libraries, one download a session, and what a trial computes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.export_batch import Batch, StepResult, build_own_trainer, compute_step
from tests.support.packages import download_source
from tests.support.training import write_policy


@pytest.fixture(scope="session")
def source(tmp_path_factory) -> Callable[[str], Path]:
    """A function that returns the source of a library's package."""
    sources: dict[str, Path] = {}

    def get_source(library: str) -> Path:
        if library not in sources:
            sources[library] = download_source(library, tmp_path_factory.mktemp(library))
        return sources[library]

    return get_source


@pytest.fixture(scope="session")
def compute_own(tmp_path_factory):
    """A function that returns what a trial computes."""
    directory = tmp_path_factory.mktemp("own")
    policy = write_policy(directory / "policy")

    @functools.cache
    def compute(batch: Batch, *overrides: str) -> StepResult:
        return compute_step(build_own_trainer(overrides, batch, policy, directory / "out"), batch)

    return compute
