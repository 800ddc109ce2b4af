"""What `data:` can get wrong, as far as it shows without reading the data."""

from __future__ import annotations

from pathlib import Path

from gdpo_tune.core import registry, task_files
from gdpo_tune.core.settings import DATA_FILES, DataSettings
from gdpo_tune.spec.checks import check_name
from gdpo_tune.spec.problems import Node, Problems, one_of

SUFFIXES = " or ".join(DATA_FILES)


def check_data(
    settings: DataSettings | None, task: str | None, root: Node, problems: Problems
) -> None:
    """The keys of the section fit together and to the task; local data is where it should be."""
    if settings is None or problems.about("data.source"):
        return
    if settings.source and task is not None and task_files.is_file(task):
        reason = "has no effect: a task in a file writes its own prompts"
        fix = "remove the key, and read the data in the task's rows()"
        problems.at(root.find(("data", "source")), ("data", "source"), reason, fix)
        return
    if settings.source:
        _check_layout(settings, task, root, problems)
        _check_place(settings, root, problems)
        return
    reason = "has no effect: without data.source the task writes its own prompts"
    fix = "add data.source, or remove the key"
    _refuse_keys(settings, ("layout", "config", "split"), reason, fix, root, problems)


def _check_layout(settings: DataSettings, task: str | None, root: Node, problems: Problems) -> None:
    path = ("data", "layout")
    if problems.about("data.layout"):
        return
    judges = {name: registry.describe_layout(name).tasks for name in registry.LAYOUTS}
    fitting = [name for name, tasks in judges.items() if task in (None, *tasks)]
    if not settings.layout:
        reason = "missing: what the columns of the data mean is not guessed"
        fix = f"add layout: one of {one_of(fitting)}"
        problems.add(root.find(("data", "source")).mark, "data.layout", None, reason, fix)
    elif check_name(root.find(path), path, "layout", registry.LAYOUTS, problems):
        tasks = judges[settings.layout]
        if settings.layout not in fitting:
            reason = f"made for the task {' or '.join(tasks)}, not for {task}"
            fix = f"write layout: one of {one_of(fitting)}, or another task"
            problems.at(root.find(path), path, reason, fix)


def _check_place(settings: DataSettings, root: Node, problems: Problems) -> None:
    if not settings.is_local:
        return
    source, path = Path(settings.source).expanduser(), ("data", "source")
    node = root.find(path)
    if source.is_dir():
        if not any(file.suffix in DATA_FILES for file in source.iterdir()):
            problems.at(node, path, f"a folder without a {SUFFIXES} file", "name another folder")
    elif not source.exists():
        reason = "no such file or folder, and not the id of a data set on the Hub"
        fix = f"write the path of a {SUFFIXES} file, or an id such as openai/gsm8k"
        problems.at(node, path, reason, fix)
    elif source.suffix not in DATA_FILES:
        problems.at(node, path, f"not a {SUFFIXES} file", "convert it, and name the new file")
    reason = "has no effect: local data has no configurations and no splits"
    fix = "remove the key, or name the file that you mean as data.source"
    _refuse_keys(settings, ("config", "split"), reason, fix, root, problems)


def _refuse_keys(
    settings: DataSettings,
    keys: tuple[str, ...],
    reason: str,
    fix: str,
    root: Node,
    problems: Problems,
) -> None:
    """Note keys that are not at their default."""
    for key in keys:
        path = ("data", key)
        if getattr(settings, key) != getattr(DataSettings(), key):
            problems.at(root.find(path), path, reason, fix)
