"""A Slurm for tests on this machine: a controller and two nodes with four fake GPUs."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

CONFIGURATION = """ClusterName=night
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/controller.pid
SlurmdPidFile={directory}/%n.pid
SlurmctldLogFile={directory}/controller.log
SlurmdLogFile={directory}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
GresTypes=gpu
MpiDefault=none
KillWait=5
SlurmdParameters=config_overrides
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 Gres=gpu:4
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 Gres=gpu:4
PartitionName=gpu Nodes=node1,node2 Default=YES MaxTime=INFINITE State=UP
"""
RAY = """#!/bin/bash
# a fake of `ray symmetric-run`, which would end every Ray of this machine: the command runs where
# SLURM_NODEID is 0
[ "$1" = symmetric-run ] || exit 64
while [ "$1" != -- ]; do shift; done
shift 3  # `--`, `env` and the address: the sweep starts a Ray of its own
[ "$SLURM_NODEID" = 0 ] && exec "$@"
exit 0
"""


@contextlib.contextmanager
def start_slurm(directory: Path) -> Iterator[Path]:
    """Start Slurm in a directory and yield a directory of programs for PATH, `ray` among them."""
    for program in ("slurmctld", "slurmd", "sbatch"):
        if shutil.which(program) is None:
            pytest.skip(f"no {program} here: apt-get install slurmctld slurmd slurm-client")
    if os.geteuid():
        pytest.skip("nodes of Slurm run as root")
    write_configuration(directory)
    environment = {**os.environ, "SLURM_CONF": str(directory / "slurm.conf")}
    commands = [["slurmctld", "-D"], *(["slurmd", "-D", "-N", f"node{n}"] for n in (1, 2))]
    with contextlib.ExitStack() as started, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(directory / "slurm.conf"))
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        for command in commands:
            process = started.enter_context(subprocess.Popen(command, env=environment, **quiet))
            started.callback(process.terminate)
            time.sleep(0.5)
        wait_for_nodes()
        yield directory / "bin"


def write_configuration(directory: Path) -> None:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(3)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in sockets]
    text = CONFIGURATION.format(host=socket.gethostname(), directory=directory, ports=ports)
    (directory / "slurm.conf").write_text(text)
    (directory / "gres.conf").write_text(f"Name=gpu File={directory}/gpu[0-3]\n")
    for number in range(4):
        (directory / f"gpu{number}").touch()
    for name in ("state", "bin"):
        (directory / name).mkdir()
    write_program(directory / "bin", "ray", RAY)


def write_program(directory: Path, name: str, text: str) -> None:
    """Write a program."""
    (directory / name).write_text(text)
    (directory / name).chmod(0o755)


def wait_for_nodes() -> None:
    deadline = time.monotonic() + 60
    words = ["sinfo", "--noheader", "--format", "%T"]
    while subprocess.run(words, capture_output=True, text=True).stdout.split() != ["idle"]:
        assert time.monotonic() < deadline, "the nodes did not come up"
        time.sleep(0.5)
