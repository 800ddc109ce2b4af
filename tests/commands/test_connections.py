"""A whole sweep asks nobody but this machine."""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytestmark = [pytest.mark.system, pytest.mark.integration]

HOOK = """
import json, os, sys

def record(event, args):
    if event == "socket.connect":
        target = args[1]
        target = target[0] if isinstance(target, tuple) else ""
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        target = args[0]
    else:
        return
    if target:
        target = target.decode() if isinstance(target, bytes) else str(target)
        with open(os.environ["CONNECTIONS"], "a") as file:
            file.write(json.dumps([sys.argv[0] if hasattr(sys, "argv") else "", target]) + "\\n")

sys.addaudithook(record)
"""
"""`sitecustomize` of every Python process of a sweep: Ray's, the trials' and the sandbox's.

Audit events of docs.python.org/3/library/audit_events.html; Unix sockets have no host.
"""
SMALL = (
    *("search.trials=1", "search.budget.completions=0", "search.replicates.max_runs=0"),
    *("search.merges.budget=0", "search.checkpoints.budget=0", "training.steps=2"),
    *("training.checkpoint_every=2", "training.evaluate_every=2", "training.train_prompts=64"),
    *("training.validation_prompts=8", "training.test_prompts=8"),
    *("training.completions_per_step=16", "tracking.uri=sqlite:///mlflow.db"),
)


def is_here(target: str) -> bool:
    try:
        return ipaddress.ip_address(target).is_loopback
    except ValueError:
        return target == "localhost"


def test_a_sweep_connects_to_nothing_but_this_machine(tmp_path: Path):
    """falco#943, aim#2539, vllm#2206: cloud metadata, telemetry and DNS that nobody asked for."""
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    log = tmp_path / "connections"
    own = ("RAY_", "HF_", "MLFLOW_", "DO_NOT_TRACK", "DISABLE_TELEMETRY")
    environment = {name: text for name, text in os.environ.items() if not name.startswith(own)}
    environment |= {"CONNECTIONS": str(log), "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "gdpo_tune.sweep", str(ROOT / "search_spaces" / "code.yaml")]
    words = [word for each in SMALL for word in ("--set", each)]
    done = subprocess.run(
        [*command, *words], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    made = {tuple(json.loads(line)) for line in log.read_text().splitlines()}
    assert made, "Ray's own processes talk through the loopback interface"
    assert not [each for each in made if not is_here(each[1])]
