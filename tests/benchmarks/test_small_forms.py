"""Benchmarks of several trainings, and experiments, in their small form, to their last line."""

import json
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.slow]
BENCHMARKS = ("step", "shared_prompts", "tracking", "cost driver", "cost scale", "cost utilisation")
SEARCH = ("samplers", "replay", "curves", "fronts")
NAMES = [
    *(f"benchmarks/{name}" for name in BENCHMARKS),
    *("experiments/normalization", "experiments/overlap"),
    *(f"experiments/search/{name}" for name in SEARCH),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_small_benchmark_ends_with_its_figures(name: str, tmp_path):
    """The others take seconds, and are in `make bench-small`."""
    directory, _, script = name.partition("/")
    path, *part = script.split()
    command = [sys.executable, str(ROOT / directory / f"{path}.py"), *part, "--small"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["benchmark"] == script
