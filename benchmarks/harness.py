"""What every benchmark shares: its command line, processes of its own, and the line of JSON."""

from __future__ import annotations

import argparse
import inspect
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from gdpo_tune.core.parameters import list_parameters
from gdpo_tune.core.task_files import load_task_info
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.spec import SweepSpec, load_spec

SPACES = Path(__file__).resolve().parents[1] / "search_spaces"
T = TypeVar("T")


def run(measure: Callable[..., Mapping[str, Any]], small: Mapping[str, Any]) -> None:
    """Run a benchmark from the command line, and print its figures as the last line.

    Each keyword of `measure` is an option with its default, a list or a number; `small` has the
    values of `--small`. The docstring of its module is the help.
    """
    module = inspect.getmodule(measure)
    parser = argparse.ArgumentParser(
        description=module and module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help=f"a test of this script: {small}")
    for name, parameter in inspect.signature(measure).parameters.items():
        default = parameter.default
        first = default[0] if isinstance(default, list) else default
        several = {"nargs": "+"} if isinstance(default, list) else {}
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=type(first), default=default, **several)
    options = vars(parser.parse_args())
    options |= small if options.pop("small") else {}
    name = Path(inspect.getfile(measure)).stem
    print(json.dumps({"benchmark": name, **measure(**options)}, default=str))


def call_apart(work: Callable[..., T], *arguments: Any) -> T:
    """Return what a function of a module returns in a new process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments)


@contextmanager
def load_space(name: str = "code", *overrides: str) -> Iterator[SweepSpec]:
    """Load a shipped search space as a sweep in a temporary directory."""
    with tempfile.TemporaryDirectory() as directory:
        yield load_spec(SPACES / f"{name}.yaml", [f"storage={directory}", *overrides])


def build_trial(task: str, policy: str, directory: Path, params: Mapping[str, Any], **fields: Any):
    """Build a trial with the default parameters of its task, but for `params`."""
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
