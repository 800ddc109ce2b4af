"""Two processes give the same advantages as one, through the trainer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gdpo_tune.registry import NORMALIZATIONS

SCRIPT = Path(__file__).with_name("training_two_processes.py")

pytestmark = pytest.mark.integration


def test_two_processes_give_the_advantages_of_one(tmp_path):
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for prefix, processes in (([], 1), (launch, 2)):
        command = [sys.executable, *prefix, str(SCRIPT), str(processes), str(tmp_path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
    one, two = (json.loads((tmp_path / f"advantages-{n}.json").read_text()) for n in (1, 2))
    assert set(one) == set(NORMALIZATIONS)
    assert one == two
    for values in one.values():
        assert max(map(abs, values)) > 0.1
