"""Scripts that run as one process, or as a group of several."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from tests.support.paths import ROOT


def launch(*command: object, processes: int) -> None:
    """Run a script, alone or as a group of processes."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    group = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}")
    whole = [sys.executable, *(group if processes > 1 else ()), *map(str, command)]
    done = subprocess.run(whole, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def leave_group() -> None:
    """End a process of a group, once all of them are here.

    Not by the end of the script: with other work on the machine, a thread of Gloo now and then
    outlives its group, and then torch aborts the interpreter while it ends.
    """
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
