"""Every command of README and of the pages that it leads to, on the sweep that README makes.

The sweep is that of `search_spaces/code.yaml` with its own division of a budget: a small budget
here, the whole one under `slow`. What cannot run as it stands is in a table with the reason.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from gdpo_tune.core.registry import POLICIES
from gdpo_tune.results.open_sweep import find_sweep
from tests.commands.test_commands import check_outputs
from tests.support.connections import list_foreign_hosts, record_connections
from tests.support.paths import ROOT

DOCS = (
    *("comparison", "importance", "notebook", "export", "merging", "steering"),
    *("policies", "report"),
)
PAGES = ("README.md", *(f"docs/{name}.md" for name in DOCS))
QUICK_PAGES = tuple(page for page in PAGES if page not in ("docs/merging.md", "docs/policies.md"))
"""Those whose commands start no further trainings and merges than README's own."""
COMMAND = re.compile(
    r"^ {4}(?:[^\n]* && )?(python -m gdpo_tune\.[^\n]*?)(?: +#[^\n]*)?$"
    r"|`((?:python -m gdpo_tune\.|gdpo-tune )[^`]*)`|^```python\n(.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
SWEEP = "python -m gdpo_tune.sweep search_spaces/code.yaml"
NOT_RUN = {
    SWEEP: "the fixture runs it",
    "gdpo-tune COMMAND": "no command",
    "python -m gdpo_tune.COMMAND": "no command",
    "python -m gdpo_tune.train my.yaml --seed 3": "the reader's own file",
    "python -m gdpo_tune.evaluate trained/elsewhere runs/code": "what another library trained",
    "python -m gdpo_tune.watch runs/code": "serves a page until Ctrl-C",
    "python -m gdpo_tune.schedule sweeps/ serve": "runs until Ctrl-C",
}
REFUSED = {
    "python -m gdpo_tune.steer runs/code stop 7": "has finished",
    "python -m gdpo_tune.steer runs/code clone 7 learning_rate=2e-4": "has finished",
    'steer.request("clone"': "has finished",
}
"""Text of what asks a running sweep -> part of the error that says that this one has finished."""
NAMED = {
    "runs/gdpo runs/grpo": "runs/code runs/longer",
    ":merge-27": ":{merge}",
    ":3 ": ":{trial} ",
    "3=0.3,5@30=0.7": "{trial}=0.3,{other}=0.7",
}
"""Text in commands -> what names something that this sweep has."""
SMALLER = {
    "--name longer --set search.budget.completions=179200": "--name longer --dry-run",
    "--steps 500": "--steps 2",
    "length >= 0.5 and format >= 0.9": "length >= 0.1 and format >= 0.1",
    "length >= 0.6": "length >= 0.3",
    "format >= 0.8": "format >= 0.3",
}
"""Text in commands -> what a sweep with a small budget affords and reaches."""
SMALL = {
    "search.budget.completions": 1600,
    "training.completions_per_step": 16,
    "training.validation_prompts": 16,
    "training.test_prompts": 16,
}
RUN_EACH = """
import contextlib, io, json, sys, traceback
from importlib import import_module
from gdpo_tune import cli
results, names, (_, path, asked) = [], {}, sys.argv
for module, words in json.loads(asked):
    said, status = io.StringIO(), 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            if module == "python":
                exec(words[0], names)
            elif module == "gdpo-tune":
                sys.argv = [module, *words]
                cli.main()
            else:
                cli.run_command(import_module(module).main, words)
        except SystemExit as end:
            status = int(end.code or 0)
        except BaseException:
            status = 2
            traceback.print_exc(file=said)
    results.append((status, said.getvalue()))
with open(path, "w") as file:
    json.dump(results, file)
"""


def list_commands(page):
    """List the commands of a page, and its Python blocks, each once."""
    found = COMMAND.findall((ROOT / page).read_text())
    return list(dict.fromkeys("".join(match).strip() for match in found))


def split_command(text):
    """Return `python` and code, or the name of a module, or `gdpo-tune`, and arguments."""
    if "\n" in text or not text.startswith(("python -m", "gdpo-tune")):
        return "python", [text]
    words = shlex.split(text)
    return (words[2], words[3:]) if words[0] == "python" else (words[0], words[1:])


def test_the_tables_name_what_stands_in_the_pages():
    text = "\n".join(command for page in PAGES for command in list_commands(page))
    assert text.count("python -m gdpo_tune.") > 30
    for name in (*NOT_RUN, *REFUSED, *NAMED, *SMALLER):
        assert name in text, name


def make_sweep(directory, settings):
    """Run README's sweep beside the shipped files, and write a file of fixed values."""
    for name in ("search_spaces", "sweeps"):
        shutil.copytree(ROOT / name, directory / name)
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, *shlex.split(SWEEP)[1:], *words]
    environment = record_connections(directory)
    first, second = (
        subprocess.run(
            command, cwd=directory, env=environment, check=True, capture_output=True, text=True
        ).stdout
        for _ in range(2)
    )
    runs = check_outputs(directory, "code", first)
    assert {"merge", "replicate"} <= {run.data.tags["role"] for run in runs}
    assert "finished" in second, "it starts nothing"
    # falco#943, aim#2539, vllm#2206: cloud metadata, telemetry and DNS that nobody asked for
    assert not list_foreign_hosts(directory)
    space = "{normalization: gdpo, group_size: 8, learning_rate: 1e-4, reward_weights: {"
    fixed = f"extends: search_spaces/code.yaml\nspace: {space}format: 1, length: 1}}}}\n"
    (directory / "fixed.yaml").write_text(fixed)


def find_names(sweep):
    """Return a trial and a checkpoint, or another trial, that exist, and a merge of such."""
    ends = [r for r in sweep.records if r.is_training and r.checkpoint]
    merges = [r.name for r in sweep.front.records if r.role == "merge" and r.checkpoint]
    return {"trial": ends[0].number, "other": ends[1].number, "merge": merges[0]}


def run_page(page, directory, changes, done):
    """Run the commands of a page; return a line for each that has not done what the page says.

    A command of an earlier page is `done`.
    """
    commands = [c for c in list_commands(page) if c not in NOT_RUN and c not in done]
    done |= {command for command in commands if command.startswith("python -m")}
    asked = []
    for command in commands:
        text = command
        for before, after in changes.items():
            text = text.replace(before, after)
        asked.append(split_command(text))
    place = directory / "runs" / "code-knee-verl" / "converted"
    shutil.rmtree(directory / "runs" / "code-knee-verl", ignore_errors=True)
    if any("--collect" in words for _, words in asked):  # what the library would have trained
        shutil.copytree(POLICIES["embedded"], place)
    answers = directory / "answers.json"
    driver = [sys.executable, "-c", RUN_EACH, str(answers), json.dumps(asked)]
    subprocess.run(driver, cwd=directory, check=True, capture_output=True)
    wrong = []
    for command, (status, said) in zip(commands, json.loads(answers.read_text()), strict=True):
        expected = next((part for text, part in REFUSED.items() if text in command), "")
        if status != (2 if expected else 0) or expected not in said:
            wrong.append(f"{page}: {command}\n{status}: {said[-1500:]}")
    return wrong


def check_pages(directory, settings, pages, changes, monkeypatch):
    make_sweep(directory, settings)
    monkeypatch.chdir(directory)
    names = {
        text: after.format(**find_names(find_sweep("runs/code"))) for text, after in NAMED.items()
    }
    if settings:
        shutil.copytree(directory / "runs" / "code", directory / "runs" / "longer")
    changes, done = {**names, **changes}, set()
    wrong = [line for page in pages for line in run_page(page, directory, changes, done)]
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.system
@pytest.mark.integration
def test_commands_work_on_a_small_sweep_of_the_shipped_file(tmp_path, monkeypatch):
    words = " ".join(f"--set {key}={value}" for key, value in SMALL.items())
    changes = {**SMALLER, f"{SWEEP} ": f"{SWEEP} {words} "}
    check_pages(tmp_path, SMALL, QUICK_PAGES, changes, monkeypatch)


@pytest.mark.slow
@pytest.mark.integration
def test_commands_work_on_the_whole_sweep(tmp_path, monkeypatch):
    check_pages(tmp_path, {}, PAGES, {}, monkeypatch)
