"""Programs for the prompts of an export, which run where this package is not installed.

Most tests run the program in this process.
"""

import json
import subprocess
import sys

import pytest

from gdpo_tune.tasks.dataset import collect_data
from tests.support.export import copied_modules, export_folder, read_prompts
from tests.support.paths import ROOT

TASKS = {
    **dict.fromkeys(("mbpp", "humaneval", "apps", "code_contests"), "code"),
    **dict.fromkeys(("gsm8k", "math"), "math"),
    "toolrl": "tools",
}
"""Layout -> its task."""


def list_overrides(layout, count=1):
    return (
        *(f"data.source={ROOT / f'tests/data/{layout}.jsonl'}", f"data.layout={layout}"),
        f"training.train_prompts={count}",
        *("training.validation_prompts=2", "training.test_prompts=2"),
    )


@pytest.fixture
def run_program(monkeypatch):
    """Return a function that runs the program of a directory with arguments; it returns names."""

    def run(directory, *arguments, name="__main__"):
        file = directory / "make_prompts.py"
        monkeypatch.chdir(directory)
        monkeypatch.setattr(sys, "argv", [file.name, *map(str, arguments)])
        names = {"__name__": name, "__file__": str(file)}
        with copied_modules(directory):
            exec(file.read_text(), names)
        return names

    return run


@pytest.fixture(scope="module")
def referenced(tmp_path_factory):
    """An export that refers to three rows of ToolRL."""
    directory = tmp_path_factory.mktemp("referenced")
    export_folder(directory, *list_overrides("toolrl", 3), space="tools", references_data=True)
    return directory


@pytest.mark.system
@pytest.mark.parametrize("layout", ["toolrl", pytest.param("mbpp", marks=pytest.mark.slow)])
def test_a_program_needs_nothing_but_its_directory(tmp_path, layout):
    export_folder(tmp_path, *list_overrides(layout), space=TASKS[layout], references_data=True)
    assert not (tmp_path / "prompts.parquet").exists()
    assert "|| python make_prompts.py" in (tmp_path / "run.sh").read_text()
    command, alone = [sys.executable, "make_prompts.py"], {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, env=alone
    )
    assert done.returncode == 0, done.stderr
    assert read_prompts(tmp_path)


@pytest.mark.parametrize("layout", TASKS)
def test_referenced_prompts_are_those_that_would_be_copied(tmp_path, run_program, layout):
    copied, made, changes = tmp_path / "copied", tmp_path / "made", list_overrides(layout)
    export_folder(copied, *changes, space=TASKS[layout])
    export_folder(made, *changes, space=TASKS[layout], references_data=True)
    run_program(made)
    prompts = [(directory / "prompts.parquet").read_bytes() for directory in (copied, made)]
    assert prompts[0] == prompts[1]


def test_other_data_than_those_of_the_trial_are_refused(referenced, tmp_path, run_program):
    other = tmp_path / "other.jsonl"
    lines = (ROOT / "tests/data/toolrl.jsonl").read_text().splitlines()
    other.write_text("\n".join(lines[:2]))
    with pytest.raises(SystemExit, match="does not hold the 3 prompts of the training"):
        run_program(referenced, other)
    with pytest.raises(SystemExit, match="no column prompt, reward_model"):
        run_program(referenced, ROOT / "tests/data/mbpp.jsonl")


def test_a_program_without_the_hub_says_what_to_do(tmp_path, monkeypatch, run_program):
    def refuse(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr("gdpo_tune.exporters.training_prompts._ask_hub", lambda _: None)
    monkeypatch.setattr("datasets.load_dataset", refuse)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", refuse)
    elsewhere = ("data.source=someone/data", "policy=someone/policy")
    changes = (*list_overrides("toolrl"), *elsewhere)
    export_folder(tmp_path, *changes, space="tools", references_data=True)
    with pytest.raises(SystemExit, match=r"fix: python make_prompts.py FILE, with a copy"):
        run_program(tmp_path)
    with pytest.raises(SystemExit, match=r"cannot be loaded: (.|\n)*policy= in make_prompts.py"):
        run_program(tmp_path, ROOT / "tests/data/toolrl.jsonl")


def test_the_program_follows_columns_template_and_own_splits(tmp_path, run_program):
    lines = [f"No. {i}?,Think.,{i}\n" for i in range(40)]
    (tmp_path / "rows.csv").write_text("".join(["Ask,Note,gold\n", *lines]))
    rows = ({"Ask": f"No. {i}?", "Note": "Think.", "gold": i} for i in range(36, 50))
    (tmp_path / "test.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    changes = (
        *(f"data.source={tmp_path / 'rows.csv'}", "data.layout=question_answer"),
        *("data.columns={answer: gold}", "data.prompt_template='{Note} {Ask}'"),
        f"data.test={{source: {tmp_path / 'test.jsonl'}}}",
        *("training.train_prompts=20", "training.validation_prompts=2"),
        "training.test_prompts=10",
    )
    export_folder(tmp_path / "export", *changes, space="math", references_data=True)
    names = run_program(tmp_path / "export", name="make_prompts")
    train = collect_data(names["SOURCE"].data).splits["train"]
    prompts = [problem.prompt for problem in train]
    assert "Think. No. 3?\n" in prompts
    assert "Think. No. 36?\n" not in prompts
