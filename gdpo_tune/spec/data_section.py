"""Checks of `data:`."""

from __future__ import annotations

from gdpo_tune.core import registry
from gdpo_tune.core.files import (
    DATA_FILES,
    expand_home,
    find_path_problem,
    is_directory,
    is_present,
    list_data_files,
)
from gdpo_tune.core.settings import DataSettings
from gdpo_tune.core.task_files import is_task_file
from gdpo_tune.spec.problems import Problems, explain_unknown_name, join_names

SUFFIXES = " or ".join(DATA_FILES)


def check_data(settings: DataSettings, task: str, problems: Problems) -> None:
    """Refuse keys that do not fit together or to the task, and paths that cannot hold data."""
    if not settings.source:
        reason = "has no effect: without data.source the task writes its own prompts"
        fix = "add data.source, or remove the key"
        problems.refuse_idle("data", "layout config split", settings, reason, fix, "data.source")
    elif is_task_file(task):
        reason = "has no effect: a task in a file writes its own prompts"
        fix = "remove the key, and read the data in the task's rows()"
        problems.refuse("data.source", reason, fix, "task")
    else:
        _check_layout(settings.layout, task, problems)
        if settings.is_local:
            _check_files(settings, problems)


def check_presence(settings: DataSettings, problems: Problems) -> None:
    """Refuse local data that is not there."""
    if settings.source and settings.is_local and not is_present(expand_home(settings.source)):
        reason = "no such file or directory, and not the id of a data set on the Hub"
        fix = f"write the path of a {SUFFIXES} file, or an id such as openai/gsm8k"
        problems.refuse("data.source", reason, fix, "task")


def _check_layout(layout: str, task: str, problems: Problems) -> None:
    key = "data.layout"
    layouts = {name: registry.describe_layout(name) for name in registry.LAYOUTS}
    unknown_task = problems.has_problem("task")
    fitting = [name for name, info in layouts.items() if unknown_task or task in info.tasks]
    if not layout:
        reason = "missing: the meaning of the columns is not guessed"
        problems.refuse(key, reason, f"add layout: one of {join_names(fitting)}")
    elif layout not in layouts:
        problems.refuse(key, *explain_unknown_name("layout", layout, layouts))
    elif layout not in fitting:
        reason = f"made for the task {' or '.join(layouts[layout].tasks)}, not for {task}"
        fix = f"write layout: one of {join_names(fitting)}, or another task"
        problems.refuse(key, reason, fix)


def _check_files(settings: DataSettings, problems: Problems) -> None:
    source, key = expand_home(settings.source), "data.source"
    unusable = find_path_problem(settings.source)
    if unusable:
        problems.refuse(key, unusable, f"write the path of a {SUFFIXES} file")
    elif is_directory(source):
        if not list_data_files(source):
            reason = f"a directory without a {SUFFIXES} file"
            problems.refuse(key, reason, "name another directory")
    elif is_present(source) and source.suffix not in DATA_FILES:
        problems.refuse(key, f"not a {SUFFIXES} file", "convert it, and name the new file")
    reason = "has no effect: local data has no configurations and no splits"
    fix = "remove the key, or name the file that you mean as data.source"
    problems.refuse_idle("data", "config split", settings, reason, fix, key)
