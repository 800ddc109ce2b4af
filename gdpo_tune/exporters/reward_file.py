"""`rewards.py` of an export: the rewards of a training, in the form of a library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gdpo_tune.core.addresses import drop_credentials
from gdpo_tune.core.settings import SandboxSettings
from gdpo_tune.core.task_files import is_task_file, split_task_file
from gdpo_tune.exporters.bundle import Bundle, format_docstring
from gdpo_tune.exporters.recipe import Recipe

GLUE = "gdpo_tune.exporters.glue"
TASK_COPY = "task.py"
"""Copy of the file of an own task, whose own name may be one that the export needs."""
SANDBOX = "gdpo_tune.sandbox"
"""Package that a folder has a copy of, if a reward runs code."""
SANDBOX_COPY = "gdpo_sandbox"
"""Package of an export with the copy, since this package may not be installed there."""
_PACKAGE = Path(__file__).parents[1]
_SANDBOX_CORE = ("__init__", "errors", "system", "addresses", "compute_lock")
"""Modules of `core` that the sandbox imports; they import no others."""
_SETTINGS = "gdpo_tune.core.settings"
_TASK_FILES = "gdpo_tune.core.task_files"
_FIND_FILES_BESIDE = """# The library may work in another directory.
sys.path.insert(0, str(Path(__file__).resolve().parent))"""


def build_reward_file(recipe: Recipe, glue: Mapping[str, Sequence[str]], ending: str) -> str:
    """Build the text of `rewards.py`.

    `glue` maps a module of `glue` to its definitions that the library looks for, or that `ending`,
    the source below everything else, needs.
    """
    bundle, settings = _start_bundle(recipe)
    for name in ("LengthFall", "RewardCondition"):
        if name in repr(recipe.shaping):
            bundle.add("gdpo_tune.core.shaping", name)
    for module, names in glue.items():
        for name in names:
            bundle.add(f"{GLUE}.{module}", name)
    settings["SHAPING"] = f"SHAPING = {recipe.shaping!r}"
    weights = {reward.name: reward.weight for reward in recipe.rewards}
    settings["READING"] = f"READING = {recipe.reading!r}"
    settings["WEIGHTS"] = f"WEIGHTS = {weights!r}"
    imports, definitions = bundle.format(settings)
    head = f"{format_docstring(_describe(recipe))}\n\nfrom __future__ import annotations"
    if runs_programs(recipe):
        head += f"\n\nimport sys\nfrom pathlib import Path\n\n{_FIND_FILES_BESIDE}"
    parts = [f"{head}\n\n{imports}", definitions, *([ending] if ending else [])]
    return "\n\n\n".join(parts) + "\n"


def runs_programs(recipe: Recipe) -> bool:
    """Return whether a reward runs code that the policy wrote."""
    return not is_task_file(recipe.task) and "sandbox" in vars(type(recipe.build_task()))


def copy_sandbox() -> dict[str, bytes]:
    """Return name in the copy -> content of the modules of the sandbox."""
    files = [
        *sorted(_PACKAGE.glob("sandbox/**/*.py")),
        *(_PACKAGE / "core" / f"{name}.py" for name in _SANDBOX_CORE),
    ]
    copied = {str(file.relative_to(_PACKAGE)): file.read_bytes() for file in files}
    return {"__init__.py": b"", **copied}


def find_task_file(recipe: Recipe) -> Path | None:
    """Return the file of an own task, of which the export has a copy; None for other tasks."""
    return Path(split_task_file(recipe.task)[0]) if is_task_file(recipe.task) else None


def _start_bundle(recipe: Recipe) -> tuple[Bundle, dict[str, str]]:
    """Return the functions that score completions, and the settings that they need."""
    if is_task_file(recipe.task):
        _, name = split_task_file(recipe.task)
        parts = {"TRAINING": recipe.training, "SANDBOX": _hide(recipe.sandbox), "DATA": recipe.data}
        settings = {key: f"{key} = {value!r}" for key, value in parts.items()}
        settings["TASK"] = f'TASK = "{TASK_COPY}:{name}"'
        installed = {module: module for module in (_SETTINGS, _TASK_FILES)}
        return Bundle({f"{GLUE}.task_scores": f"{GLUE}.own_task"}, installed), settings
    with_programs = runs_programs(recipe)
    bundle = Bundle(
        {f"{GLUE}.no_programs": f"{GLUE}.programs"} if with_programs else {},
        {SANDBOX: f"{SANDBOX_COPY}.sandbox" if with_programs else None, _SETTINGS: None},
    )
    read = {*(reward.name for reward in recipe.rewards)}
    read |= {condition.on for condition in recipe.shaping.conditions.values()}
    rewards = [reward for reward in recipe.build_task().judged_rewards if reward.name in read]
    partial = {reward.name: reward.partial for reward in rewards if reward.partial is not None}
    uses_partial = recipe.shaping.partial_credit
    sandbox = ", ".join(f"{k}={v!r}" for k, v in _hide(recipe.sandbox).model_dump().items())
    settings = {
        "SCORES": _add_functions(bundle, "SCORES", {r.name: r.score for r in rewards}),
        "PARTIAL_SCORES": _add_functions(bundle, "PARTIAL_SCORES", partial if uses_partial else {}),
        "LENGTH_LIMIT": f"LENGTH_LIMIT = {recipe.training.length_limit}",
        "SANDBOX": f"SANDBOX = SimpleNamespace({sandbox})",
    }
    return bundle, settings


def _add_functions(
    bundle: Bundle, setting: str, functions: Mapping[str, Callable[..., object]]
) -> str:
    """Add functions to a bundle, and return the definition of their table."""
    for function in functions.values():
        bundle.add(function.__module__, function.__name__)
    entries = ", ".join(f'"{name}": {each.__name__}' for name, each in functions.items())
    return f"{setting} = {{{entries}}}"


def _hide(sandbox: SandboxSettings) -> SandboxSettings:
    """Return settings of a sandbox without the credentials of a service."""
    return sandbox.replace(url=drop_credentials(sandbox.url))


def _describe(recipe: Recipe) -> str:
    weights = "\n".join(f"    {reward.name} {reward.weight:.6g}" for reward in recipe.rewards)
    return f"""Rewards of {recipe.note}.

Their weights, which the configuration beside this file has, too:

{weights}

Written by gdpo_tune. The functions are copies of those of its task `{Path(recipe.task).name}`.
"""
