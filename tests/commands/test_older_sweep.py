"""A scheduled sweep that an older version wrote opens, is scored and shown as it was, and goes on.

`tests/data/older_sweep.tar.gz` was written by commit 2371a44 in /srv/search: the nightly sweep of
`sweeps/nightly.yaml` with its schedule state, ledger, step files, spool and MLflow's database, of
three trials and a merge. Weights, tokenizers and pictures were left out.
"""

from __future__ import annotations

import csv
import math
import shutil
import sqlite3
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from mlflow import MlflowClient

from gdpo_tune import report, schedule
from gdpo_tune.results.open_sweep import find_sweep
from tests.support.paths import ROOT
from tests.support.tuning import ENDS_ONLY

RUN = "nightly-20261126T215703Z"


@pytest.fixture
def older(tmp_path, monkeypatch):
    """Unpack the sweep, with the embedded policy's weights as those of its checkpoints."""
    with tarfile.open(ROOT / "tests" / "data" / "older_sweep.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    # `sandbox.url` has left since; its refusal says to remove the key.
    spec = tmp_path / "runs" / RUN / "spec.yaml"
    spec.write_text(spec.read_text().replace('  url: ""\n', ""))
    for checkpoint in tmp_path.glob("runs/*/trials/*/checkpoint-*"):
        for name in ("model.safetensors", "tokenizer.json"):
            shutil.copy(ROOT / "gdpo_tune" / "policies" / "embedded" / name, checkpoint)
    connection = sqlite3.connect(tmp_path / "mlflow.db")
    for table, column in (("experiments", "artifact_location"), ("runs", "artifact_uri")):
        statement = f"update {table} set {column} = replace({column}, '/srv/search', ?)"
        connection.execute(statement, (str(tmp_path),))
    connection.commit()
    connection.close()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs" / RUN


def read_front(directory: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((directory / "front.csv").read_text().splitlines()))


def read_states(directory: Path) -> dict[int, str]:
    return {record.number: record.state for record in find_sweep(str(directory)).records}


def check_mlflow(trials: int) -> None:
    """Check that each trial is one run, and that no step of it was written twice."""
    # whole, since MLflow keeps one store for each address
    client = MlflowClient(f"sqlite:///{Path.cwd()}/mlflow.db")
    experiment = client.get_experiment_by_name("code")
    runs = client.search_runs([experiment.experiment_id], max_results=100)
    numbers = sorted(int(run.data.tags["trial"]) for run in runs if "trial" in run.data.tags)
    assert numbers == list(range(trials))
    assert len(runs) == trials + 1
    for run in runs:
        if "train/loss" in run.data.metrics:
            history = client.get_metric_history(run.info.run_id, "train/loss")
            assert [point.step for point in history] == [1, 2]


def test_an_older_sweep_is_reported_as_it_was(older):
    before = read_front(older)
    assert report.main([str(older), "--sync"]) == 0
    after = read_front(older)
    added = {"prompt_selection"}  # a parameter that came later, at its default
    assert [row.keys() - added for row in after] == [row.keys() for row in before]
    for old, new in zip(before, after, strict=True):
        for key in old:
            if key.partition("_se")[0] in ("correctness", "format", "length"):
                assert math.isclose(float(old[key]), float(new[key]), abs_tol=6e-5)  # 4 digits then
            else:
                assert old[key] == new[key]
    assert not list(older.glob("spool.*"))
    check_mlflow(4)


def test_the_schedule_goes_on_from_an_older_state(older, capsys):
    assert schedule.main(["sweeps", "status"]) == 0
    shown = capsys.readouterr().out
    assert f"{RUN}, attempt 1: finished" in shown
    assert "4 trials, 2 on the front" in shown


@pytest.mark.system
@pytest.mark.integration
def test_an_older_sweep_is_extended(older):
    before = read_states(older)
    command = [sys.executable, "-m", "gdpo_tune.sweep", "code.yaml", "--name", RUN]
    for override in (*ENDS_ONLY, "search.trials=4"):
        command += ["--set", override]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    after = read_states(older)
    assert {number: after[number] for number in before} == before
    assert len(after) > len(before)
    assert "failed" not in after.values()
    check_mlflow(len(after))
