"""Fixtures of the tests of sweeps: without Ray's processes, and on a real Ray."""

import pytest

from gdpo_tune.ledger import Ledger
from tests.support.ray_sweeps import importable as importable
from tests.support.search_driver import Driver


@pytest.fixture
def ledger(spec):
    """The ledger of the sweep of a test's own `spec`."""
    with Ledger.open(spec) as ledger:
        yield ledger


@pytest.fixture
def driver(ledger):
    """A driver of that sweep, with two slots."""
    return Driver(ledger)
