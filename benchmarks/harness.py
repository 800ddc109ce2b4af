"""What several benchmarks share: a command line, processes apart, trials, tables and shapes.

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
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

SPACES = Path(__file__).resolve().parents[1] / "search_spaces"
T = TypeVar("T")


Measure = Callable[..., Mapping[str, Any]]


def run(measure: Measure, small: Mapping[str, Any]) -> None:
    """Run a benchmark from the command line, and print its figures as the last line.

    Each keyword of `measure` is an option with its default: a number, a text, a list, or a class
    for an option that has none. `small` has the values of `--small`. The docstring of its module is
    the help.
    """
    run_parts({"": (measure, small)})


def run_parts(parts: Mapping[str, tuple[Measure, Mapping[str, Any]]]) -> None:
    """Run one of several functions, as `run` does; the first argument names it."""
    first = next(iter(parts.values()))[0]
    parser = argparse.ArgumentParser(
        description=inspect.getmodule(first).__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    several = None if "" in parts else parser.add_subparsers(dest="part", required=True)
    for part, (measure, small) in parts.items():
        _add_options(several.add_parser(part) if several else parser, measure, small)
    options = vars(parser.parse_args())
    part = options.pop("part", "")
    measure, small = parts[part]
    options |= small if options.pop("small") else {}
    paths = filter(None, [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # for processes that import a benchmark
    name = f"{Path(inspect.getfile(first)).stem} {part}".strip()
    print(json.dumps({"benchmark": name, **measure(**options)}, default=str))


def _add_options(
    parser: argparse.ArgumentParser, measure: Measure, small: Mapping[str, Any]
) -> None:
    parser.add_argument("--small", action="store_true", help=f"a test of this script: {small}")
    for name, parameter in inspect.signature(measure).parameters.items():
        default = parameter.default
        kind, several = default, {}
        if isinstance(default, list):
            kind, several = default[0], {"nargs": "+"}
        kind, default = (kind, None) if isinstance(kind, type) else (type(kind), default)
        typed = {"action": "store_true"} if kind is bool else {"type": kind, **several}
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, **typed)


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


def print_table(*rows: tuple[object, ...]) -> None:
    """Print rows of Markdown; the first has the heads."""
    for number, row in enumerate(rows):
        cells = (f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row)
        print(f"| {' | '.join(cells)} |", flush=True)
        if number == 0:
            print("|---" * len(row) + "|")
    print()


def list_processes() -> list[Any]:
    """Return this process and all of its descendants, zombies included, as psutil has them."""
    import psutil

    own = psutil.Process()
    return [own, *own.children(recursive=True)]


SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
)
SHAPES: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "qwen3-0.6b": ("qwen3", (151_936, 1024, 3072, 28, 16, 8, 128, 40_960)),
    "qwen2.5-1.5b": ("qwen2", (151_936, 1536, 8960, 28, 12, 2, 128, 32_768)),
    "tiny": ("qwen3", (4096, 64, 128, 2, 2, 1, 32, 4096)),
}
"""Name -> architecture of Transformers, and its `SIZES`."""


def build_config(shape: str) -> Any:
    """Build the configuration of a policy, for weights that need no network."""
    from transformers import AutoConfig

    architecture, sizes = SHAPES[shape]
    named = dict(zip(SIZES, sizes, strict=True))
    return AutoConfig.for_model(architecture, tie_word_embeddings=True, **named)
