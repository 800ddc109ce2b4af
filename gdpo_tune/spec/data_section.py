"""Checks of `data:`."""

from __future__ import annotations

from gdpo_tune.core import registry
from gdpo_tune.core.files import (
    DATA_KINDS,
    expand_path,
    find_path_problem,
    is_data_file,
    is_directory,
    is_file,
    is_local_source,
    list_data_files,
    path_exists,
)
from gdpo_tune.core.settings import LATER_DATA, DataSettings, HeldOutData
from gdpo_tune.core.task_files import is_task_file
from gdpo_tune.core.text import list_template_columns
from gdpo_tune.spec.problems import Problems, explain_unknown_name, join_names


def check_data(settings: DataSettings, task: str, problems: Problems) -> None:
    """Refuse keys that do not fit together or to the task, and paths that cannot hold data."""
    if not settings.source:
        reason = "has no effect: without data.source the task writes its own prompts"
        fix = "add data.source, or remove the key"
        keys = f"layout config split {' '.join(LATER_DATA)}"
        problems.refuse_idle("data", keys, settings, reason, fix, "data.source")
    elif is_task_file(task):
        reason = "has no effect: a task in a file writes its own prompts"
        fix = "remove the key, and read the data in the task's rows()"
        problems.refuse("data.source", reason, fix, "task")
    else:
        _check_layout(settings, task, problems)
        for key, section in _list_sections(settings).items():
            _check_files(section.source, f"{key}.source", problems)
            source = section.source or settings.source
            has_splits = not is_local_source(source) or is_directory(expand_path(source))
            if not has_splits and section.split not in ("", "train"):
                reason = "has no effect: a file has no splits"
                fix = "remove the key, or name the file that you mean as source"
                problems.refuse(f"{key}.split", reason, fix, "data.source")
        if settings.is_local and not is_file(expand_path(settings.source) / "README.md"):
            reason = "has no effect: only a clone from the Hub, with its README.md, has any"
            problems.refuse_idle("data", "config", settings, reason, "remove the key")


def check_presence(settings: DataSettings, problems: Problems) -> None:
    """Refuse local data that is not there."""
    for key, section in _list_sections(settings).items():
        source = section.source
        if source and is_local_source(source) and not path_exists(expand_path(source)):
            reason = "no such file or directory, and not the id of a data set on the Hub"
            fix = f"write the path of a {DATA_KINDS} file, or an id such as openai/gsm8k"
            problems.refuse(f"{key}.source", reason, fix, "task")


def _list_sections(settings: DataSettings) -> dict[str, DataSettings | HeldOutData]:
    own = {"data.validation": settings.validation, "data.test": settings.test}
    return {"data": settings, **own}


def _check_layout(settings: DataSettings, task: str, problems: Problems) -> None:
    key, layout = "data.layout", settings.layout
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
    else:
        info = layouts[layout]
        known = (*info.columns, *info.optional, *info.solution)
        for name in (name for name in settings.columns if name not in known):
            reason, fix = explain_unknown_name(f"column of layout {layout}", name, known)
            fix += "; write {column of the layout: column of the data}"
            problems.refuse(f"data.columns.{name}", reason, fix)
        if settings.prompt_template and info.columns[0] in settings.columns:
            reason = f"has no effect: data.prompt_template writes the {info.columns[0]}"
            problems.refuse(f"data.columns.{info.columns[0]}", reason, "remove one of the two keys")
    try:
        list_template_columns(settings.prompt_template)
    except ValueError as error:
        fix = 'write the name of a column in braces, "{Body} {Question}", and {{ for a brace'
        problems.refuse("data.prompt_template", f"cannot be filled: {error}", fix)


def _check_files(name: str, key: str, problems: Problems) -> None:
    source = expand_path(name)
    if not name or not is_local_source(name):
        return
    if unusable := find_path_problem(name):
        problems.refuse(key, unusable, f"write the path of a {DATA_KINDS} file")
    elif is_directory(source):
        if not list_data_files(source):
            reason = f"a directory without a {DATA_KINDS} file"
            problems.refuse(key, reason, "name another directory")
    elif path_exists(source) and not is_data_file(source):
        problems.refuse(key, f"not a {DATA_KINDS} file", "convert it, and name the new file")
