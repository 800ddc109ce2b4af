"""Fixtures of every test."""

import gc
import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

from gdpo_tune.core import parameters, registry

# No deadline: a test says nothing about time. CI has the same examples every time, others new ones.
settings.register_profile("project", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("project")

TABLES = {
    f"{module.__name__}.{name}": table
    for module in (registry, parameters)
    for name, table in vars(module).items()
    if name.isupper() and isinstance(table, dict)
}
"""What exists, by name: every test of a process sees the same."""


def copies() -> dict[str, dict[str, object]]:
    return {name: dict(table) for name, table in TABLES.items()}


def restore(before: dict[str, dict[str, object]]) -> list[str]:
    """Make the tables what they were; return the names of those that were not."""
    changed = [name for name, table in TABLES.items() if table != before[name]]
    for name in changed:
        TABLES[name].clear()
        TABLES[name].update(before[name])
    return changed


AT_FIRST = copies()


def pytest_collection_finish() -> None:
    # Training collects garbage after every trial; all that was imported by now is none.
    gc.collect()
    gc.freeze()
    changed = restore(AT_FIRST)
    if changed:
        raise pytest.UsageError(f"importing a test module changed {', '.join(changed)}")


@pytest.fixture(autouse=True)
def environment_stays_as_it_is() -> Iterator[None]:
    """Take back what a command that was called in this process has set for its children."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def tables_stay_as_they_are() -> Iterator[None]:
    """Refuse a test that leaves a change for the others, and take the change back."""
    before = copies()
    yield
    changed = restore(before)
    assert not changed, f"the test left {', '.join(changed)} changed: use monkeypatch.setitem"


OTHER_PROCESSES = {"integration", "fault", "browser", "vllm", "gpu"}
"""Markers of tests that may start Ray."""


@pytest.fixture(autouse=True)
def unit_tests_start_no_ray(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keep Ray from starting a cluster, which it does for any question, and wait for proposals."""
    if OTHER_PROCESSES & {mark.name for mark in request.node.iter_markers()}:
        return
    if "ray" in sys.modules:
        monkeypatch.setattr("ray._private.auto_init_hook.enable_auto_connect", False)
    if "gdpo_tune.tuning.search.proposals" in sys.modules:
        # On a busy machine, a quick sampler may be slower than the loop has time for.
        monkeypatch.setattr("gdpo_tune.tuning.search.proposals.BUSY_WAIT_SECONDS", 60.0)
        monkeypatch.setattr("gdpo_tune.tuning.search.proposals.IDLE_WAIT_SECONDS", 60.0)
