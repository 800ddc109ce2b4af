"""Tasks by name: those of the registry, and a user's own, `task: path/to/file.py:MyTask`.

A class in a file derives from `gdpo_tune.tasks.custom.RewardFunctionTask`. Importing it executes
the file, once per process.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from gdpo_tune.core import registry
from gdpo_tune.core.errors import TaskFileError
from gdpo_tune.core.files import expand_path, is_file
from gdpo_tune.core.metrics import MetricInfo
from gdpo_tune.core.task_info import STRICT, UNKNOWN_RANGE, Scoring, TaskInfo
from gdpo_tune.core.text import make_printable
from gdpo_tune.core.trial_files import CUT
from gdpo_tune.core.trials import Direction

if TYPE_CHECKING:
    from gdpo_tune.core.settings import DataSettings, SandboxSettings, TrainingSettings

LONGEST_REASON = 400
"""Characters of a user's error in a message."""
_NOT_OWN = ("<", str(Path(__file__).parents[1]), *map(sysconfig.get_path, ("stdlib", "purelib")))
"""Beginnings of the files in a traceback that no user wrote."""


def is_task_file(task: str) -> bool:
    """Return whether a task is named by a file and not by the registry."""
    return ".py:" in task or task.endswith(".py")


def load_task_info(task: str, parameters: Collection[str] = ()) -> TaskInfo:
    """Return what a task rewards and measures; the name or file is as in a sweep file.

    An optional reward is on if its `reward_weights.<name>` is among `parameters`.

    Raises:
        TaskFileError: it is in a file, and cannot be used.
    """
    with contextlib.chdir(Path.cwd()):  # a file that changes it would move the sweep
        info = _describe(task) if is_task_file(task) else registry.describe_task(task)
    return info.add_optional_rewards(parameters)


def build_task(
    task: str,
    training: TrainingSettings,
    sandbox: SandboxSettings,
    data: DataSettings,
    parameters: Collection[str] = (),
    scoring: Scoring = STRICT,
) -> Any:
    """Build the task of a sweep; arguments and errors as in `load_task_info`.

    Only a task that offers it has another `scoring`. One in a file gets a process of its own.
    """
    others = {} if scoring == STRICT else {"scoring": scoring}
    info = load_task_info(task, parameters)
    if is_task_file(task):
        process = registry.load("gdpo_tune.tasks.task_process:TaskProcess")
        return process(task, info.build, training, sandbox, data)
    return info.build(training, sandbox, data, **others)


def _describe(task: str) -> TaskInfo:
    task_class = load_class(task)
    if not issubclass(task_class, registry.load("gdpo_tune.tasks.custom:RewardFunctionTask")):
        raise TaskFileError(
            f"{task}: it is no task\n"
            "    fix: derive it from gdpo_tune.tasks.custom.RewardFunctionTask (docs/own_task.md)"
        )
    if hasattr(task_class, "score"):
        raise TaskFileError(f"{task}: its score() is not called\n    fix: write reward functions")
    rewards, metrics = _read_names(task_class, task), task_class.metrics
    limit = task_class.time_limit
    if limit is not None and not (isinstance(limit, int | float) and limit > 0):
        raise TaskFileError(f"{task}: time_limit = {limit!r} has to be seconds above 0, or None")
    if not (isinstance(task_class.most_failed, int | float) and 0 <= task_class.most_failed < 1):
        raise TaskFileError(f"{task}: most_failed = {task_class.most_failed!r} has to be in [0, 1)")
    ranges = {name: _read_range(task_class, name, task) for name in (*rewards, *metrics)}
    directions: Mapping[str, Direction] = task_class.directions
    for name, direction in directions.items():
        if direction not in get_args(Direction):
            raise TaskFileError(f"{task}: directions[{name!r}] is not maximize or minimize")
    return TaskInfo(
        build=task_class,
        rewards={name: ranges[name] for name in rewards},
        metrics={
            name: MetricInfo(directions.get(name, "maximize"), *ranges[name], doc=f"mean {name}")
            for name in metrics
        },
        embedded="embedded",
        calls_tools=bool(task_class.tools),
        published=registry.weigh_equally(rewards),
        judges=task_class.judges,
    )


def split_task_file(task: str) -> tuple[str, str]:
    """Return the absolute path and the class of a task in a file; refuse one without a class."""
    file, _, name = task.rpartition(":")
    if not file or not name.isidentifier():
        raise TaskFileError(f"{task}: it names no class; write path/to/file.py:MyTask")
    return str(expand_path(file).absolute()), name


def load_class(task: str) -> Any:
    """Return the class of a task in a file, which may change the current directory.

    Raises:
        TaskFileError: the file has no such class, or cannot be run.
    """
    file, name = split_task_file(task)
    task_class = getattr(_load_module(file, task), name, None)
    if not isinstance(task_class, type):
        raise TaskFileError(f"{task}: that file has no class {name}")
    return task_class


@functools.cache
def _load_module(file: str, task: str) -> Any:
    if not is_file(Path(file)):
        raise TaskFileError(f"{task}: there is no file {file}")
    # The name is that of the file, so that a process which loads it again finds the same classes.
    name = f"gdpo_tune_task_{hashlib.sha256(file.encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None, "a path that ends in .py has a loader"
    assert spec.loader is not None, "a path that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    directory = str(Path(file).parent)
    sys.path.insert(0, directory)  # first, as for a program in this directory
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's file may raise anything
        del sys.modules[name]
        raise TaskFileError(
            f"{task}: running the file raised {describe_task_error(error)}"
        ) from error
    finally:
        sys.path.remove(directory)
        if directory not in sys.path:
            sys.path.append(directory)  # last, so that its modules hide none that come later
    return module


def describe_task_error(error: BaseException) -> str:
    """Return an error in one line with its place: `KeyError: 1 (mine.py, line 3)`.

    The place is that of wrong syntax, or the innermost one in a user's own file.
    """
    frames = traceback.extract_tb(error.__traceback__)
    place = ([one for one in frames if not one.filename.startswith(_NOT_OWN)] or frames)[-1]
    file, line = place.filename, place.lineno
    lines = traceback.format_exception_only(error)
    message = lines[0].removeprefix(f"{TaskFileError.__module__}.")
    if isinstance(error, SyntaxError):
        file, line, message = error.filename or file, error.lineno or line, lines[-1]
    message = " ".join(make_printable(message[: 4 * LONGEST_REASON]).split())
    if len(message) > LONGEST_REASON:
        message = f"{message[:LONGEST_REASON]} {CUT}"
    return f"{message} ({Path(file).name}, line {line})"


def _read_names(task_class: Any, task: str) -> tuple[str, ...]:
    names: Any = task_class.rewards
    if not names:
        raise TaskFileError(f"{task}: reward_funcs holds no function")
    for name in names:
        if not isinstance(name, str) or not name.isidentifier():
            raise TaskFileError(f"{task}: reward_funcs holds {name!r}, which is not a plain name")
    if len(set(names)) != len(names):
        raise TaskFileError(f"{task}: reward_funcs holds a name twice")
    return names


def _read_range(task_class: Any, name: str, task: str) -> tuple[float, float]:
    limits: Any = task_class.ranges.get(name, UNKNOWN_RANGE)
    try:
        low, high = map(float, limits)
    except (TypeError, ValueError):
        low, high = 0.0, 0.0
    if not low < high:
        raise TaskFileError(f"{task}: ranges[{name!r}] has to be (lowest, highest)")
    return low, high
