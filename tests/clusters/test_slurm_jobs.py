"""Jobs and batch scripts on a real Slurm; only `ray symmetric-run` is a fake."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time

import pytest

from gdpo_tune.clusters.backends.base import JobStatus, ScheduledJob, build_backend
from tests.support.paths import ROOT
from tests.support.schedule import load_scheduled_sweep

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


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Start Slurm, and yield a directory of programs for PATH, `ray` among them."""
    directory = tmp_path_factory.mktemp("slurm")
    for program in ("slurmctld", "slurmd", "sbatch"):
        if shutil.which(program) is None:
            pytest.skip(f"no {program} here: apt-get install slurmctld slurmd slurm-client")
    if os.geteuid():
        pytest.skip("nodes of Slurm run as root")
    write_configuration(directory)
    commands = [["slurmctld", "-D"], *(["slurmd", "-D", "-N", f"node{n}"] for n in (1, 2))]
    with contextlib.ExitStack() as started, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(directory / "slurm.conf"))
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        for command in commands:
            process = started.enter_context(subprocess.Popen(command, **quiet))
            started.callback(process.terminate)
            time.sleep(0.5)
        words = ["sinfo", "--noheader", "--format", "%T"]
        ask = lambda: subprocess.run(words, capture_output=True, text=True).stdout  # noqa: E731
        wait_for(lambda: ask().split() == ["idle"])
        yield directory / "bin"


def write_configuration(directory):
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


def write_program(directory, name, text):
    (directory / name).write_text(text)
    (directory / name).chmod(0o755)


pytestmark = [pytest.mark.slow, pytest.mark.integration]

SWEEP = """space: small.yaml
schedule: {{cron: "0 2 * * *"}}
policy: {{max_runtime: 10h}}
backend: {{kind: slurm, nodes: 2, gpus_per_node: 4, setup: "export PATH={path}:$PATH"}}
"""
SPACE = f"""extends: {ROOT / "search_spaces" / "code.yaml"}
search: {{trials: 2, scheduler: {{type: fifo}}, replicates: {{max_runs: 0}}}}
training: {{steps: 20, checkpoint_every: 1, validation_prompts: 16, test_prompts: 16}}
"""
STUB = """#!/bin/bash
trap 'touch saved; exit 130' TERM
echo "$*" >>begun
case "$*" in
    *--name\\ long*) for _ in $(seq 600); do sleep 0.1; done ;;
    *--name\\ bad*) exit 7 ;;
esac
"""


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.2)
    return found


def test_jobs_from_start_to_end(tmp_path, programs):
    (stubs := tmp_path / "stubs").mkdir()
    (project := tmp_path / "project").mkdir()
    write_program(stubs, "python", STUB)
    (project / "small.yaml").write_text(SPACE)
    path = f"{stubs}:{programs}"
    backend = build_backend(load_scheduled_sweep(project, SWEEP.format(path=path)))
    backend.check()

    def submitted(run):
        arguments = ("small.yaml", "--name", run)
        return backend.submit(ScheduledJob(f"{run}-a1", run, arguments, tmp_path))

    def end(job):
        return wait_for(lambda: (look := backend.poll(job)) and not look.running and look)

    good = [submitted("good") for _ in range(2)]
    assert good[0] == good[1]
    assert end(good[0]) == JobStatus(running=False, exit_status=0)
    begun = project / "begun"
    assert begun.read_text() == "-m gdpo_tune.sweep small.yaml --name good\n"
    bad = end(submitted("bad"))
    assert bad.exit_status == 7
    assert "exit status 7" in bad.reason

    long = submitted("long")
    wait_for(lambda: "--name long" in begun.read_text())
    waiting = submitted("waiting")  # both nodes are taken
    backend.stop(waiting, 0.0)
    assert end(waiting).reason == "cancelled"
    assert backend.poll(long).running
    backend.stop(long, 0.0)
    assert end(long).exit_status == 130
    assert (project / "saved").exists()
