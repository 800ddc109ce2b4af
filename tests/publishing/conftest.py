from __future__ import annotations

import pytest

from gdpo_tune import publish
from tests.support.hub_server import hub
from tests.support.published_sweeps import MACHINE, make_sweep

__all__ = ["hub"]
PICTURE = b"\x89PNG of "


@pytest.fixture
def real_picture():
    """Ask for the picture as it is drawn, which takes seconds."""


@pytest.fixture
def real_example():
    """Ask for the example of a card, for which a tokenizer is loaded."""


@pytest.fixture(autouse=True)
def quick_cards(request, monkeypatch):
    """Draw no picture and load no tokenizer, unless a test asks for it."""

    def write(sweep, path):
        path.write_bytes(PICTURE + str(sweep.chosen and sweep.chosen.name).encode())
        return path

    if "real_example" not in request.fixturenames:
        monkeypatch.setattr("gdpo_tune.publishing.card.load_local_tokenizer", lambda _: None)
    if "real_picture" not in request.fixturenames:
        monkeypatch.setattr("gdpo_tune.publishing.publication.write_front_png", write)


@pytest.fixture
def swept(tmp_path, monkeypatch):
    """Return a sweep whose trials 0 and 1 have kept policies."""
    monkeypatch.setattr("socket.gethostname", lambda: MACHINE)
    return make_sweep(tmp_path)


@pytest.fixture
def publish_to(swept):
    """Publish a choice of that sweep, with more options, under a name."""

    def run(pick: str, name: str, *options: str) -> int:
        source = f"{swept.directory}:{pick}" if pick else str(swept.directory)
        front = [] if pick else ["--front"]
        return publish.main([source, *front, "--to", name, *options])

    return run
