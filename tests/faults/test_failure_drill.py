"""A scheduled sweep through the Jobs API that loses a node, and then its driver: real training."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.cluster_sweeps import ROWS
from tests.support.paths import ROOT

pytestmark = pytest.mark.fault
pytest.importorskip("aiohttp_cors", reason="the dashboard of Ray needs ray[default]")


def test_a_night_with_two_losses():
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "failure_drill.py"), "--small"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["same_trials"]
    node, driver = result["node"], result["driver"]
    assert len(node["trials"]) == 4
    assert driver["trials"]
    for name, lost, back in (
        ("scheduled job: node killed", node["trials"], node),
        ("scheduled job: then its driver", driver["trials"], driver),
    ):
        times = [f"{back[key]:.1f} s" for key in ("first_back_seconds", "all_back_seconds")]
        ROWS.append((name, "", str(len(lost)), str(len(lost)), str(back["steps_again"]), *times))
