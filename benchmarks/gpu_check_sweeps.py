"""What `gpu_check.py` trains, and where: trials, sweeps by the ordinary command, and processes.

A step that dies, hangs or takes all memory ends alone, because its functions have processes of
their own, with a deadline and a file that keeps what they print. Importing this imports no torch.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from harness import Peak, build_trial, measure_gpu_memory, measure_process_memory

from gdpo_tune import cli
from gdpo_tune.core.errors import GdpoTuneError
from gdpo_tune.core.events import IS_TRIED_AGAIN
from gdpo_tune.core.settings import (
    DataSettings,
    ModelSettings,
    RolloutSettings,
    TrainingSettings,
)
from gdpo_tune.core.system import count_local_cpus
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.spec import SweepSpec, load_spec
from gdpo_tune.spec.machine import check_resources

FILE = Path(__file__).resolve().with_name("lookup_task.py")
TASK, LONG_TASK = f"{FILE}:LookupTask", f"{FILE}:LongLookupTask"
GROUP = 4
RANK = 16
"""Rank of the adapters."""


@dataclass(frozen=True)
class CheckPlan:
    """Sizes of the trials of a check."""

    small: bool
    """True on a CPU."""
    policy: str
    """Name or directory of the policy of trials."""
    directory: Path
    """Directory of trials and sweeps."""
    threads: int
    engine: str = "auto"
    """`rollout.engine` of trials."""
    vllm: bool = False
    """True if trials sample with vLLM."""
    device_bytes: int | None = None
    """Memory of the GPU; None on a CPU."""
    tiny_policy: str = ""
    """Directory of a policy with two layers, for what a CPU can do with adapters."""
    completions: int = 64
    """Completions of a step."""
    micro_batch: int = 8
    tokens: int = 128
    """Tokens of the longest completion."""
    steps: int = 4
    """Steps of a trial."""
    devices: tuple[str, ...] = ()
    """GPUs that may be used, as `CUDA_VISIBLE_DEVICES` names them; all steps but one use the first
    alone."""

    def build_training(self, **changes: Any) -> TrainingSettings:
        """Build the settings of a short trial."""
        settings = TrainingSettings(
            steps=self.steps,
            completions_per_step=self.completions,
            micro_batch_size=self.micro_batch,
            max_completion_length=self.tokens,
            length_limit=self.tokens // 2,
            train_prompts=128,
            validation_prompts=8,
            test_prompts=8,
            evaluate_every=self.steps,
            checkpoint_every=2,
        )
        return settings.replace(**changes)

    def build_config(
        self,
        name: str,
        *,
        task: str = TASK,
        params: dict[str, Any] | None = None,
        training: dict[str, Any] | None = None,
        **changes: Any,
    ) -> TrialConfig:
        """Build a trial in the directory `name`; `changes` are fields of the configuration."""
        config = build_trial(
            *(task, self.policy, self.directory / name),
            {"group_size": GROUP, "learning_rate": 1e-5, **(params or {})},
            seed=7,
            training=self.build_training(**(training or {})),
            threads=self.threads,
            data=DataSettings(max_prompt_length=2048),
            model=ModelSettings(),
            rollout=RolloutSettings(engine=self.engine),
        )
        return replace(config, **changes)

    def write_space(self, name: str, **sections: Any) -> Path:
        """Write the file of a sweep; a section's keys are added to those of the check."""
        space: dict[str, Any] = {
            "name": name,
            "task": TASK,
            "policy": self.policy,
            "objectives": {
                reward: {"direction": "maximize", "reference": 0}
                for reward in ("correctness", "format")
            },
            "space": {
                "group_size": [GROUP],
                "reward_weights": {
                    "correctness": 1,
                    "format": {"log": [0.05, 2]},
                    "length": {"log": [0.05, 2]},
                },
                "learning_rate": {"log": [1e-6, 1e-5]},
            },
            "training": vars(self.build_training()),
            "data": {"max_prompt_length": 2048},
            "rollout": {"engine": self.engine},
            "search": {
                # Random proposals do not depend on the order in which trials end.
                "sampler": "random",
                "scheduler": {"type": "fifo"},
                "replicates": {"max_runs": 0},
                # The steps count trials that train.
                "merges": {"budget": 0},
                "checkpoints": {"budget": 0},
            },
            "tracking": {"uri": f"sqlite:///{self.directory / 'mlflow.db'}"},
            "storage": str(self.directory / "sweeps"),
        }
        for section, content in sections.items():
            space[section] = {**space.get(section, {}), **content}
        file = self.directory / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(space, indent=2))  # YAML contains JSON
        return file


@dataclass(frozen=True)
class Context:
    """What a step gets."""

    plan: CheckPlan
    processes: Processes


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
    **resources: int,
) -> Path:
    """Write the file of a sweep of `trials` trials that train, each on a share of the device.

    `resources` are more keys of the section.

    Every sweep evaluates the untrained policy too, which trains nothing. Without a GPU the trials
    share the cores.
    """
    cpus = max(count_local_cpus() * share / resources.get("workers", 1), 0.5)
    steps = SMALL_STEPS if plan.small else plan.steps
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
        cli.check_trainable(spec)
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


DUMP_BEFORE = 2.0
"""Seconds before the end of its time at which a process writes the stacks of its threads."""
GRACE = 5.0
"""Seconds that a process gets to end after its answer."""


class StepError(Exception):
    """A function in its own process raised, died, or ran out of its time."""


class OutOfTimeError(StepError):
    """The time of the whole check is over."""


class Processes:
    """Processes that run functions one after the other, until a common deadline."""

    def __init__(self, logs: Path, seconds: float, preload: Sequence[str] = ()) -> None:
        """Start the clock.

        Args:
            logs: directory of one file for each step.
            seconds: time of all functions together.
            preload: modules that all processes inherit from one; they must not touch a GPU, because
                CUDA does not survive a fork.
        """
        self.logs = logs
        self._deadline = time.monotonic() + seconds
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))

    def read_remaining(self) -> float:
        """Return the seconds that are left."""
        return self._deadline - time.monotonic()

    def find_log(self, step: str) -> Path:
        """Return the file with what a step prints."""
        return self.logs / f"{step.replace(' ', '_')}.log"

    def start(
        self, step: str, function: str, *arguments: Any, seconds: float | None = None
    ) -> RunningFunction:
        """Start `module:function` in a new process, whose output is added to the step's log.

        So are the stacks of its threads shortly before it has run for `seconds`.
        """
        ours, theirs = self._context.Pipe(duplex=False)
        log = str(self.find_log(step))
        process = self._context.Process(
            target=_serve, args=(theirs, log, function, arguments, seconds)
        )
        process.start()
        theirs.close()
        return RunningFunction(process, ours)

    def call(self, step: str, function: str, *arguments: Any, seconds: float) -> Any:
        """Return the result of `module:function(*arguments)`, computed in a new process.

        Raises:
            StepError: it raised, died, or took more than `seconds`; the message is one line.
            OutOfTimeError: the time of the whole check is over.
        """
        allowed = min(seconds, self.read_remaining())
        running = self.start(step, function, *arguments, seconds=allowed)
        try:
            return running.wait(allowed)
        except TimeoutError:
            if allowed < seconds:
                raise OutOfTimeError("the time of the whole check was over") from None
            raise StepError(f"no end after {seconds:.0f} s: see {self.find_log(step)}") from None
        finally:
            running.kill()


class RunningFunction:
    """A function that runs in its own process."""

    def __init__(self, process: Any, answers: Connection) -> None:
        self._process = process
        self._answers = answers

    def wait(self, seconds: float) -> Any:
        """Return the function's result.

        Raises:
            TimeoutError: there is none after so many seconds.
            StepError: the function raised, or its process died.
        """
        if not self._answers.poll(max(seconds, 0)):
            raise TimeoutError
        try:
            kind, answer = self._answers.recv()
        except EOFError:
            self._process.join(GRACE)
            raise StepError(describe_exit(self._process.exitcode)) from None
        if kind == "error":
            raise StepError(answer)
        self._process.join(GRACE)
        return answer

    def kill(self) -> None:
        """Kill the process and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()  # it may not have made its group yet
        self._process.join(GRACE)
        self._answers.close()


def describe_exit(status: int | None) -> str:
    """Describe how a process ended that gave no answer."""
    if status is not None and status < 0:
        return f"its process was ended by {signal.Signals(-status).name}"
    return f"its process ended with status {status}"


def _serve(
    answers: Connection,
    log: str,
    function: str,
    arguments: Sequence[Any],
    seconds: float | None,
) -> None:
    """Run a function in this new process and send its result or its error."""
    os.setsid()
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if seconds is not None:
        faulthandler.dump_traceback_later(max(seconds - DUMP_BEFORE, 1))
    module, _, name = function.partition(":")
    try:
        answer = ("result", getattr(import_module(module), name)(*arguments))
    except Exception as error:  # noqa: BLE001 - the check reports every error of a step
        traceback.print_exc()
        answer = ("error", describe_step_error(error))
    answers.send(answer)
    answers.close()


def describe_step_error(error: Exception) -> str:
    """Return an error in one line: the first of several, but all of one meant for the user."""
    if isinstance(error, GdpoTuneError):
        return "; ".join(line.strip() for line in str(error).splitlines())
    first = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, StepError):
        return first
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
