"""Sweeps of `gpu_check.py`, by the ordinary command: trials that share a GPU, and a killed one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from gpu_check_plan import CheckPlan
from gpu_check_processes import OutOfTimeError, Processes, StepError, describe_step_error
from peaks import Peak, measure_gpu_memory, measure_process_memory

from gdpo_tune import cli
from gdpo_tune.core.errors import GdpoTuneError
from gdpo_tune.core.events import IS_TRIED_AGAIN
from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.spec import SweepSpec, check_resources, count_local_cpus, load_spec

ROOT = Path(__file__).resolve().parents[1]
TRIAL = "ray::ImplicitFunc.train"
"""Start of the command line of a process in which a trial runs."""
KILL_AFTER = 2
"""Steps of a trial after which a process is killed: it then has a checkpoint."""
SMALL_STEPS = 10
"""Steps of a trial on a CPU, where one takes a moment: long enough to be killed in the middle."""
HOUR = 3600
"""Seconds."""
POLL = 0.1


@dataclass(frozen=True)
class SweepFigures:
    """What a sweep of the check did."""

    records: Sequence[TrialRecord]
    retries: Sequence[str]
    """Incidents in which a trial was tried again."""
    slots: int
    """Trials that may run side by side."""
    side_by_side: int
    """Most trials that ran at once."""
    trials_per_hour: float
    peak_mib: float
    killed: int
    """Processes of trials that were killed on purpose."""

    def list_failures(self) -> list[str]:
        """Return what became of each trial that is not complete."""
        return [
            f"trial {record.number} {record.state}: {record.reason}".strip()
            for record in self.records
            if record.state != "complete"
        ]


def build_sweep(
    plan: CheckPlan,
    name: str,
    share: float,
    trials: int,
    rank: int,
    steps: int = 0,
    **resources: int,
) -> Path:
    """Write the file of a sweep of `trials` trials that train, each on a share of the device.

    `steps` is those of a trial, 0 for the plan's; `resources` are more keys of the section.

    Every sweep evaluates the untrained policy too, which trains nothing. Without a GPU the trials
    share the cores.
    """
    cpus = max(count_local_cpus() * share / resources.get("workers", 1), 0.5)
    steps = SMALL_STEPS if plan.small else steps or plan.steps
    return plan.write_space(
        name,
        # One of the trials is the published setting.
        search={"trials": trials - 1},
        resources={"cpus": cpus, "gpus": 0 if plan.small else share, **resources},
        model={"lora_rank": rank},
        training={"steps": steps, "evaluate_every": steps},
    )


def find_refusal(file: Path, devices: Sequence[str] = ()) -> str:
    """Return why a sweep's trials do not fit on this machine; empty if they do.

    `devices` are the GPUs that it may use, if not those of this process.
    """
    try:
        spec = load_spec(file)
        check_resources(spec, build_environment(devices))
        cli.check_share(spec)
    except GdpoTuneError as error:
        return describe_step_error(error)
    return ""


def run_sweep_command(
    file: Path,
    step: str,
    processes: Processes,
    seconds: float,
    *,
    small: bool,
    kill: bool = False,
    devices: Sequence[str] = (),
) -> SweepFigures:
    """Run a sweep by its command and read its ledger.

    Args:
        file: of the sweep.
        step: step of the check, whose log gets the output.
        processes: deadline and logs of the check.
        seconds: time of this sweep.
        small: True on a CPU.
        kill: kill the process of one trial once a trial has a checkpoint.
        devices: GPUs that it may use, if not those of this process.

    Raises:
        StepError: the command failed, or did not end in time.
        OutOfTimeError: the time of the whole check is over.
    """
    spec = load_spec(file)
    allowed = min(seconds, processes.read_remaining())
    killed = 0
    with (
        processes.find_log(step).open("ab") as log,
        Peak(measure_process_memory if small else measure_gpu_memory) as memory,
        subprocess.Popen(
            [sys.executable, "-m", "gdpo_tune.sweep", str(file)],
            env=build_environment(devices),
            cwd=file.parent,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        ) as sweep,
    ):
        try:
            end = time.monotonic() + allowed
            while sweep.poll() is None and time.monotonic() < end:
                if kill and not killed:
                    killed = kill_one_trial(sweep.pid, spec.directory)
                time.sleep(POLL)
            if sweep.poll() is None:
                over = OutOfTimeError("the time of the whole check was over")
                raise over if allowed < seconds else StepError(f"no end after {seconds:.0f} s")
        finally:
            end_processes(sweep.pid)
    if error := find_error(Path(log.name), sweep.returncode):
        raise StepError(error)
    return read_figures(spec, memory.highest, killed)


def find_error(log: Path, status: int) -> str:
    """Return why a sweep did not end by itself; empty if it did, even if trials failed."""
    lines = log.read_text(errors="replace").splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    if status and errors:
        return errors[-1]
    return "" if status in (0, 1) else f"the sweep ended with status {status}: see {log}"


def build_environment(devices: Sequence[str] = ()) -> dict[str, str]:
    """Build the environment of a sweep, which starts its own Ray and reads the same package.

    `devices` are the GPUs that it may use, if not those of this process.
    """
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    paths = (str(ROOT), os.environ.get("PYTHONPATH", ""))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment | ({"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {})


def kill_one_trial(sweep: int, directory: Path) -> int:
    """Kill one process in which a trial runs, once a trial has done steps; return how many."""
    if not any(count_lines(file) >= KILL_AFTER for file in directory.glob("trials/*/steps.jsonl")):
        return 0
    for process in list_processes(sweep):
        with suppress(psutil.Error):
            if " ".join(process.cmdline()).startswith(TRIAL):
                process.kill()
                return 1
    return 0


def count_lines(file: Path) -> int:
    """Count the lines of a file, which may vanish."""
    try:
        return file.read_bytes().count(b"\n")
    except OSError:
        return 0


def list_processes(root: int) -> list[psutil.Process]:
    """Return the processes below one, the newest first; none if it has ended."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(root).children(recursive=True)[::-1]
    return []


def end_processes(root: int) -> None:
    """Kill a process that still runs, and those below it."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(root)
        for each in [*process.children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                each.kill()


def read_figures(spec: SweepSpec, peak_mib: float, killed: int) -> SweepFigures:
    """Read what a sweep did from its ledger."""
    with Ledger.open(spec, read_only=True) as ledger:
        records, sessions = ledger.get_records(), ledger.get_sessions()
    retries = [
        str(incident)
        for session in sessions
        for incident in session["incidents"]
        if incident.description.startswith(IS_TRIED_AGAIN)
    ]
    return SweepFigures(
        records=records,
        retries=retries,
        slots=sessions[0]["slots"],
        side_by_side=count_side_by_side(records),
        trials_per_hour=compute_trials_per_hour(records),
        peak_mib=peak_mib,
        killed=killed,
    )


def count_side_by_side(records: Sequence[TrialRecord]) -> int:
    """Count the trials that ran at once, at the moment when they were most."""
    spans = [(r.started, r.finished) for r in records if r.started is not None and r.finished]
    starts = [start for start, _ in spans]
    return max((sum(start <= moment < end for start, end in spans) for moment in starts), default=0)


def compute_trials_per_hour(records: Sequence[TrialRecord]) -> float:
    """Divide the trials that trained by the hours from the first start to the last end.

    The hours include those of the untrained trial, starts of processes and engines, and the end of
    the sweep, when fewer trials are left than fit; not the start of Ray.
    """
    trained = sum(record.role != "untrained" for record in records)
    spans = [(r.started, r.finished) for r in records if r.started is not None and r.finished]
    if not spans:
        return 0.0
    hours = (max(end for _, end in spans) - min(start for start, _ in spans)) / HOUR
    return trained / hours
