"""Odd names, rows and places of an exported folder."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
from dataclasses import replace

import pytest

from gdpo_tune import export
from gdpo_tune.core.errors import DataError, UsageError
from gdpo_tune.exporters.write_export import export_training, format_run_script
from gdpo_tune.results.retrain import build_request_from_file
from tests.support.export import export_folder, export_to, make_recipe, read_prompts, run_in_export

TASK = """
from gdpo_tune.tasks.custom import RewardFunctionTask
{imports}

def right(completions, answer, **_):
    return [float(wanted in text) for wanted, text in zip(answer, completions)]

def {second}(lengths, **_):
    return [float(length <= 4) for length in lengths]

class Sums(RewardFunctionTask):
    reward_funcs = [right, {second}]

    def rows(self):
        return [
            {{"prompt": f"{{a}}+{{b}}=", "answer": str(a + b), "more": {more}}}
            for a in range(30)
            for b in range(30)
        ]
"""
SPACE = """
policy: embedded_math
objectives: {{right: {{direction: maximize, reference: 0}}}}
space: {{normalization: gdpo, group_size: 8, learning_rate: 1e-5,
        reward_weights: {{right: 1, {second}: 0.5}}}}
training: {{train_prompts: 20, validation_prompts: 8, test_prompts: 8}}
"""
ROWS = [{"question": f"What is {n} plus 1?", "answer": f"#### {n + 1}"} for n in range(60)]
GSM8K = ("data.layout=gsm8k", "training.validation_prompts=2", "training.test_prompts=2")


def export_own_task(directory, file="sums.py", second="short", more="0", imports=""):
    """Export a task in a file, and return the folder."""
    (directory / file).write_text(TASK.format(second=second, more=more, imports=imports))
    space, task = directory / "space.yaml", json.dumps(f"{directory / file}:Sums")
    space.write_text(f"task: {task}{SPACE.format(second=second)}")
    export_training(build_request_from_file(space, []), "trl", "", directory / "out")
    return directory / "out"


SCORE_OWN = """
import json, sys
import rewards
problem, expected = json.load(sys.stdin)
for name, value in expected.items():
    assert getattr(rewards, f"{name}_reward")([""], [[1]], [problem]) == [value]
print(json.dumps(rewards.SCORER.score([problem], ["no"], [4])))
"""


def score_own_task(out, second="short"):
    """Return what the directory's rewards give for a wrong completion of 4 tokens."""
    batch = read_prompts(out)[0]["problem"], {"right": 0.0, second: 1.0}
    return run_in_export(out, SCORE_OWN, batch)


@pytest.mark.parametrize(
    ("file", "second"), [("rewards.py", "short"), ("my\"'new\nline.py", "judge")]
)
def test_a_task_file_and_a_reward_may_have_any_name(tmp_path, file, second):
    out = export_own_task(tmp_path, file, second)
    assert score_own_task(out, second) == {"right": [0.0], second: [1.0]}
    assert (out / "task.py").read_bytes() == (tmp_path / file).read_bytes()
    assert "files that your task reads, which are not here" in (out / "DIFFERENCES.md").read_text()


def test_modules_beside_a_task_come_along(tmp_path, monkeypatch):
    (tmp_path / "near_a_task.py").write_text("from parts_of_a_task.one import number\n")
    (tmp_path / "parts_of_a_task").mkdir()
    (tmp_path / "parts_of_a_task" / "__init__.py").write_text("")
    (tmp_path / "parts_of_a_task" / "one.py").write_text("from json import dumps as number\n")
    (tmp_path / "unused.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    out = export_own_task(tmp_path, imports="import json, near_a_task")
    assert score_own_task(out) == {"right": [0.0], "short": [1.0]}
    copied = {str(f.relative_to(out)) for f in (out / "task_modules").rglob("*.py")}
    assert copied == {
        "task_modules/near_a_task.py",
        "task_modules/parts_of_a_task/__init__.py",
        "task_modules/parts_of_a_task/one.py",
    }


@pytest.mark.parametrize("more", ["(a, b)", "{a: b}", "{a}", "b'x'", "'\\ud800'", "[(a,)]"])
def test_rows_that_json_would_change_are_refused(tmp_path, more):
    with pytest.raises(DataError, match=r"the row of the prompt '\d+\+\d+=' cannot be written"):
        export_own_task(tmp_path, more=more)
    assert not (tmp_path / "out").exists()


def test_rows_may_hold_all_of_json(tmp_path):
    more = "[float('nan'), None, {'a': [True]}]"
    assert score_own_task(export_own_task(tmp_path, more=more))["right"] == [0.0]


def write_data(directory, name="data.jsonl", rows=ROWS):
    (directory / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return (f"data.source={json.dumps(str(directory / name))}", *GSM8K)


def test_data_whose_prompts_are_all_too_long_are_refused(tmp_path):
    overrides = (*write_data(tmp_path), "data.max_prompt_length=1")
    with pytest.raises(DataError, match=r"every prompt has more than data\.max_prompt_length = 1"):
        export_folder(tmp_path / "out", *overrides, space="math")
    assert not (tmp_path / "out").exists()


def test_rewards_do_not_name_the_place_of_the_data(tmp_path):
    export_folder(tmp_path / "out", *write_data(tmp_path), space="math")
    assert str(tmp_path) not in (tmp_path / "out" / "rewards.py").read_text()


def test_rows_with_half_a_character_are_left_out(tmp_path):
    broken = {"question": "What is \ud800?", "answer": "#### 1"}
    export_folder(tmp_path / "out", *write_data(tmp_path, rows=[broken, *ROWS]), space="math")
    assert len(read_prompts(tmp_path / "out")) == 16


def test_a_name_of_data_may_hold_quotes(tmp_path):
    overrides = write_data(tmp_path, 'my """data\n"""\\.jsonl')
    out = tmp_path / "out"
    export_folder(out, *overrides, space="math", references_data=True)
    ast.parse((out / "make_prompts.py").read_text())


def test_a_note_with_a_new_line_stays_a_comment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a\nb").mkdir()
    space = tmp_path / "a\nb" / "space.yaml"
    (tmp_path / "sums.py").write_text(TASK.format(second="short", more="0", imports=""))
    space.write_text(f"task: {tmp_path}/sums.py:Sums{SPACE.format(second='short')}")
    place = space.relative_to(tmp_path)
    export_training(build_request_from_file(place, []), "trl", "", tmp_path / "out")
    assert "a b/space.yaml\n" in (tmp_path / "out" / "grpo.yaml").read_text()


@pytest.mark.parametrize("kind", ["file", "link to nothing", "pipe"])
def test_nothing_is_written_where_one_file_has_no_place(tmp_path, kind):
    place = tmp_path / ("prompts.parquet" if kind == "pipe" else "policy")
    if kind == "file":
        place.write_text("mine")
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to("nowhere")
    with pytest.raises(
        UsageError, match=f"{place}.*\n    fix: choose another directory with --out"
    ):
        export_folder(tmp_path)
    assert list(tmp_path.iterdir()) == [place]


@pytest.mark.parametrize("out", ["", "~no-such-user/x", "x" * 300])
def test_a_directory_that_cannot_be_is_refused(out, capsys):
    with pytest.raises(SystemExit):
        export.build_parser().parse_args(["runs/code:knee", "--to", "trl", "--out", out])
    assert "argument --out" in capsys.readouterr().err


def test_a_home_in_a_quoted_directory_is_found(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    options = export.build_parser().parse_args(["x", "--to", "trl", "--out", "~/y"])
    assert options.out == tmp_path / "y"


def run_in(directory, *command, run="pwd", **variables):
    """Write a run.sh that starts `run`, start it by a command, and return what it prints."""
    exported = replace(export_to("trl", make_recipe()), install="", run=run)
    directory.mkdir(parents=True)
    (directory / "run.sh").write_text(
        format_run_script(make_recipe(), exported, references_data=False)
    )
    return subprocess.run(
        ["bash", *command], cwd=directory.parent, capture_output=True, text=True, check=False,
        env={**os.environ, **variables},
    )  # fmt: skip


def test_it_runs_in_its_own_directory_whatever_its_name(tmp_path):
    assert run_in(tmp_path / "-dash", "--", "-dash/run.sh").stdout == f"{tmp_path}/-dash\n"


def test_it_runs_in_its_own_directory_whatever_the_shell_looks_up(tmp_path):
    (tmp_path / "others" / "mine").mkdir(parents=True)
    done = run_in(tmp_path / "mine", "mine/run.sh", CDPATH=str(tmp_path / "others"))
    assert done.stdout == f"{tmp_path}/mine\n"


def test_a_directory_that_python_cannot_look_in_is_refused(tmp_path):
    done = run_in(tmp_path / "a:b", "a:b/run.sh", run='export PYTHONPATH="$PWD"; pwd')
    assert (done.returncode, done.stdout) == (2, "")
    assert re.search(r"PYTHONPATH cannot name .*/a:b: move it", done.stderr)
