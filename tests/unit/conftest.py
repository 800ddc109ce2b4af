"""What unit tests share: none of them starts Ray, and none depends on how busy the machine is."""

import sys

import pytest


@pytest.fixture(autouse=True)
def ray_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would start a cluster for whoever asks it something."""
    if "ray" in sys.modules:
        monkeypatch.setattr("ray._private.auto_init_hook.enable_auto_connect", False)


@pytest.fixture(autouse=True)
def proposals_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, a quick sampler may be slower than the loop has time for."""
    if "gdpo_tune.tuning.search.proposals" in sys.modules:
        monkeypatch.setattr("gdpo_tune.tuning.search.proposals.GLANCE", 60.0)
        monkeypatch.setattr("gdpo_tune.tuning.search.proposals.IDLE_WAIT", 60.0)
