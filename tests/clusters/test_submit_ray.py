"""`--submit` to a real cluster that asks for a token, and lacks directory and package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.ray_nodes import make_short_directory, open_ray_cluster

pytestmark = [pytest.mark.integration, pytest.mark.system]
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


@pytest.mark.slow
def test_a_sweep_is_sent_to_a_cluster_and_followed(tmp_path: Path):
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
            return subprocess.run(
                [sys.executable, *words],
                cwd=project,
                env={**here, **variables},
                capture_output=True,
                text=True,
            )

        refused = submit()
        assert refused.returncode == 2
        assert "asks for a token (401)" in refused.stderr
        done = submit("--set", f"tracking.uri=sqlite:///{tmp_path}/mlflow.db", **token)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "submitted small as job small-" in done.stdout
        assert "py_modules_files" in done.stdout, "the package is not the one that was sent"
        assert (project / "runs" / "small" / "ledger.journal").exists()
        print(done.stdout)  # for a person who runs this by hand
