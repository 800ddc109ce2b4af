"""Write an export: the configuration, rewards, prompts, and a page of what differs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gdpo_tune.core.content import list_policy_files
from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.files import explain_write_errors, write_atomically
from gdpo_tune.core.registry import EXPORTERS, POLICIES, load
from gdpo_tune.exporters.differences import Difference, list_library_differences
from gdpo_tune.exporters.library import POLICY_COPY, PROMPTS_FILE, START, Exported
from gdpo_tune.exporters.page import PAGE, format_page
from gdpo_tune.exporters.reward_files import build_reward_files
from gdpo_tune.exporters.training_prompts import (
    REFERENCE_FILE,
    ExportedPrompts,
    build_reference_files,
    collect_prompts,
    format_prompts,
)
from gdpo_tune.exporters.training_setup import TrainingSetup, build_training_setup
from gdpo_tune.policies.load_policy import describe_policy
from gdpo_tune.policies.prompt_format import CLOCK, FIXED_DATE, TEMPLATE_FILE
from gdpo_tune.results.retrain import TrainingRequest

RUN = "run.sh"
INSTALL_MATH_VERIFY = "pip install 'math-verify[antlr4_13_2]'"
"""Command for the package that compares math answers; no training library depends on it."""
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
    base_model: str = "",
) -> tuple[Exported, Path]:
    """Write a training for a library; return the export and the directory that holds it.

    `policy` is what `from_pretrained` takes for the policy of the spec, where there is no start;
    `base_model` names it where it is trained. Default of `directory`:
    `<storage>/<name>-<which>-<library>`. `references_data` writes a program for the prompts.

    Raises:
        ExportError: the library cannot reproduce the training exactly, or there is no merge.
        UsageError: the directory cannot be written, or holds a file that was edited.
        DataError, PolicyError: the prompts, or the policy's tokenizer, cannot be used.
    """
    start = request.start
    if request.spec.start and not start and not base_model and library not in MERGERS:
        fix = "export a candidate of a sweep, or name that policy with --base-model"
        reason = f"start: no sweep has trained the policy at which this begins\n    fix: {fix}"
        raise UsageError(f"{request.note}: {reason}")
    if request.spec.model.revision:
        describe_policy(request.spec.policy, request.spec.model.revision)  # the Hub may have none
    ships = request.spec.policy in POLICIES and library not in MERGERS and not base_model
    own = POLICY_COPY if ships else str(start.absolute()) if start else policy
    setup = build_training_setup(request, base_model or own)
    exported = build_export(library, setup)
    if setup.spec.task == "math" and exported.training is not None:
        exported = replace(exported, install=f"{exported.install} && {INSTALL_MATH_VERIFY}")
    default = request.spec.output_directory / f"{setup.name}-{library}"
    directory = directory or default.expanduser()
    run = format_run_script(setup, exported, references_data=references_data)
    files = {exported.file: exported.text.encode(), RUN: run.encode()}
    if exported.training is not None:
        files |= build_reward_files(setup, exported.training)
        files |= {name: text.encode() for name, text in exported.training.others.items()}
        if references_data:
            files |= build_reference_files(setup, exported.training)
        else:
            prompts = collect_prompts(setup)
            files[PROMPTS_FILE] = format_prompts(prompts, setup, exported.training)
            rows = list_prompt_differences(prompts, setup, exported)
            exported = replace(exported, differences=[*exported.differences, *rows])
            if rows and prompts.reader is not None and prompts.reader.template is not None:
                files[TEMPLATE_FILE] = prompts.reader.template.encode()
    if ships:
        copied = list_policy_files(start) if start else POLICIES[request.spec.policy].iterdir()
        files |= {f"{POLICY_COPY}/{file.name}": file.read_bytes() for file in copied}
    page = format_page(setup, exported, references_data=references_data)
    write_files(directory, {**files, PAGE: page.encode()})
    return exported, directory


def build_export(library: str, setup: TrainingSetup) -> Exported:
    """Return the files of a library, with what it does differently.

    Raises:
        ExportError: the library cannot reproduce the training exactly.
    """
    exported: Exported = load(EXPORTERS[library])(setup)
    return replace(exported, differences=list_library_differences(library, setup))


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


def format_run_script(setup: TrainingSetup, exported: Exported, *, references_data: bool) -> str:
    """Return the program that starts the library."""
    make = f"test -f {PROMPTS_FILE} || python {REFERENCE_FILE}\n" if references_data else ""
    check_path = CHECK_PATH if "PYTHONPATH" in exported.run else ""
    return f"""#!/usr/bin/env bash
# {setup.name} in {exported.library}: {exported.start}
# Arguments are passed on to the library. It has to be installed: {exported.install}
set -euo pipefail
here="$(dirname -- "${{BASH_SOURCE[0]}}")"
CDPATH='' cd -- "$here"
{check_path}{_format_version_check(exported)}{make}{exported.run}
"""


def _format_version_check(exported: Exported) -> str:
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
    prompts: ExportedPrompts, setup: TrainingSetup, exported: Exported
) -> list[Difference]:
    """Return what may differ in the prompts, where the policy's own template reads them."""
    reader, rows = prompts.reader, list[Difference]()
    if reader is None:
        ours = f"prompts above {setup.spec.data.max_prompt_length} tokens are left out"
        theirs = (
            f"the tokenizer of {setup.spec.policy} is not on this machine: every prompt is in the "
            "file, and the policy is taken to have a chat template"
        )
        return [Difference("prompts", ours, theirs)]
    if exported.training is not None and exported.training.reads_as_trained:
        return []
    fix = "remove it from the post-processor of the tokenizer"
    if reader.own_template:
        fix = f"copy `{TEMPLATE_FILE}` of this directory to the policy's"
    if end := reader.find_left_out():
        ours = f"without the `{end}` that its tokenizer writes"
        theirs = f"with `{end}`, which completions then lack, also for rewards of the format: {fix}"
        rows.append(Difference("end of a prompt", ours, theirs))
    if CLOCK in reader.own_template:
        theirs = f"that of the day on which it trains: {fix}"
        rows.append(Difference("date in a prompt", reader.date or FIXED_DATE, theirs))
    if reader.template_kwargs and "chat_template_kwargs:" not in exported.text:
        ours = ", ".join(f"{k}: {json.dumps(v)}" for k, v in reader.template_kwargs.items())
        theirs = f"the defaults of the chat template: {fix}"
        rows.append(Difference("arguments of the chat template", ours, theirs))
    return rows
