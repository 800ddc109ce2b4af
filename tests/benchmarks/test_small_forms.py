"""Benchmarks of sweeps and of several trainings, in their small form, to their last line."""

import json
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.mark.parametrize(
    "script",
    [
        *("normalization", "search/fronts", "utilisation", "step", "shared_prompts", "tracking"),
        *("overlap", "search/curves", "search/replay", "driver", "scale"),
    ],
)
def test_a_small_benchmark_ends_with_its_figures(script, tmp_path):
    """The others take seconds, and are in `make bench-small`."""
    command = [sys.executable, str(ROOT / "benchmarks" / f"{script}.py"), "--small"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["benchmark"] == script
