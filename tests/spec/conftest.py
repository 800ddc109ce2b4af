"""Sweep files of a temporary directory, loaded with overrides."""

import pytest

from gdpo_tune.spec import load_spec
from tests.support.spec_cases import GOOD


@pytest.fixture
def load(tmp_path):
    """Load `GOOD` with overrides."""

    def load(*overrides):
        path = tmp_path / "sweep.yaml"
        path.write_text(GOOD)
        return load_spec(path, overrides)

    return load
