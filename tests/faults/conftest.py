"""Clusters that tests disturb, a sweep that nothing disturbs, and the table of what faults cost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cluster_sweeps import (
    ASHA,
    FIFO,
    NODE,
    ROWS,
    VARIABLES,
    Whole,
    build_slow_sweep,
    format_table,
)
from tests.support.ray_nodes import RayCluster, make_short_directory, open_ray_cluster


def let_in_all(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("RAY_AUTH_MODE", "disabled")
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    patch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture
def no_authentication(monkeypatch: pytest.MonkeyPatch) -> None:
    """For one test: those that come after it in the same session have what they had."""
    let_in_all(monkeypatch)


@pytest.fixture
def empty_cluster(no_authentication: None) -> Iterator[RayCluster]:
    """A cluster without nodes, for who disturbs it so that nobody else could use it."""
    with make_short_directory() as folder, open_ray_cluster(folder, **VARIABLES) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[RayCluster]:
    """Two nodes, for who leaves them as they were."""
    with (
        pytest.MonkeyPatch.context() as patch,
        make_short_directory() as folder,
        open_ray_cluster(folder, **VARIABLES) as cluster,
    ):
        let_in_all(patch)
        cluster.start(2, **NODE)
        yield cluster


@pytest.fixture(scope="session")
def whole(cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("whole")
    sweeps = {
        name: build_slow_sweep(folder / name, given, cluster)
        for name, given in (("fifo", FIFO), ("asha", ASHA))
    }
    for sweep in sweeps.values():
        sweep.finish()
    return sweeps


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if ROWS:
        terminalreporter.section("what faults cost")
        terminalreporter.write_line(format_table())
