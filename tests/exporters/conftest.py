"""Sources of the libraries, one download a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.packages import download_source


@pytest.fixture(scope="session")
def source(tmp_path_factory) -> Callable[[str], Path]:
    """A function that returns the source of a library's package."""
    sources: dict[str, Path] = {}

    def get_source(library: str) -> Path:
        if library not in sources:
            sources[library] = download_source(library, tmp_path_factory.mktemp(library))
        return sources[library]

    return get_source
