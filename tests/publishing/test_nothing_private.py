"""A sweep full of canaries: none of them is in what it publishes, exports, tracks or diagnoses."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet
import pytest
from PIL import Image

from tests.support.paths import ROOT

TASK = """
import json
import os
from pathlib import Path

import helper
from gdpo_tune.tasks.custom import RewardFunctionTask

CALLS = Path(os.environ["CALLS"])


def brief(completions, lengths, log_metric, log_extra, secret, **_):
    log_metric(os.environ["METRIC"], 1.0)
    log_extra(os.environ["METRIC"], secret)
    return [1.0 if length <= 8 else 0.0 for length in lengths]


def parsed(prompts, completions, secret, **_):
    with CALLS.open("a") as file:
        file.write("x")
    if CALLS.stat().st_size > int(os.environ["LIMIT"]):
        mark = os.environ["MARK"]
        raise ValueError(f"</think>{mark}{completions[0]} of {prompts[0]} and {secret[0]}")
    return [float(len(text) % 2) for text in completions]


class Leak(RewardFunctionTask):
    reward_funcs = [parsed, brief]
    ranges = {"parsed": (0, 1), "brief": (0, 1)}

    def rows(self):
        return map(json.loads, Path(os.environ["ROWS"]).read_text().splitlines())

    def environment(self):
        return {"note": os.environ["MARK"], os.environ["METRIC"]: "1"}
"""
SWEEP = """
task: TASK:Leak
policy: embedded_math
objectives:
  brief: {direction: maximize, reference: 0}
  parsed: {direction: maximize, reference: 0}
space:
  group_size: 4
  learning_rate: {log: [3.0e-5, 3.0e-4]}
  reward_weights: {parsed: 1, brief: {log: [0.05, 2]}}
training:
  {steps: 2, completions_per_step: 8, train_prompts: 40, validation_prompts: 8, test_prompts: 8,
   max_completion_length: 12, length_limit: 8, evaluate_every: 2, checkpoint_every: 2}
keep: all
resources: {cpus: 2, env: [CALLS, LIMIT, METRIC, MARK, ROWS]}
search:
  {trials: 3, replicates: {max_runs: 0}, merges: {budget: 0}, checkpoints: {budget: 0}}
tracking: {uri: 'MLFLOW', private: true}
"""
MACHINE = """
import platform
import socket

socket.gethostname = socket.getfqdn = platform.node = lambda *_: "kanarie-host"
"""
CANARY = b"kanarie"


def read_all(path: Path) -> Iterator[bytes]:
    """Yield a file's bytes, and what it holds compressed."""
    yield path.read_bytes()
    if path.suffix == ".parquet":
        yield str(pyarrow.parquet.read_table(path).to_pylist()).encode()
    elif path.suffix == ".png":
        with Image.open(path) as image:
            yield str(image.info).encode()
    elif path.suffix == ".gz":
        yield gzip.decompress(path.read_bytes())
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            yield from (archive.read(name) + name.encode() for name in archive.namelist())


def find_canaries(directory: Path, *without: str, within: tuple[str, ...] = ("",)) -> list[str]:
    """Return the files below a directory whose names or contents have a canary, and its place."""
    found = (path for name in within for path in [directory / name, *(directory / name).rglob("*")])
    files = [path for path in found if path.is_file() and path.name not in without]
    assert len(files) >= len(within)
    return [
        f"{path.relative_to(directory)}: {content[max(0, at - 80) : at + 40]!r}"
        for path in files
        for content in (str(path.relative_to(directory)).encode(), *read_all(path))
        if (at := content.lower().find(CANARY)) >= 0
    ]


@pytest.mark.slow
def test_no_canary_of_a_sweep_with_failures_leaves(tmp_path, store):
    """docs/publish.md and the card promise it; of an exception nothing stays."""
    project = tmp_path / "kanarie-project"
    modules = project / "kanarie-modules"
    modules.mkdir(parents=True)
    numbers = range(200)
    rows = ({"prompt": f"kanarie-prompt {n}: ", "secret": f"kanarie-secret-{n}"} for n in numbers)
    data = project / "kanarie-rows.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (modules / "helper.py").touch()
    machine = tmp_path / "machine"  # Python runs this module in every process, see `site`
    machine.mkdir()
    (machine / "sitecustomize.py").write_text(MACHINE)
    (modules / "leak.py").write_text(TASK)
    sweep = project / "leak.yaml"
    sweep.write_text(SWEEP.replace("TASK", str(modules / "leak.py")).replace("MLFLOW", store))
    environment = {
        **os.environ,
        "CALLS": str(project / "calls"),
        "LIMIT": "12",
        "ROWS": str(data),
        "METRIC": "kanarie/metric",
        "MARK": "kanarie-mark ",
        "LOGNAME": "kanarie-user",
        "HTTPS_PROXY": "http://kanarie-proxy:9",
        "MLFLOW_TRACKING_URI": "",
        "PYTHONPATH": f"{ROOT}:{machine}",
    }

    def run(command: str, *arguments: str, status: int = 0) -> str:
        words = [sys.executable, "-m", f"gdpo_tune.{command}", *arguments]
        done = subprocess.run(words, cwd=project, env=environment, capture_output=True, text=True)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout

    run("sweep", str(sweep))
    kept = project / "runs" / "leak"
    ledger = (kept / "ledger.journal").read_text()
    assert ledger.count("kanarie-secret") > 1
    assert all(f"kanarie-{word}" in ledger for word in ("mark", "project"))
    assert "kanarie-host" in (kept / "ledger.lock").read_text()
    assert find_canaries(tmp_path, within=("mlflow.db", "mlartifacts")) == []

    published = tmp_path / "published"
    run("publish", "runs/leak:max_brief", "--to", "me/leak", "--dry-run", "--out", str(published))
    assert find_canaries(published) == []
    numbers = json.loads((published / "leak" / "sweep.json").read_text())
    assert "failed" in {trial["state"] for trial in numbers["trials"]}

    for library in ("trl", "verl", "nemo-rl", "ms-swift", "axolotl"):
        out = tmp_path / "exports" / library
        pick, place = f"{project}/runs/leak:max_brief", ("--copy-data", "--out", str(out))
        run("export", pick, "--to", library, *place)
        assert find_canaries(out, "prompts.parquet") == []  # which is what an export is for

    rows = json.loads(run("doctor", str(sweep), "--json", status=1))
    assert {"python", "TMPDIR", "MLflow", "file"} <= {row["name"] for row in rows}
    assert CANARY not in json.dumps(rows).encode()
