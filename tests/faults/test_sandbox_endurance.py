"""Thousands of jobs with all kinds of ends leak no process and no memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.fault

SCRIPT = ROOT / "benchmarks" / "sandbox_endurance.py"
MOST_MIB = 3.0
"""Growth of all processes together that is taken for noise of their allocators."""


def test_many_jobs_leak_no_process_descriptor_or_memory():
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--jobs", "2000"], capture_output=True, text=True, check=True
    )
    figures = json.loads(done.stdout.splitlines()[-1])
    first, last = figures["first"], figures["last"]
    assert figures["jobs"] == sum(figures["statuses"].values()) == 2000
    assert figures["leaks"] == []
    assert (last["processes"], last["zombies"]) == (first["processes"], 0)
    if os.geteuid() == 0:
        # Another user may not look into locked processes, and the figure is null.
        assert 0 < last["descriptors"] <= first["descriptors"]
    for memory in ("trainer_rss", "boxes_rss", "pss"):
        assert last[memory] - first[memory] < MOST_MIB
