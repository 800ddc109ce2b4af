"""Clusters that tests disturb, an undisturbed sweep, and the table of the cost of faults."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cluster_sweeps import (
    FIFO,
    HALVING,
    NODE,
    ROWS,
    VARIABLES,
    UndisturbedSweeps,
    build_slow_sweep,
    format_table,
)
from tests.support.ray_nodes import RayCluster, make_short_directory, open_ray_cluster


def disable_authentication(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("RAY_AUTH_MODE", "disabled")
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    patch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture
def no_authentication(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable authentication of Ray for one test."""
    disable_authentication(monkeypatch)


@pytest.fixture
def empty_cluster(no_authentication: None) -> Iterator[RayCluster]:
    """A cluster without nodes, for a test that leaves it unusable."""
    with make_short_directory() as directory, open_ray_cluster(directory, **VARIABLES) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[RayCluster]:
    """Two nodes, for tests that leave them intact."""
    with (
        pytest.MonkeyPatch.context() as patch,
        make_short_directory() as directory,
        open_ray_cluster(directory, **VARIABLES) as cluster,
    ):
        disable_authentication(patch)
        cluster.start(2, **NODE)
        yield cluster


@pytest.fixture(scope="session")
def whole(cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> UndisturbedSweeps:
    directory = tmp_path_factory.mktemp("whole")
    sweeps = {
        name: build_slow_sweep(directory / name, overrides, cluster)
        for name, overrides in (("fifo", FIFO), ("halving", HALVING))
    }
    for sweep in sweeps.values():
        sweep.finish()
    return sweeps


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if ROWS:
        terminalreporter.section("cost of faults")
        terminalreporter.write_line(format_table())
