"""Fixtures of every test."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

from gdpo_tune.core import parameters, registry
from gdpo_tune.core.system import count_local_cpus

pytest_plugins = ["tests.support.webhooks"]


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory):
    """A SQLite file with MLflow's tables."""
    from gdpo_tune.tracking.server import create_database  # this file is in every test run

    path = tmp_path_factory.mktemp("empty") / "mlflow.db"
    create_database(path)
    return path


@pytest.fixture
def store(tmp_path, empty_database):
    """URI of a SQLite file that holds nothing yet."""
    return f"sqlite:///{shutil.copy(empty_database, tmp_path / 'mlflow.db')}"


# No deadline: a busy machine is no failure. CI runs the same examples every time, others new ones.
settings.register_profile("project", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("project")

TABLES = {
    f"{module.__name__}.{name}": table
    for module in (registry, parameters)
    for name, table in vars(module).items()
    if name.isupper() and isinstance(table, dict)
}
"""Registries by name, which all tests of a process share."""


def copy_tables() -> dict[str, dict[str, object]]:
    return {name: dict(table) for name, table in TABLES.items()}


def restore_tables(before: dict[str, dict[str, object]]) -> list[str]:
    """Restore the tables; return the names of those that had changed."""
    changed = [name for name, table in TABLES.items() if table != before[name]]
    for name in changed:
        TABLES[name].clear()
        TABLES[name].update(before[name])
    return changed


INITIAL_TABLES = copy_tables()


def pytest_xdist_auto_num_workers() -> int:
    """Use one process more than there are cores: tests wait for processes of their own."""
    return count_local_cpus() + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest: the sweep of README and every command of the pages."""
    items.sort(key=lambda item: "test_readme_commands" not in item.nodeid)


def pytest_collection_finish() -> None:
    # Training and the end of every module collect garbage: that is often enough.
    gc.set_threshold(50_000, 20, 100)
    changed = restore_tables(INITIAL_TABLES)
    if changed:
        raise pytest.UsageError(f"importing a test module changed {', '.join(changed)}")


@pytest.fixture(scope="session", autouse=True)
def kept_in_memory() -> Iterator[None]:
    """Wait for no disk: what a test writes outlives a kill, and need not outlive the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="module", autouse=True)
def frozen_imports() -> None:
    """Exempt what is imported by now from the collection of garbage after every trial."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def unchanged_environment() -> Iterator[None]:
    """Restore environment variables that a command in this process has set for its children."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def unchanged_tables() -> Iterator[None]:
    """Fail a test that leaves a table changed, and restore the table."""
    before = copy_tables()
    yield
    changed = restore_tables(before)
    assert not changed, f"the test left {', '.join(changed)} changed: use monkeypatch.setitem"


OTHER_PROCESSES = {"integration", "fault", "browser", "vllm", "gpu"}
"""Markers of tests that may start Ray."""


@pytest.fixture(autouse=True)
def no_ray_in_unit_tests(
    unchanged_tables: None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keep Ray from starting a cluster at any call, and wait longer for proposals.

    `unchanged_tables` comes before `monkeypatch`, so that it sees the tables after the undo.
    """
    if OTHER_PROCESSES & {mark.name for mark in request.node.iter_markers()}:
        return
    if "ray" in sys.modules:
        monkeypatch.setattr("ray._private.auto_init_hook.enable_auto_connect", False)
    if "gdpo_tune.tuning.proposals" in sys.modules:
        # On a busy machine, a quick sampler may exceed the waits of the loop.
        monkeypatch.setattr("gdpo_tune.tuning.proposals.BUSY_WAIT_SECONDS", 60.0)
        monkeypatch.setattr("gdpo_tune.tuning.proposals.IDLE_WAIT_SECONDS", 60.0)
