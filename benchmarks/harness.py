"""What every benchmark shares: a command line, processes apart, trials, and readings of a machine.

A benchmark is a function `measure` whose keywords are its options; its result is the last line that
the script prints, as JSON. Nothing heavy is imported here: processes that are measured import it.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import multiprocessing
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

SPACES = Path(__file__).resolve().parents[1] / "search_spaces"
T = TypeVar("T")


def run(measure: Callable[..., Mapping[str, Any]], small: Mapping[str, Any]) -> None:
    """Run a benchmark from the command line, and print its figures as the last line.

    Each keyword of `measure` is an option with its default: a number, a text, a list, or a class
    for an option that has none. `small` has the values of `--small`. The docstring of its module is
    the help.
    """
    parser = argparse.ArgumentParser(
        description=inspect.getmodule(measure).__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--small", action="store_true", help=f"a test of this script: {small}")
    for name, parameter in inspect.signature(measure).parameters.items():
        default = parameter.default
        kind, several = default, {}
        if isinstance(default, list):
            kind, several = default[0], {"nargs": "+"}
        kind, default = (kind, None) if isinstance(kind, type) else (type(kind), default)
        typed = {"action": "store_true"} if kind is bool else {"type": kind, **several}
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, **typed)
    options = vars(parser.parse_args())
    options |= small if options.pop("small") else {}
    scripts = str(Path(__file__).resolve().parent)
    paths = filter(None, [scripts, os.environ.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # for processes that import a benchmark
    name = Path(inspect.getfile(measure)).stem
    print(json.dumps({"benchmark": name, **measure(**options)}, default=str))


def call_apart(work: Callable[..., T], *arguments: Any) -> T:
    """Return what a function of a module returns in a new process.

    Raises:
        BrokenProcessPool: the process was killed, such as for its memory.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


@contextlib.contextmanager
def load_space(name: str = "code", *overrides: str) -> Iterator[Any]:
    """Load a shipped search space as a sweep in a temporary directory."""
    from gdpo_tune.spec import load_spec

    with tempfile.TemporaryDirectory() as directory:
        yield load_spec(SPACES / f"{name}.yaml", [f"storage={directory}", *overrides])


def build_trial(task: str, policy: str, directory: Path, params: Mapping[str, Any], **fields: Any):
    """Build a trial with the default parameters of its task, but for `params`."""
    from gdpo_tune.core.parameters import list_parameters
    from gdpo_tune.core.task_files import load_task_info
    from gdpo_tune.core.trial_config import TrialConfig

    info = list_parameters(load_task_info(task, {}))
    defaults = {name: parameter.default for name, parameter in info.items()}
    seed, training = fields.pop("seed", 0), fields.pop("training")
    return TrialConfig(task, policy, seed, {**defaults, **params}, training, directory, **fields)


def time_cpu(work: Callable[[], T]) -> tuple[T, float]:
    """Return the result of `work` and the CPU seconds that it takes."""
    start = time.process_time()
    return work(), time.process_time() - start


def print_table(*rows: tuple[object, ...]) -> None:
    """Print rows of Markdown; the first has the heads."""
    for number, row in enumerate(rows):
        cells = (f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row)
        print(f"| {' | '.join(cells)} |", flush=True)
        if number == 0:
            print("|---" * len(row) + "|")


_TICK = 1 / os.sysconf("SC_CLK_TCK")
_VANISHED = (FileNotFoundError, ProcessLookupError, PermissionError)


@dataclass(frozen=True)
class Process:
    """Some fields of one line of /proc/PID/stat."""

    pid: int
    parent: int
    state: str
    cpu_seconds: float
    """CPU time of the process and of every child that it has waited for, to a clock tick."""


def list_processes(root: int) -> list[Process]:
    """Return the process `root` and all of its descendants, zombies included."""
    table: dict[int, Process] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(*_VANISHED):
            fields = entry.read_text().rpartition(")")[2].split()
            pid, ticks = int(entry.parent.name), sum(map(int, fields[11:15]))
            table[pid] = Process(pid, int(fields[1]), fields[0], ticks * _TICK)
    members = {root}
    while more := {p.pid for p in table.values() if p.parent in members} - members:
        members |= more
    return [table[pid] for pid in sorted(members) if pid in table]


def measure_cpu_seconds() -> float:
    """Return the CPU time of this process and all of its descendants, ended ones included."""
    return sum(process.cpu_seconds for process in list_processes(os.getpid()))


def measure_memory(pid: int) -> dict[str, float]:
    """Return the resident memory of a process, and its PSS where that may be read, in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    sizes = {"rss": _read_kib(status, "VmRSS:") / 1024}
    with contextlib.suppress(*_VANISHED):
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        sizes["pss"] = _read_kib(rollup, "Pss:") / 1024
    return sizes


def _read_kib(text: str, key: str) -> int:
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith(key)), 0)


def count_open_descriptors(pid: int) -> int | None:
    """Count the open descriptors: 0 if the process has ended, None without permission."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except PermissionError:
        return None
    except (FileNotFoundError, ProcessLookupError):
        return 0


EVERY = 0.5
"""Seconds between two readings."""


class Peak:
    """Highest of the readings that a thread takes while the `with` block runs."""

    def __init__(self, read: Callable[[], float]) -> None:
        """Create a peak.

        Args:
            read: returns the current use.
        """
        self.highest = 0.0
        """Highest reading, in the unit of `read`."""
        self._read = read
        self._over = threading.Event()
        self._threads = ThreadPoolExecutor(1)

    def __enter__(self) -> Self:
        """Start the thread after a first reading, so that a reading that fails does so at once."""
        self.highest = self._read()
        self._watching = self._threads.submit(self._watch)
        return self

    def __exit__(self, *_) -> None:
        """Stop the thread; raise the error of a reading, if there was one."""
        self._over.set()
        self._threads.shutdown()
        self._watching.result()

    def _watch(self) -> None:
        while not self._over.wait(EVERY):
            self.highest = max(self.highest, self._read())


def measure_gpu_memory() -> float:
    """Return the MiB that all processes together use of the one visible GPU.

    Raises:
        subprocess.CalledProcessError: `nvidia-smi` finds no such GPU.
    """
    return float(query_gpu("memory.used"))


def query_gpu(field: str) -> str:
    """Return a field that `nvidia-smi` reports of the one visible GPU."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    # `nvidia-smi` itself ignores this variable.
    if device := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command.append(f"--id={device}")
    answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    return answer.stdout.strip()


def measure_process_memory() -> float:
    """Return the MiB of this process and its descendants; shared pages count once for each."""
    import psutil

    own = psutil.Process()
    total = 0
    for process in [own, *own.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total / 2**20
