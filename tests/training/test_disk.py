"""A trial on a full disk: a small one in memory, if this user may mount it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.training import write_policy

pytestmark = [pytest.mark.integration, pytest.mark.system]

TRIAL = """
import sys
from pathlib import Path
from tests.support.training import TARGET, build_trial_config, write_policy
from gdpo_tune.core import registry
from gdpo_tune.core.errors import DiskFullError
from gdpo_tune.core.trial_files import read_steps
from gdpo_tune.training import train
from gdpo_tune.training.checkpoints import find_checkpoint
registry.TASKS["toy"] = TARGET
config = build_trial_config(sys.argv[1], Path(sys.argv[2]))
blocker = config.directory / "blocker"
try:
    train(config, resume=None, report=lambda m, path: blocker.write_bytes(bytes(int(sys.argv[3]))))
except DiskFullError as error:
    blocker.unlink()
    assert not list(config.directory.glob(".unfinished*"))
    print(error)
    newest = find_checkpoint(config.directory).newest
    train(config, resume=newest, report=lambda *_: None)
    print([m.step for m in read_steps(config.directory)])
"""


def run_in_small_disk(
    directory: Path, size: int, command: list[str]
) -> subprocess.CompletedProcess[str]:
    mount = f'mount -t tmpfs -o size={size} tmpfs "{directory}" && exec "$@"'
    return subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh", *command],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("left", [20_000, 60_000, 120_000, 200_000])
def test_a_full_disk_ends_a_trial_that_can_be_resumed(tmp_path: Path, left: int):
    """`left` bytes are free for the first checkpoint, so that each case fails in another file."""
    disk, size = tmp_path / "disk", 2**22
    disk.mkdir()
    if not shutil.which("unshare") or run_in_small_disk(disk, size, ["true"]).returncode:
        pytest.skip("this user may mount nothing")
    policy = write_policy(tmp_path / "policy")
    command = [sys.executable, "-c", TRIAL, policy, str(disk / "t"), str(size - left)]
    done = run_in_small_disk(disk, size, command)
    assert done.returncode == 0, done.stderr[-2000:]
    first, *_, last = done.stdout.splitlines()
    assert first.startswith("no space left for the checkpoint of step 2 in ")
    assert first.endswith(" bytes free")
    assert last == "[1, 2, 3]"
