"""mergekit: a YAML file for `mergekit-yaml`, which repeats a merge.

Source: mergekit/config.py, common.py and merge_methods/linear.py of mergekit 0.1.5, and
docs/merge_methods.md there.
"""

from __future__ import annotations

import json
from pathlib import Path
from shlex import quote

from gdpo_tune.core.errors import ExportError, SpecProblem
from gdpo_tune.core.object_store import is_url
from gdpo_tune.exporters import library
from gdpo_tune.exporters.library import Exported
from gdpo_tune.exporters.training_setup import TrainingSetup
from gdpo_tune.policies.adapters import DTYPE, read_initial_policy
from gdpo_tune.spec.document import dump_flow

LIBRARY = "mergekit 0.1.5"
COMMAND = "mergekit-yaml mergekit.yaml merged"
COMPUTED_IN = "float32"


def export_mergekit(setup: TrainingSetup) -> Exported:
    """Return a merge as mergekit's configuration.

    Raises:
        ExportError: there is nothing to merge, or the policy of a parent was not kept.
    """
    problems: list[SpecProblem] = []
    for parent in setup.request.parents:
        if not parent.policy:
            reason = f"the policy of {parent.source} was not kept"
            again = f"python -m gdpo_tune.train --from {quote(parent.source)}"
            fix = f"train it again: {again} (its weight is {parent.weight:g})"
            problems.append(SpecProblem(setup.note, "", "", reason, fix))
    if not setup.request.parents:
        reason = "this is one training, so there is nothing to merge"
        fix = "pick a merge, such as runs/code:merge-27, or export the training with --to trl"
        problems.append(SpecProblem(setup.note, "", "", reason, fix))
    if problems:
        raise ExportError(LIBRARY, tuple(problems))
    revision = {"revision": setup.spec.model.revision} if setup.spec.model.revision else {}
    written: set[str] = set()
    models: list[dict[str, object]] = []
    for parent in setup.request.parents:
        directory, model = Path(parent.policy), parent.policy
        reference: object = model
        if parent.is_adapter:
            reference = {"model": {"path": setup.policy, **revision}, "lora": {"path": model}}
        elif "@" in model or "+" in model:  # marks of a revision and of an adapter to mergekit
            reference = {"model": {"path": model}}
        models.append({"model": reference, "parameters": {"weight": parent.weight}})
        file = directory / "config.json"
        config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        dtype = config.get("dtype") or config.get("torch_dtype")
        written.add(str(dtype or read_initial_policy(directory, DTYPE) or COMPUTED_IN))
    has_adapters = any(parent.is_adapter for parent in setup.request.parents)
    command = COMMAND + (f" --lora-merge-dtype {COMPUTED_IN}" if has_adapters else "")
    settings: dict[str, object] = {
        "merge_method": "linear",
        "parameters": {"normalize": False},
        "dtype": COMPUTED_IN,
        "out_dtype": written.pop() if len(written) == 1 else COMPUTED_IN,
    }
    lines = ["models:", *(f"  - {dump_flow(model)}" for model in models)]
    return Exported(
        library=LIBRARY,
        file="mergekit.yaml",
        text=library.format_yaml(settings, setup.note, library.START) + "\n".join(lines) + "\n",
        install="pip install mergekit==0.1.5",
        run=f'exec {command} "$@"',
        result="merged",
        required_inputs={
            f"models[{index}].model": f"a directory with a copy of {parent.policy}"
            for index, parent in enumerate(setup.request.parents)
            if is_url(parent.policy)
        },
    )
