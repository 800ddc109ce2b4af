"""`rewards.py` of an export, the modules of this package that it carries, and an own task's files."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from gdpo_tune.core.service_url import drop_credentials
from gdpo_tune.core.task_files import is_task_file, split_task_file
from gdpo_tune.exporters.library import REWARDS_FILE, TrainingFiles
from gdpo_tune.exporters.recipe import Recipe

CARRIED = "gdpo_rewards"
"""Package of an export with the modules of this one that it needs."""
TASK_COPY = "task.py"
"""Copy of the file of an own task, whose own name may be one that the export needs."""
NEIGHBOURS = "task_modules"
"""Directory of an export with the modules that an own task imports."""
JUDGING = (
    *("core/shaping.py", "tasks/base.py", "tasks/answers.py", "tasks/*rewards.py"),
    *("exporters/runtime.py", "policies/prompt_format.py"),
)
"""Modules that score completions; they import no others of this package."""
PROGRAMS = (
    *("sandbox/**/*.py", "core/errors.py", "core/system.py", "core/service_url.py"),
    *("core/turns.py", "core/files.py", "tasks/execution.py", "tasks/generation.py"),
    *("tasks/data_rows.py", "exporters/runtime_programs.py"),
)
"""Modules that run programs, besides."""
PROMPTS = (
    *("core/errors.py", "core/files.py", "core/prompt_order.py", "core/task_info.py"),
    *("tasks/generation.py", "tasks/data_rows.py", "tasks/*layouts.py"),
    "exporters/runtime_prompts.py",
)
"""Modules that make prompts of a data set, besides."""
_PACKAGE = Path(__file__).parents[1]
_IMPORT = re.compile(rf"^(\s*from ){_PACKAGE.name}\b", flags=re.MULTILINE)


def carry_modules(*patterns: str) -> dict[str, bytes]:
    """Return name in the export -> content of modules, which import each other there."""
    files = {file for pattern in patterns for file in _PACKAGE.glob(pattern)}
    packages = {
        folder / "__init__.py" for file in files for folder in file.relative_to(_PACKAGE).parents
    }
    copied = {str(name): b"" for name in packages}
    for file in sorted(files):
        source = _IMPORT.sub(rf"\1{CARRIED}", file.read_text(encoding="utf-8"))
        copied[str(file.relative_to(_PACKAGE))] = source.encode()
    return {f"{CARRIED}/{name}": content for name, content in copied.items()}


def runs_programs(recipe: Recipe) -> bool:
    """Return whether a reward runs code that the policy wrote."""
    return not is_task_file(recipe.task) and "sandbox" in vars(type(recipe.build_task()))


def build_reward_files(recipe: Recipe, training: TrainingFiles) -> dict[str, bytes]:
    """Return name in the export -> content of `rewards.py` and of what it imports."""
    files = carry_modules(*JUDGING, *(PROGRAMS if runs_programs(recipe) else ()))
    if is_task_file(recipe.task):
        file = Path(split_task_file(recipe.task)[0])
        files |= {TASK_COPY: file.read_bytes(), **_copy_neighbours(file)}
    return {REWARDS_FILE: _format_rewards(recipe, training).encode(), **files}


def _format_rewards(recipe: Recipe, training: TrainingFiles) -> str:
    runtime = f"{CARRIED}.exporters.runtime"
    imports = [f"{runtime} import Judge", f"{CARRIED}.core.shaping import Shaping"]
    imports += [
        f"{CARRIED}.core.shaping import {name}"
        for name in ("LengthFall", "RewardCondition")
        if name in repr(recipe.shaping)
    ]
    imports += [f"{runtime} import {name}" for name in training.imports]
    build = _score_own_task if is_task_file(recipe.task) else _score_samples
    score, more, setup = build(recipe)
    lines = "\n".join(f"from {line}" for line in sorted({*imports, *more}))
    weights = {reward.name: reward.weight for reward in recipe.rewards}
    return f"""{format_docstring(_describe(recipe))}

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # the library may work in another directory

{lines}
{setup}
JUDGE = Judge(
    {score},
    {recipe.shaping!r},
    {weights!r},
)
{training.ending}
"""


def _score_samples(recipe: Recipe) -> tuple[str, list[str], str]:
    """Return the scoring by the functions of a task that ships: source, imports, lines above."""
    read = {*(reward.name for reward in recipe.rewards)}
    read |= {condition.on for condition in recipe.shaping.conditions.values()}
    rewards = [reward for reward in recipe.build_task().judged_rewards if reward.name in read]
    scores = {reward.name: reward.score for reward in rewards}
    partial = {r.name: r.partial for r in rewards if r.partial and recipe.shaping.partial_credit}
    functions = [*scores.values(), *partial.values()]
    imports = [f"{CARRIED}.exporters.runtime import score_samples"]
    imports += [f"{_rename(each.__module__)} import {each.__name__}" for each in functions]
    arguments = [_format_table(scores), _format_table(partial), str(recipe.training.length_limit)]
    if runs_programs(recipe):
        imports.append(f"{CARRIED}.exporters.runtime_programs import ProgramRunner")
        settings = asdict(replace(recipe.sandbox, url=drop_credentials(recipe.sandbox.url)))
        arguments.append(f"ProgramRunner({format_arguments(settings)})")
    return f"score_samples({', '.join(arguments)})", imports, ""


def _score_own_task(recipe: Recipe) -> tuple[str, list[str], str]:
    """Return the scoring by a task in a file; see `_score_samples`."""
    _, name = split_task_file(recipe.task)
    sandbox = replace(recipe.sandbox, url=drop_credentials(recipe.sandbox.url))
    settings = f"{recipe.training!r},\n    {sandbox!r},\n    {recipe.data!r}"
    imports = [
        "gdpo_tune.core.settings import DataSettings, SandboxSettings, TrainingSettings",
        f"{CARRIED}.exporters.runtime import score_own_task",
    ]
    setup = f"""
sys.path.append(str(HERE / "{NEIGHBOURS}"))  # last, so that they hide no others
SETTINGS = (
    {settings},
)
"""
    return f'score_own_task(f"{{HERE}}/{TASK_COPY}:{name}", *SETTINGS)', imports, setup


def _format_table(functions: Mapping[str, Callable[..., object]]) -> str:
    entries = ", ".join(f'"{name}": {each.__name__}' for name, each in functions.items())
    return f"{{{entries}}}"


def _rename(module: str) -> str:
    return module.replace(_PACKAGE.name, CARRIED, 1)


def format_arguments(values: Mapping[str, object]) -> str:
    """Return the keyword arguments of a call as source."""
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def format_docstring(text: str) -> str:
    """Return a text as a docstring, although a path in it may hold what ends one."""
    return '"""' + text.replace("\\", "/").replace('"', "'") + '"""'


def _describe(recipe: Recipe) -> str:
    weights = "\n".join(f"    {reward.name} {reward.weight:.6g}" for reward in recipe.rewards)
    return f"""Rewards of {recipe.note}.

Their weights, which the configuration beside this file has, too:

{weights}

Written by gdpo_tune. `{CARRIED}` has copies of its modules, with the functions of its task
`{recipe.task}`.
"""


def _copy_neighbours(file: Path) -> dict[str, bytes]:
    """Return name in the export -> content of modules that the file of a task imports.

    Those are modules beside the file or in the current directory, and what they import from there.
    """
    places = (file.parent, Path.cwd())
    copied: dict[str, Path] = {}
    waiting = [file]
    while waiting:
        for name in sorted(_list_imported(waiting.pop())):
            for copy, module in _find_beside(name, places):
                if module != file and copied.setdefault(copy, module) is module:
                    waiting.append(module)
    return {f"{NEIGHBOURS}/{name}": source.read_bytes() for name, source in copied.items()}


def _list_imported(file: Path) -> set[str]:
    """Return the first names of all modules that a file imports; none if it is no Python."""
    try:
        nodes: Iterable[ast.AST] = ast.walk(ast.parse(file.read_bytes()))
    except (SyntaxError, ValueError):
        return set()
    names: set[str] = set()
    for node in nodes:
        match node:
            case ast.Import():
                names |= {alias.name for alias in node.names}
            case ast.ImportFrom(module=str(module), level=0):
                names.add(module)
            case _:
                pass
    return {name.partition(".")[0] for name in names}


def _find_beside(name: str, places: tuple[Path, ...]) -> Iterator[tuple[str, Path]]:
    """Yield name in the copy -> file of a module or package that Python finds in one of places."""
    if name in sys.stdlib_module_names or name == _PACKAGE.name:
        return
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # a module that takes the place of another has no spec
        return
    if spec is None:
        return
    for package in map(Path, spec.submodule_search_locations or ()):
        if package.absolute().parent in places:
            for file in sorted(package.rglob("*.py")):
                yield str(file.relative_to(package.parent)), file
            return
    if spec.origin and Path(spec.origin).absolute().parent in places:
        yield Path(spec.origin).name, Path(spec.origin)
