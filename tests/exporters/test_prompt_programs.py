"""Programs for the prompts of an export: they run where this package is not installed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.export import export_folder, run_in_export
from tests.support.paths import ROOT

TOOLRL = (
    f"data.source={ROOT / 'tests/data/toolrl.jsonl'}",
    "data.layout=toolrl",
    "training.train_prompts=3",
    "training.validation_prompts=2",
    "training.test_prompts=2",
)
TASKS = {
    "mbpp": "code",
    "humaneval": "code",
    "apps": "code",
    "code_contests": "code",
    "gsm8k": "math",
    "math": "math",
}
"""Layout -> its task."""
SLOW = {"apps", "code_contests", "humaneval", "math", "mbpp"}
"""Layouts with a neighbour of the same kind in the quick suite: each program takes seconds."""


def run_reference(directory, *arguments):
    program = """
import runpy, sys
sys.modules["gdpo_tune"] = None  # as where it is not installed
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    command = [sys.executable, "-c", program, "make_prompts.py", *arguments]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)


def test_referenced_prompts_are_those_that_would_be_copied(tmp_path):
    copied, referenced = tmp_path / "copied", tmp_path / "referenced"
    export_folder(copied, *TOOLRL, space="tools")
    export_folder(referenced, *TOOLRL, space="tools", references_data=True)
    assert not (referenced / "prompts.parquet").exists()
    assert "|| python make_prompts.py" in (referenced / "run.sh").read_text()
    done = run_reference(referenced)
    assert done.returncode == 0, done.stderr
    made = referenced / "prompts.parquet"
    assert made.read_bytes() == (copied / "prompts.parquet").read_bytes()


def test_other_data_than_those_of_the_trial_are_refused(tmp_path):
    export_folder(tmp_path, *TOOLRL, space="tools", references_data=True)
    other = tmp_path / "other.jsonl"
    lines = (ROOT / "tests/data/toolrl.jsonl").read_text().splitlines()
    other.write_text("\n".join(lines[:2]))
    done = run_reference(tmp_path, str(other))
    assert done.returncode == 1
    assert "does not hold the 3 prompts of the training" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_columns_of_another_layout_are_named(tmp_path):
    export_folder(tmp_path, *TOOLRL, space="tools", references_data=True)
    done = run_reference(tmp_path, str(ROOT / "tests/data/mbpp.jsonl"))
    assert "no column prompt, reward_model" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_program_without_the_hub_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    elsewhere = ("data.source=someone/data", "policy=someone/policy")
    export_folder(tmp_path, *TOOLRL, *elsewhere, space="tools", references_data=True)
    done = run_reference(tmp_path)
    assert "fix: python make_prompts.py FILE, with a copy" in done.stderr
    done = run_reference(tmp_path, str(ROOT / "tests/data/toolrl.jsonl"))
    assert "cannot be loaded: " in done.stderr
    assert "as policy= in make_prompts.py" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in TASKS],
)
def test_the_program_for_a_layout_makes_the_prompts_of_the_trial(tmp_path, layout):
    copied, referenced = tmp_path / "copied", tmp_path / "referenced"
    changes = (
        f"data.source={ROOT / f'tests/data/{layout}.jsonl'}",
        f"data.layout={layout}",
        "training.train_prompts=1",
        "training.validation_prompts=2",
        "training.test_prompts=2",
    )
    export_folder(copied, *changes, space=TASKS[layout])
    export_folder(referenced, *changes, space=TASKS[layout], references_data=True)
    done = run_reference(referenced)
    assert done.returncode == 0, done.stderr
    made = (referenced / "prompts.parquet").read_bytes()
    assert made == (copied / "prompts.parquet").read_bytes()


def test_the_program_follows_columns_template_and_own_splits(tmp_path):
    lines = [f"No. {i}?,Think.,{i}\n" for i in range(40)]
    (tmp_path / "rows.csv").write_text("".join(["Ask,Note,gold\n", *lines]))
    rows = ({"Ask": f"No. {i}?", "Note": "Think.", "gold": i} for i in range(36, 50))
    (tmp_path / "test.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    changes = (
        f"data.source={tmp_path / 'rows.csv'}",
        "data.layout=question_answer",
        "data.columns={answer: gold}",
        "data.prompt_template='{Note} {Ask}'",
        f"data.test={{source: {tmp_path / 'test.jsonl'}}}",
        "training.train_prompts=20",
        "training.validation_prompts=2",
        "training.test_prompts=10",
    )
    export_folder(tmp_path / "export", *changes, space="math", references_data=True)
    program = """
import json
from make_prompts import QUESTION_ANSWER, SOURCE
from gdpo_rewards.tasks.data_rows import collect_problems
train = collect_problems(SOURCE.data, QUESTION_ANSWER).splits["train"]
print(json.dumps([problem.prompt for problem in train]))
"""
    prompts = run_in_export(tmp_path / "export", program, [])
    assert "Think. No. 3?\n" in prompts
    assert "Think. No. 36?\n" not in prompts
