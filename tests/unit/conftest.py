"""What unit tests share: none of them starts Ray."""

import sys

import pytest


@pytest.fixture(autouse=True)
def ray_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would start a cluster for whoever asks it something."""
    if "ray" in sys.modules:
        monkeypatch.setattr("ray._private.auto_init_hook.enable_auto_connect", False)
