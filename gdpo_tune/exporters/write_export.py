"""Write an export: the configuration, rewards, prompts, and a page of what differs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from gdpo_tune.core.errors import ExportError, SpecProblem, UsageError
from gdpo_tune.core.files import explain_write_errors, write_atomically
from gdpo_tune.core.registry import EXPORTERS, POLICIES, load
from gdpo_tune.exporters.differences import Difference, list_differences
from gdpo_tune.exporters.library import POLICY_COPY, PROMPTS_FILE, START, Exported, TrainingFiles
from gdpo_tune.exporters.page import PAGE, format_page
from gdpo_tune.exporters.prompts import (
    REFERENCE_FILE,
    ExportedPrompts,
    build_reference_files,
    collect_prompts,
    format_prompts,
)
from gdpo_tune.exporters.recipe import Recipe, build_recipe
from gdpo_tune.exporters.reward_files import build_reward_files
from gdpo_tune.results.parents import explain_merge
from gdpo_tune.results.retrain import TrainingRequest

RUN = "run.sh"
CHECK_PATH = """if [[ "$PWD" == *:* ]]; then
    echo "PYTHONPATH cannot name $PWD: move it to a place without a colon" >&2
    exit 2
fi
"""
"""Lines of a shell that refuse a directory where Python would not find the modules."""
MERGERS = ("mergekit",)
"""Libraries that merge policies; all others train one."""


def export_training(
    request: TrainingRequest,
    library: str,
    policy: str,
    directory: Path | None = None,
    *,
    references_data: bool = False,
) -> tuple[Exported, Path]:
    """Write a training for a library; return the export and the directory that holds it.

    `library` is a key of `registry.EXPORTERS`; `policy` is the argument of `from_pretrained` for
    the policy of the spec. Default of `directory`: `<storage>/<name>-<which>-<library>`.
    `references_data` writes a program for the prompts in place of the prompts.

    Raises:
        ExportError: the library would change or ignore a part of the training; or it trains, and
            this is a merge.
        UsageError: the directory cannot be written, or holds a file that was edited.
        DataError, PolicyError: the prompts, or the policy's tokenizer, cannot be used.
    """
    if request.parents and library not in MERGERS:
        command = f"python -m gdpo_tune.export {{}} --to {library}"
        reason, fix = explain_merge(request.name, request.parents, request.sweep, command)
        raise ExportError(library, (SpecProblem(request.sweep, "", "", reason, fix),))
    ships = request.spec.policy in POLICIES and library not in MERGERS
    recipe = build_recipe(request, POLICY_COPY if ships else policy)
    exported = export(library, recipe)
    default = request.spec.output_directory / f"{recipe.name}-{library}"
    directory = directory or default.expanduser()
    run = format_run(recipe, exported, references_data=references_data)
    files = {exported.file: exported.text.encode(), RUN: run.encode()}
    differences: Sequence[Difference] = ()
    if exported.training is not None:
        files |= build_reward_files(recipe, exported.training)
        files |= {name: text.encode() for name, text in exported.training.others.items()}
        if references_data:
            files |= build_reference_files(recipe, exported.training)
        else:
            prompts = collect_prompts(recipe)
            files[PROMPTS_FILE] = format_prompts(prompts, recipe, exported.training)
            differences = list_prompt_differences(prompts, recipe, exported.training)
    if ships:
        source = POLICIES[request.spec.policy]
        files |= {f"{POLICY_COPY}/{file.name}": file.read_bytes() for file in source.iterdir()}
    goals = request.spec.list_objectives()
    page = format_page(recipe, exported, goals, differences, references_data=references_data)
    write_files(directory, {**files, PAGE: page.encode()})
    return exported, directory


def export(library: str, recipe: Recipe) -> Exported:
    """Return a recipe as the files of a library, with what the library does differently.

    Raises:
        ExportError: the library would change or ignore a part of it.
    """
    exported: Exported = load(EXPORTERS[library])(recipe)
    if exported.training is None:
        return exported
    return replace(exported, differences=list_differences(library, recipe))


def write_files(directory: Path, files: Mapping[str, bytes]) -> None:
    """Write files by their names, all or, where one exists with other content, none.

    Raises:
        UsageError: the directory cannot be written, or holds a file that was edited.
    """
    with explain_write_errors("the export"):
        for name, content in files.items():
            _check_place(directory, name, content)
        for name, content in files.items():
            file = directory / name
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, content)
            if name == RUN:
                file.chmod(0o755)


def _check_place(directory: Path, name: str, content: bytes) -> None:
    """Refuse a place of a file that holds something else.

    Raises:
        UsageError: it does, or a directory above it cannot be one.
    """
    file = directory / name
    present = [above for above in file.parents if above.is_symlink() or above.exists()]
    if present and not present[0].is_dir():
        held = f"{present[0]} is no directory"
    elif not file.exists():
        return
    elif not file.is_file() or file.read_bytes() != content:
        held = f"{file} exists with other content: another export, or your changes"
    else:
        return
    raise UsageError(f"{held}\n    fix: choose another directory with --out, or move that away")


def format_run(recipe: Recipe, exported: Exported, *, references_data: bool) -> str:
    """Return the program that starts the library."""
    make = f"test -f {PROMPTS_FILE} || python {REFERENCE_FILE}\n" if references_data else ""
    check_path = CHECK_PATH if "PYTHONPATH" in exported.run else ""
    return f"""#!/usr/bin/env bash
# {recipe.name} in {exported.library}: {exported.start}
# Arguments are passed on to the library. It has to be installed: {exported.install}
set -euo pipefail
here="$(dirname -- "${{BASH_SOURCE[0]}}")"
CDPATH='' cd -- "$here"
{check_path}{_format_version_check(exported)}{make}{exported.run}
"""


def _format_version_check(exported: Exported) -> str:
    """Return the lines that refuse another version of a library that is a package."""
    package = re.search(r"([\w.-]+)(?:\[[\w,-]+\])?==([\w.]+)", exported.install)
    if package is None:
        return ""
    return f"""test -n "${{ANY_VERSION:-}}" || python - {package[1]} {package[2]} <<'PYTHON'
import sys
from importlib.metadata import PackageNotFoundError, version

name, wanted = sys.argv[1:]
try:
    found = version(name)
except PackageNotFoundError:
    sys.exit(f"{{name}} is not installed for {{sys.executable}}: {exported.install}")
if found.split(".")[:2] != wanted.split(".")[:2]:
    sys.exit(
        f"{{name}} {{found}} is installed, and this export is for {{wanted}}: its keys may lack "
        "there or have another meaning. {exported.install}, or ANY_VERSION=1 {START}"
    )
PYTHON
"""


def list_prompt_differences(
    prompts: ExportedPrompts, recipe: Recipe, training: TrainingFiles
) -> list[Difference]:
    """Return what may differ in the prompts, whatever the library."""
    if prompts.reader is not None:
        opened = prompts.reader.find_opened_tag()
        if not opened or training.strips_opened_tag:
            return []
        ours = f"without the `{opened}` that the chat template writes: the policy writes it itself"
        theirs = (
            f"with `{opened}`, which completions then lack, so that a reward of the format fails: "
            "remove it from the chat template"
        )
        return [Difference("end of a prompt", ours, theirs)]
    ours = f"prompts above {recipe.data.max_prompt_length} tokens are left out"
    theirs = (
        f"the tokenizer of {recipe.policy_name} is not on this machine: every prompt is in the "
        "file, and the policy is taken to have a chat template"
    )
    return [Difference("prompts", ours, theirs)]
