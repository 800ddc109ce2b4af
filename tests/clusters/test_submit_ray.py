"""Sweeps as jobs of a real Ray cluster: by `--submit`, and by a schedule."""

from __future__ import annotations

import os
import subprocess
import sys
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

pytestmark = [pytest.mark.integration, pytest.mark.system, pytest.mark.slow]
pytest.importorskip("aiohttp_cors", reason="the dashboard of Ray needs ray[default]")

TASK = r"""
import gdpo_tune
from gdpo_tune.tasks.custom import RewardFunctionTask

print("this is", gdpo_tune.__file__)

def digits(completions, **_):
    return [float(any(map(str.isdigit, text))) for text in completions]

def short(lengths, **_):
    return [1.0 if length <= 8 else 0.0 for length in lengths]

class Digits(RewardFunctionTask):
    reward_funcs = [digits, short]
    ranges = {"digits": (0, 1), "short": (0, 1)}

    def rows(self):
        for number in range(600):
            yield {"prompt": f"{number} = "}
"""
SPACE = """task: digits.py:Digits
objectives:
  digits: {direction: maximize, reference: 0}
  short: {direction: maximize, reference: 0}
space: {group_size: 4, learning_rate: 1.0e-4, reward_weights: {digits: 1, short: [0.5, 1]}}
search: {trials: 1, scheduler: {type: fifo}, replicates: {max_runs: 0}}
training: {steps: 2, completions_per_step: 16, train_prompts: 64, validation_prompts: 16,
  test_prompts: 16, max_completion_length: 32}
"""


def test_a_sweep_is_sent_to_a_cluster_and_followed(tmp_path):
    project, home = tmp_path / "project", tmp_path / "home"
    project.mkdir()
    home.mkdir()
    (project / "digits.py").write_text(TASK)
    (project / "small.yaml").write_text(SPACE)
    (tmp_path / "token").write_text("0123456789abcdef0123456789abcdef")
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    here = {name: v for name, v in os.environ.items() if not name.startswith("RAY_")}
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [path for path in known if path and Path(path).resolve() != ROOT]
    here |= {"HOME": str(home), "PYTHONPATH": os.pathsep.join([str(ROOT), *others])}
    head = {**token, "HOME": str(home), "PYTHONPATH": os.pathsep.join(others)}
    with make_short_directory() as directory, open_ray_cluster(directory, **head) as cluster:
        cluster.start_head(dashboard=True, cpus=2)

        def submit(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
            words = ["-m", "gdpo_tune.sweep", "small.yaml", "--submit", cluster.url, *options]
            options = {"cwd": project, "env": {**here, **variables}, "text": True}
            return subprocess.run([sys.executable, *words], capture_output=True, **options)

        refused = submit()
        assert refused.returncode == 2
        assert "asks for a token (401)" in refused.stderr
        done = submit("--set", f"tracking.uri=sqlite:///{tmp_path}/mlflow.db", **token)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "submitted small as job small-" in done.stdout
        assert "py_modules_files" in done.stdout, "the package is not the one that was sent"
        assert (project / "runs" / "small" / "ledger.journal").exists()
        print(done.stdout)  # for a person who runs this by hand


SMALL = f"""extends: {ROOT / "search_spaces" / "code.yaml"}
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


# Ray's client leaves sockets to the garbage collector
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_scheduled_sweep_is_a_job_of_a_cluster(tmp_path, monkeypatch):
    with make_short_directory() as directory, open_ray_cluster(directory) as cluster:
        cluster.start_head(dashboard=True, cpus=2)
        monkeypatch.setenv("RAY_HEAD_FOR_TEST", cluster.url)
        check_scheduled_sweep(tmp_path)


def check_scheduled_sweep(tmp_path):
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "small.yaml").write_text(SMALL)
    (tmp_path / "sweeps" / "nightly.yaml").write_text(SWEEP)
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
