"""A local sandbox for a whole file, and services that the tests of external sandboxes ask."""

import pytest

from gdpo_tune.sandbox import CodeSandbox, external
from gdpo_tune.sandbox.external import ExternalSandbox
from tests.sandbox.service_double import serve_double


@pytest.fixture(scope="module")
def sandbox():
    with CodeSandbox() as sandbox:
        yield sandbox


@pytest.fixture
def no_long_pauses(monkeypatch):
    monkeypatch.setattr(external, "_FIRST_PAUSE", 0.01)


@pytest.fixture(scope="module")
def shared():
    """A sandbox on a service that both serve a whole file."""
    with serve_double() as server, ExternalSandbox(server.url, 2) as sandbox:
        yield sandbox


@pytest.fixture
def double():
    """A service of one's own."""
    with serve_double() as server:
        yield server
