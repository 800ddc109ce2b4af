"""Paths of a sweep's file: from every directory, after a move, and with variables."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gdpo_tune.core.errors import SpecError, UsageError
from gdpo_tune.core.files import expand_path, find_path_problem
from gdpo_tune.ledger import Ledger
from gdpo_tune.ledger.opening import write_spec
from gdpo_tune.report import main as report
from gdpo_tune.results.open_sweep import find_sweep, locate_sweep
from gdpo_tune.results.public_record import make_public
from gdpo_tune.spec import load_spec
from tests.support.paths import ROOT

TASK = """
from gdpo_tune.tasks.custom import RewardFunctionTask

def right(completions, **_):
    return [1.0 for _ in completions]

class Sums(RewardFunctionTask):
    reward_funcs = [right]

    def rows(self):
        return [{"prompt": f"{n} + 1"} for n in range(9999)]
"""
SPACE = """
task: sums.py:Sums
objectives: {right: {direction: maximize, reference: 0}}
space: {group_size: [4, 8], reward_weights: {right: 1}}
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with a sweep that has run, read from elsewhere."""
    directory = tmp_path / "a project's 100% ?"
    directory.mkdir()
    (directory / "sums.py").write_text(TASK)
    (directory / "mine.yaml").write_text(SPACE)
    monkeypatch.chdir(directory)
    Ledger.open(load_spec("mine.yaml")).close()
    (directory / "mlflow.db").touch()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return directory


def read(project):
    return load_spec(project / "runs" / "mine" / "spec.yaml", to_run=False)


def check_places(spec, project):
    assert spec.task == f"{project}/sums.py:Sums"
    assert spec.tracking.uri == f"sqlite:///{project}/mlflow.db"
    assert spec.storage == f"{project}/runs"


def test_a_sweep_is_read_from_every_directory(project):
    """A path of SQLite is relative to the current directory (sqlite.org/uri.html)."""
    check_places(read(project), project)
    directory = project / "runs" / "mine"
    check_places(find_sweep(str(directory)).spec, project)
    assert locate_sweep(f"{directory}/spec.yaml") == str(directory)
    assert find_sweep(f"{directory}/spec.yaml").spec.directory == directory


def test_a_file_to_search_with_may_have_the_name_of_that_of_a_sweep(project, monkeypatch):
    monkeypatch.chdir(project)
    shutil.copy("mine.yaml", "spec.yaml")
    assert locate_sweep("spec.yaml") == load_spec("spec.yaml", to_run=False).location


def test_the_identity_is_that_of_the_paths_as_written(project, monkeypatch):
    there, stored = read(project), project / "runs" / "mine" / "spec.yaml"
    before = stored.read_text()
    monkeypatch.chdir(project)
    here = read(project)
    assert here == load_spec("mine.yaml").model_copy(update={"model": here.model})
    assert here.task == "sums.py:Sums"
    assert here.compute_identity() == there.compute_identity()
    monkeypatch.chdir(project.parent)
    write_spec(there)
    assert stored.read_text() == before


@pytest.mark.parametrize("move", [Path.rename, shutil.copytree])
def test_a_project_that_moved_is_found_where_it_is(project, move):
    """A copy has its own database: that of the original is not written."""
    moved = project.with_name("moved")
    move(project, moved)
    check_places(read(moved), moved)
    (moved / "mlflow.db").unlink()
    (moved / "runs" / "mine").rename(moved / "runs" / "renamed")
    renamed = load_spec(moved / "runs" / "renamed" / "spec.yaml", to_run=False)
    there = project if project.exists() else moved  # a new database, if any, is the project's
    assert renamed.tracking.uri in (f"sqlite:///{there}/mlflow.db", f"sqlite:///{moved}/mlflow.db")


def test_a_sweep_of_an_earlier_version_is_found_by_its_place(project):
    stored = project / "runs" / "mine" / "spec.yaml"
    lines = [line for line in stored.read_text().splitlines() if not line.startswith("project:")]
    stored.write_text("\n".join(lines))
    check_places(read(project), project)


def test_a_project_beside_its_sweeps_is_found_after_a_move(tmp_path, monkeypatch):
    """`..` in `storage` leads from a sweep back to its project (path_resolution(7))."""
    project = tmp_path / "home" / "project"
    project.mkdir(parents=True)
    (project / "sums.py").write_text(TASK)
    (project / "mine.yaml").write_text(f"{SPACE}storage: ../runs\n")
    monkeypatch.chdir(project)
    Ledger.open(load_spec("mine.yaml")).close()
    monkeypatch.chdir(tmp_path)
    moved = (tmp_path / "home").rename(tmp_path / "moved")
    spec = load_spec(moved / "runs" / "mine" / "spec.yaml", to_run=False)
    assert spec.task == f"{moved}/project/sums.py:Sums"


def test_a_file_may_extend_that_of_a_sweep(project, monkeypatch):
    """It did before such a file named its project."""
    (project / "next.yaml").write_text("extends: runs/mine/spec.yaml\ntraining: {steps: 7}\n")
    assert load_spec(project / "next.yaml").task == f"{project}/sums.py:Sums"
    monkeypatch.chdir(project)
    assert load_spec("next.yaml").task == "sums.py:Sums"


def test_what_an_earlier_sweep_lacks_is_named(project, monkeypatch):
    (project / "sums.py").rename(project / "other.py")
    with pytest.raises(SpecError, match=r"there is no file .*a project's 100% \?/sums.py"):
        read(project)
    (project / "other.py").rename(project / "sums.py")
    monkeypatch.chdir(project)
    with pytest.raises(SpecError, match=r"warm_start\[0\].*the variable GDPO_NONE is not set"):
        load_spec("mine.yaml", ["search.warm_start=[$GDPO_NONE/runs/code]"])


def test_nothing_of_the_directory_is_published(project):
    public = make_public(read(project)).dump_yaml()
    assert str(project) not in public
    assert "project:" not in public


def test_variables_in_paths_are_expanded(tmp_path, monkeypatch):
    """Parameter expansion of the shell (POSIX.1-2024, XCU 2.6.2), without its operators."""
    monkeypatch.setenv("SCRATCH", str(tmp_path / "big"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums.py").write_text(TASK)
    (tmp_path / "mine.yaml").write_text(
        SPACE.replace("sums.py", '"$PLACE/sums.py').replace(":Sums", ':Sums"')
        + 'storage: "${SCRATCH}/sweeps"\ntracking: {uri: "sqlite:///$SCRATCH/mlflow.db"}\n'
    )
    monkeypatch.setenv("PLACE", str(tmp_path))
    spec = load_spec("mine.yaml")
    assert spec.directory == tmp_path / "big" / "sweeps" / "mine"
    assert spec.tracking.uri == f"sqlite:///{tmp_path}/big/mlflow.db"
    assert spec.task == "$PLACE/sums.py:Sums"  # as written: the identity holds on every machine
    assert expand_path("$SCRATCH/a") == tmp_path / "big" / "a"
    assert expand_path("~/a") == Path.home() / "a"
    (tmp_path / "100$SCRATCH").mkdir()
    assert expand_path("100$SCRATCH/a") == Path("100$SCRATCH/a")  # there is such a directory


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("storage", "${SCRATCH}/runs"),
        ("policy", "${SCRATCH}/policy"),
        ("data.source", "${SCRATCH}/data.jsonl"),
        ("data.test.source", "${SCRATCH}/data.jsonl"),
        ("tracking.uri", "sqlite:///$SCRATCH/m.db"),
        ("task", "$SCRATCH/a.py:A"),
    ],
)
@pytest.mark.parametrize("value", ["", None])
def test_an_unknown_variable_is_refused_with_its_line(tmp_path, monkeypatch, key, text, value):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SCRATCH", raising=False)
    if value is not None:
        monkeypatch.setenv("SCRATCH", value)
    lines = {"task": "code", "objectives": "{correctness: {direction: maximize, reference: 0}}"}
    lines |= {"space": "{group_size: [4, 8]}"}
    lines |= {"data.layout": "mbpp"} if key.startswith("data") else {}
    lines |= {key: f'"{text}"'}
    lines |= {"data.source": "openai/gsm8k"} if key == "data.test.source" else {}
    file = tmp_path / "mine.yaml"
    file.write_text("".join(f"{name}: {value}\n" for name, value in lines.items()))
    with pytest.raises(SpecError) as error:
        load_spec("mine.yaml", needs=None, to_run=True)
    (problem,) = [p for p in error.value.problems if p.key == key]
    assert problem.where == f"mine.yaml:{list(lines).index(key) + 1}"
    assert "the variable SCRATCH is not set (export SCRATCH=...)" in problem.reason
    assert problem.fix
    assert find_path_problem("$SCRATCH/x")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


def test_that_there_is_no_sweep_needs_no_heavy_import(tmp_path):
    """Importing Optuna, pydantic and plotly takes seconds."""
    code = (
        "import sys; from gdpo_tune.report import main\n"
        "try: main(['runs/nothing'])\n"
        "except Exception as error: print(error)\n"
        "print(sorted({'optuna', 'pydantic', 'plotly', 'numpy', 'rich'} & sys.modules.keys()))"
    )
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stdout == (
        "runs/nothing: there is no sweep in runs/nothing: it has no spec.yaml\n"
        "    fix: name the directory that a sweep has made, or its file\n[]\n"
    )
    with pytest.raises(UsageError):
        report(["runs/nothing"])


@pytest.mark.parametrize(
    "path", ["${oc.env:SCRATCH}/x", "${SCRATCH:-/tmp}/x", "$(pwd)/x", "runs/${SCRATCH", "$$/x"]
)
@pytest.mark.parametrize("key", ["storage={}", "tracking.uri=sqlite:///{}", "policy=./{}"])
def test_a_dollar_of_another_language_is_no_name_of_a_directory(key, path, monkeypatch, tmp_path):
    """Forms of OmegaConf and of shells (POSIX, 2.6.2), which nothing here fills in."""
    monkeypatch.setenv("SCRATCH", "/scratch")
    with pytest.raises(SpecError, match="is not filled in: a \\$ begins a variable"):
        load_spec(ROOT / "search_spaces" / "code.yaml", [key.format(path)])
    assert find_path_problem("$SCRATCH/${SCRATCH}") == ""
    (tmp_path / "$(pwd)").mkdir()  # a directory that is named so is itself
    assert find_path_problem(f"{tmp_path}/$(pwd)/new") == ""
