"""Batch scripts for Slurm: a Ray cluster over the nodes of a job, and one command on its head."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gdpo_tune.clusters.load_schedules import ScheduledSweep
from gdpo_tune.clusters.schedule_spec import SlurmBackend

PORT = 6379
MARGIN = 15 * 60
"""Seconds that a job gets beyond `max_runtime`: Ray starts, and a sweep that stops writes
checkpoints."""
WARNING = 10 * 60
"""Seconds before its time limit at which a job is told."""


@dataclass(frozen=True)
class Batch:
    """What differs between the scripts of one sweep."""

    name: str
    """Of the job."""
    log: str
    """Path of what it prints, in which Slurm replaces `%j`."""
    command: Sequence[str]
    """What runs on the head, as words for the shell, quoted where they need to be."""
    on_term: str
    """Shell command for the moment at which time is nearly up, or someone stops the job."""
    alone: bool
    """Whether a second job of this name waits for the first one's end."""
    at_begin: str = ""
    at_end: str = ""
    """Shell lines before and after; `$status` is how the command ended."""


def limit(seconds: int) -> str:
    """Seconds as Slurm writes a time limit."""
    days, rest = divmod(seconds, 86_400)
    hours, rest = divmod(rest, 3600)
    minutes, seconds = divmod(rest, 60)
    clock = f"{hours:02}:{minutes:02}:{seconds:02}"
    return f"{days}-{clock}" if days else clock


def options(backend: SlurmBackend, sweep: ScheduledSweep, batch: Batch) -> list[str]:
    """Options of `sbatch`."""
    longest = sweep.settings.policy.max_runtime
    return [
        f"--job-name={batch.name}",
        f"--output={batch.log}",
        "--open-mode=append",
        *([f"--partition={backend.partition}"] if backend.partition else []),
        *([f"--account={backend.account}"] if backend.account else []),
        f"--nodes={backend.nodes}",
        "--ntasks-per-node=1",
        "--exclusive",
        *([f"--gpus-per-node={backend.gpus_per_node}"] if backend.gpus_per_node else []),
        *([f"--time={limit(longest + MARGIN)}"] if longest else []),
        *(["--dependency=singleton"] if batch.alone else []),
        "--requeue",
        f"--signal=B:TERM@{WARNING}",
        *backend.options,
    ]


def setup(backend: SlurmBackend, python: str) -> str:
    """The shell line that makes `python` and `ray` those of this package."""
    return backend.setup or f"export PATH={shlex.quote(str(Path(python).parent))}:$PATH"


def script(
    backend: SlurmBackend, sweep: ScheduledSweep, batch: Batch, python: str, head: Sequence[str]
) -> str:
    """The script.

    Args:
        backend: where it works.
        sweep: whose project it works in.
        batch: what else it says.
        python: interpreter of this package, where `setup:` names none.
        head: comments.
    """
    if backend.nodes == 1:
        address = f"address=127.0.0.1:{PORT}"
    else:
        address = f'address=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):{PORT}'
    lines = [
        "#!/bin/bash",
        *(f"# {line}" for line in head),
        *(f"#SBATCH {option}" for option in options(backend, sweep, batch)),
        "",
        f"cd {shlex.quote(str(sweep.root))} || exit 2",
        setup(backend, python),
        *([batch.at_begin] if batch.at_begin else []),
        address,
        "# Ray runs whatever a client sends: only this job knows the token",
        "export RAY_AUTH_MODE=token",
        "RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')",
        "export RAY_AUTH_TOKEN RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300",
        f"trap {shlex.quote(batch.on_term)} TERM",
        'srun --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" \\',
        '    ray symmetric-run --address "$address" --min-nodes "$SLURM_JOB_NUM_NODES" \\',
        '    -- env RAY_ADDRESS="$address" \\',
        f"    {' '.join(batch.command)} &",
        "step=$!",
        "# a signal ends `wait`, not the command; what is over can be waited for once more",
        'wait "$step"',
        'while kill -0 "$step" 2>/dev/null; do wait "$step"; done',
        'wait "$step"',
        "status=$?",
        *([batch.at_end] if batch.at_end else []),
        'exit "$status"',
    ]
    return "\n".join(lines) + "\n"
