"""A scheduled sweep as a job of a real Ray cluster on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gdpo_tune.clusters.backends.ray_jobs import RayJobs
from gdpo_tune.clusters.load_schedules import load_sweeps
from gdpo_tune.clusters.schedule_state import JobHandle
from gdpo_tune.clusters.scheduler import SweepScheduler, build_scheduled_job
from gdpo_tune.core.errors import BackendError
from tests.support.paths import ROOT
from tests.support.ray_nodes import make_short_directory, open_ray_cluster

pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,  # test_submit_ray sends a sweep to the same cluster, by the same client
    pytest.mark.integration,
    # Ray's client leaves sockets to the garbage collector
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
pytest.importorskip("aiohttp_cors", reason="the dashboard of Ray needs ray[default]")

SPACE = f"""extends: {ROOT / "search_spaces" / "code.yaml"}
search:
  {{trials: 1, scheduler: {{type: fifo}}, replicates: {{max_runs: 0}}, merges: {{budget: 0}},
    checkpoints: {{budget: 0}}}}
training: {{steps: 4, checkpoint_every: 1, validation_prompts: 16, test_prompts: 16}}
"""
SWEEP = """space: small.yaml
schedule: {cron: "0 2 * * *"}
backend: {kind: ray-job, address_env: RAY_HEAD_FOR_TEST}
storage: shared
"""
TICK = datetime(2026, 3, 29, 1, tzinfo=UTC)


@pytest.fixture
def head() -> Iterator[str]:
    with make_short_directory() as directory, open_ray_cluster(directory) as cluster:
        cluster.start_head(dashboard=True, cpus=2)
        yield cluster.url


def test_a_sweep_as_a_job_of_a_cluster(tmp_path: Path, head: str, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "small.yaml").write_text(SPACE)
    (tmp_path / "sweeps" / "nightly.yaml").write_text(SWEEP)
    monkeypatch.setenv("RAY_HEAD_FOR_TEST", head)
    sweep = load_sweeps(tmp_path / "sweeps").find("nightly")
    context = SweepScheduler.open(sweep, lambda: datetime.now(UTC))
    assert context.run(TICK, wait=False) == 0
    run = context.state.runs[-1]
    assert run.name == "nightly-20260329T010000Z"
    assert run.job == JobHandle(backend="ray-job", id=f"{run.name}-a1")

    backend = context.build_backend(sweep)
    assert isinstance(backend, RayJobs)
    assert backend.submit(build_scheduled_job(sweep, run)) == run.job
    assert backend.poll(run.job).running
    assert context.run(TICK, wait=True, every=1) == 0
    assert context.state.runs[-1].state == "finished"
    assert context.state.notices[-1].details["trials"] == 3
    assert (tmp_path / "shared" / run.name / "ledger.journal").exists()

    unheard_of = JobHandle(backend="ray-job", id="unheard-of")
    assert not backend.poll(unheard_of).running
    with pytest.raises(BackendError, match="does not exist"):
        backend.stop(unheard_of, 0.0)
