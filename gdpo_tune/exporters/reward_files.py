"""`rewards.py` of an export, the modules of this package that it carries, and a custom task."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gdpo_tune.core.content import find_modules
from gdpo_tune.core.registry import describe_task
from gdpo_tune.core.task_files import is_task_file, split_task_file
from gdpo_tune.exporters.library import REWARDS_FILE, TrainingFiles
from gdpo_tune.exporters.training_setup import TrainingSetup

CARRIED = "gdpo_rewards"
"""Package of an export with the modules of this one that it needs."""
TASK_COPY = "task.py"
"""Copy of the file of a custom task, whose own name may be one that the export needs."""
NEIGHBOURS = "task_modules"
"""Directory of an export with the modules that a custom task imports."""
SCORING = (
    *("core/errors.py", "core/shaping.py", "policies/prompt_format.py", "exporters/runtime.py"),
    *("tasks/base.py", "tasks/answers.py", "tasks/programs.py", "tasks/*rewards.py"),
)
"""Modules that score completions; they import no others of this package."""
PROGRAMS = (
    *("sandbox/**/*.py", "core/system.py"),
    *("tasks/columns.py", "tasks/execution.py"),
)
"""Modules that run programs, besides."""
_PACKAGE = Path(__file__).parents[1]
_IMPORT = re.compile(rf"^(\s*from ){_PACKAGE.name}\b", flags=re.MULTILINE)


def carry_modules(*patterns: str) -> dict[str, bytes]:
    """Return name in the export -> content of modules of this package."""
    files = {file for pattern in patterns for file in _PACKAGE.glob(pattern)}
    packages = {above for file in files for above in file.relative_to(_PACKAGE).parents}
    copied = {str(package / "__init__.py"): b"" for package in packages}
    for file in sorted(files):
        source = _IMPORT.sub(rf"\1{CARRIED}", file.read_text(encoding="utf-8"))
        copied[str(file.relative_to(_PACKAGE))] = source.encode()
    return {f"{CARRIED}/{name}": content for name, content in copied.items()}


def runs_programs(setup: TrainingSetup) -> bool:
    """Return whether a reward runs code that the policy wrote."""
    return not is_task_file(setup.task) and describe_task(setup.task).runs_programs


def build_reward_files(setup: TrainingSetup, training: TrainingFiles) -> dict[str, bytes]:
    """Return name in the export -> content of `rewards.py` and of what it imports."""
    files = carry_modules(*SCORING, *(PROGRAMS if runs_programs(setup) else ()))
    files[REWARDS_FILE] = _format_rewards(setup, training).encode()
    if not is_task_file(setup.task):
        return files
    task_file = Path(split_task_file(setup.task)[0])
    files[TASK_COPY] = task_file.read_bytes()
    for module in find_modules(task_file)[0]:
        places = [p for p in (task_file.parent, Path.cwd()) if module.is_relative_to(p)]
        if places and module != task_file:
            name = module.relative_to(places[0]).as_posix()
            files.setdefault(f"{NEIGHBOURS}/{name}", module.read_bytes())
    return files


def _format_rewards(setup: TrainingSetup, training: TrainingFiles) -> str:
    runtime, shaping = f"{CARRIED}.exporters.runtime", f"{CARRIED}.core.shaping"
    build = _score_custom_task if is_task_file(setup.task) else _score_samples
    score, more, above = build(setup)
    imports = {f"{runtime} import {name}" for name in ("RewardScorer", *training.imports)} | {*more}
    shapes = ("LengthFall", "RewardCondition", "Shaping")
    imports |= {f"{shaping} import {name}" for name in shapes if name in repr(setup.shaping)}
    lines = "\n".join(f"from {line}" for line in sorted(imports))
    weights = {reward.name: reward.weight for reward in setup.rewards}
    shown = "\n".join(f"    {name} {weight:.6g}" for name, weight in weights.items())
    text = f"""Rewards of {setup.note}.

Their weights, which the configuration beside this file has, too:

{shown}

Written by gdpo_tune. `{CARRIED}` has copies of its modules, with the functions of its task
`{Path(setup.task).name}`.
"""
    return f"""{format_docstring(text)}

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE))  # the library may work in another directory

{lines}
{above}
SCORER = RewardScorer(
    {score},
    {setup.shaping!r},
    {weights!r},
)
{training.ending}
"""


def _score_samples(setup: TrainingSetup) -> tuple[str, list[str], str]:
    """Return the scoring by a task that ships: source, imports, lines above."""
    read = {*(reward.name for reward in setup.rewards)}
    read |= {condition.on for condition in setup.shaping.conditions.values()}
    task, has_partial = setup.build_task(), setup.shaping.partial_credit
    scores = {name: each for name, each in task.reward_funcs.items() if name in read}
    partial = {k: each for k, each in task.partial_funcs.items() if k in read and has_partial}
    functions = [*scores.values(), *partial.values()]
    runtime = f"{CARRIED}.exporters.runtime"
    imports = [f"{runtime} import score_samples"]
    imports += [
        f"{each.func.__module__.replace(_PACKAGE.name, CARRIED, 1)} import {each.__name__}"
        for each in functions
    ]
    arguments = [_format_table(scores), _format_table(partial), str(setup.training.length_limit)]
    if runs_programs(setup):
        imports.append(f"{runtime} import ProgramRunner")
        arguments.append(f"ProgramRunner({format_arguments(setup.sandbox.model_dump())})")
    return f"score_samples({', '.join(arguments)})", imports, ""


def _score_custom_task(setup: TrainingSetup) -> tuple[str, list[str], str]:
    """Return the scoring by a task in a file; see `_score_samples`."""
    _, name = split_task_file(setup.task)
    settings = f"{setup.training!r},\n    {setup.sandbox!r},\n    {setup.data!r}"
    imports = [
        f"{_PACKAGE.name}.core.settings import {each}"
        for each in ("DataSettings", "HeldOutData", "SandboxSettings", "TrainingSettings")
    ]
    imports.append(f"{CARRIED}.exporters.runtime import score_custom_task")
    above = f"""
sys.path.append(str(HERE / "{NEIGHBOURS}"))  # last, so that they hide no others
SETTINGS = (
    {settings},
)
"""
    return f'score_custom_task(f"{{HERE}}/{TASK_COPY}:{name}", *SETTINGS)', imports, above


def _format_table(functions: Mapping[str, Any]) -> str:
    entries = ", ".join(f'"{name}": {each.__name__}' for name, each in functions.items())
    return f"{{{entries}}}"


def format_arguments(values: Mapping[str, object]) -> str:
    """Return the keyword arguments of a call as source."""
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def format_docstring(text: str) -> str:
    """Return a text as a docstring, although a path in it may hold what ends one."""
    return '"""' + text.replace("\\", "/").replace('"', "'") + '"""'
