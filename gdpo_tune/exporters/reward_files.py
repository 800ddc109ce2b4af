"""`rewards.py` of an export, the copy of this package that it imports, and a custom task."""

from __future__ import annotations

from pathlib import Path

from gdpo_tune.core.content import find_modules
from gdpo_tune.core.settings import DataSettings
from gdpo_tune.core.task_files import is_task_file, split_task_file
from gdpo_tune.exporters.library import MODULES, REWARDS_FILE, TrainingFiles
from gdpo_tune.exporters.training_setup import TrainingSetup

TASK_COPY = "task.py"
"""Copy of the file of a custom task, whose own name may be one that the export needs."""
NEIGHBOURS = "task_modules"
"""Directory of an export with the modules that a custom task imports."""
ROOMS = (
    *("__init__.py", "rewards.py", "core/*.py", "policies/*.py", "sandbox/**/*.py", "tasks/*.py"),
    *("exporters/__init__.py", "exporters/runtime*.py"),
)
"""Files of this package that score completions and make prompts; they import no others of it."""
_PACKAGE = Path(__file__).parents[1]
FIND_MODULES = f"""import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# First, since another version of the package may be installed.
sys.path.insert(0, str(HERE / "{MODULES}"))

import {_PACKAGE.name}

if not Path({_PACKAGE.name}.__file__).is_relative_to(HERE):
    raise ImportError(
        f"{{{_PACKAGE.name}.__file__}} was imported before, and may score otherwise than the copy "
        f"in {{HERE}}: import this file first, or in another process"
    )
"""
"""Source of a program of an export, above what it imports from the copy."""


def build_reward_files(setup: TrainingSetup, training: TrainingFiles) -> dict[str, bytes]:
    """Return name in the export -> content of `rewards.py` and of what it imports."""
    sources = sorted(file for pattern in ROOMS for file in _PACKAGE.glob(pattern))
    files = {
        f"{MODULES}/{file.relative_to(_PACKAGE.parent)}": file.read_bytes() for file in sources
    }
    files[REWARDS_FILE] = _format_rewards(setup, training).encode()
    if not is_task_file(setup.spec.task):
        return files
    task_file = Path(split_task_file(setup.spec.task)[0])
    files[TASK_COPY] = task_file.read_bytes()
    for module in find_modules(task_file)[0]:
        places = [p for p in (task_file.parent, Path.cwd()) if module.is_relative_to(p)]
        if places and module != task_file:
            name = module.relative_to(places[0]).as_posix()
            files.setdefault(f"{NEIGHBOURS}/{name}", module.read_bytes())
    return files


def _format_rewards(setup: TrainingSetup, training: TrainingFiles) -> str:
    # Scoring reads no data, whose place may name a person; a custom task may read it.
    task, data, above = repr(setup.spec.task), DataSettings(), ""
    if is_task_file(setup.spec.task):
        task = f'f"{{HERE}}/{TASK_COPY}:{split_task_file(setup.spec.task)[1]}"'
        data, why = setup.spec.data, "last, so that they hide no others"
        above = f'sys.path.append(str(HERE / "{NEIGHBOURS}"))  # {why}\n'
    weights = {reward.name: reward.weight for reward in setup.rewards}
    shown = "\n".join(f"    {name} {weight:.6g}" for name, weight in weights.items())
    text = f"""Rewards of {setup.note}.

Their weights, which the configuration beside this file has, too:

{shown}

Written by gdpo_tune, whose task `{Path(setup.spec.task).name}` computes them here as in training.
What it needs of the package is in `{MODULES}`.
"""
    return f"""{format_docstring(text)}

{FIND_MODULES}
from gdpo_tune.core.settings import DataSettings, HeldOutData, SandboxSettings, TrainingSettings
from gdpo_tune.exporters.runtime import {", ".join(("RewardScorer", *training.imports))}

{above}SCORER = RewardScorer(
    task={task},
    training={setup.spec.training!r},
    sandbox={setup.spec.sandbox!r},
    data={data!r},
    params={setup.params!r},
    scoring={setup.spec.scoring!r},
    weights={weights},
)
{training.ending}
"""


def format_docstring(text: str) -> str:
    """Return a text as a docstring, although a path in it may hold what ends one."""
    return '"""' + text.replace("\\", "/").replace('"', "'") + '"""'
