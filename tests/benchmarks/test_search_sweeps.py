"""The comparisons of the search that run real sweeps, in their small form, to their last line."""

import json
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.mark.parametrize("script", ["fronts", "sweeps"])
def test_a_small_comparison_ends_with_its_figures(script, tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "search" / f"{script}.py"), "--small"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["benchmark"] == f"search/{script}"
