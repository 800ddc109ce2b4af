"""The command `export`."""

import shutil
from pathlib import Path

import pytest

from gdpo_tune import export
from gdpo_tune.core import registry
from gdpo_tune.core.errors import UsageError
from gdpo_tune.exporters.page import PAGE
from gdpo_tune.ledger import Ledger
from tests.support.export import FEW, FIXED
from tests.support.paths import ROOT
from tests.support.tuning import build_outcome, load_code_spec

SPACE = str(ROOT / "search_spaces" / "code.yaml")


@pytest.fixture
def sweep(tmp_path):
    spec = load_code_spec(tmp_path / "runs", ["training.train_prompts=16"])
    with Ledger.open(spec) as ledger:
        for number, (correct, form) in enumerate([(0.9, 0.2), (0.7, 0.7), (0.2, 0.9)]):
            params = spec.space.complete_baseline({"reward_weights.format": 0.1 * (number + 1)})
            ledger.start(params, "search", "model", seed=70 + number)
            ledger.complete(number, build_outcome(correct, form, 0.5))
    return spec


@pytest.fixture
def run(sweep, tmp_path):
    """A function that exports a candidate to TRL, in the directory `o` by default."""

    def run(*words, which=":knee", out=tmp_path / "o"):
        return export.main([f"{sweep.directory}{which}", "--to", "trl", "--out", str(out), *words])

    return run


def test_a_trial_of_a_sweep_is_exported(sweep, tmp_path, capsys):
    directory, choice = str(sweep.directory), "max correctness where format >= 0.5"
    assert export.main([directory, "--pick", choice, "--to", "verl"]) == 0
    written = sweep.directory.parent / "sweep-trial-1-verl"
    names = {"verl.yaml", PAGE, "run.sh", "rewards.py", "prompts.parquet", "policy", "modules"}
    assert {file.name for file in written.iterdir()} >= names
    assert "gdpo_reward_weights: [1.0, 0.2, 1.0]" in (written / "verl.yaml").read_text()
    page = (written / PAGE).read_text()
    assert f"trial 1 of {sweep.directory.name}." in page
    assert str(tmp_path) not in page  # a directory may name a person
    printed = capsys.readouterr().out
    assert "trial 1: correctness 0.700" in printed
    assert f"bash {written / 'run.sh'}" in printed


def test_a_name_under_runs_is_enough(sweep, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert export.main([f"{sweep.name}:knee", "--to", "trl", "--out", "o"]) == 0
    assert (tmp_path / "o" / "grpo.yaml").is_file()


def test_the_policy_and_the_budget_may_differ(run, tmp_path):
    other = ["--set", "policy=Qwen/Qwen2.5-7B-Instruct", "--set", "training.steps=500"]
    run(*other, "--recipe", "code_qwen", "--reference-data", which=":0")
    text = (tmp_path / "o" / "grpo.yaml").read_text().replace('"', "")
    assert "model_name_or_path: Qwen/Qwen2.5-7B-Instruct" in text
    assert "max_steps: 500" in text


def test_a_file_that_was_edited_is_kept(run, tmp_path):
    run()
    assert run() == 0
    (tmp_path / "o" / "grpo.yaml").write_text("mine")
    with pytest.raises(UsageError, match="exists with other content"):
        run()
    assert (tmp_path / "o" / "grpo.yaml").read_text() == "mine"


@pytest.mark.parametrize("damage", ["file", "below a file", "binary", "directory"])
def test_where_nothing_can_be_written(damage, run, tmp_path):
    out = tmp_path / "o"
    match damage:
        case "file":
            out.touch()
        case "below a file":
            out.touch()
            out /= "x"
        case "binary":
            out.mkdir()
            (out / "grpo.yaml").write_bytes(b"\xff")
        case _:
            (out / "grpo.yaml").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"is no directory|exists with other content"):
        run(out=out)


def test_a_file_has_nothing_to_pick_from(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text("a: 1")
    with pytest.raises(UsageError, match="--pick requires a sweep"):
        export.main([str(file), "--pick", "knee", "--to", "trl"])


@pytest.mark.parametrize("library", export.WITHOUT_GDPO)
def test_a_library_without_gdpo_is_refused_with_the_reason(library, capsys):
    with pytest.raises(SystemExit) as caught:
        export.main(["x:knee", "--to", library])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert f"{library} knows one reward per completion" in error
    assert f"choose from {', '.join(sorted(registry.EXPORTERS))}" in error


def test_help_names_every_library():
    said = export.build_parser().format_help()
    assert all(name in said for name in registry.EXPORTERS)


@pytest.mark.parametrize("out", ["", "~no-such-user/x", "x" * 300])
def test_a_directory_that_cannot_be_is_refused(out, capsys):
    with pytest.raises(SystemExit):
        export.build_parser().parse_args(["runs/code:knee", "--to", "trl", "--out", out])
    assert "argument --out" in capsys.readouterr().err


def test_a_home_in_a_quoted_directory_is_found(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    options = export.build_parser().parse_args(["x", "--to", "trl", "--out", "~/y"])
    assert options.out == tmp_path / "y"


@pytest.mark.parametrize("is_relative", [True, False])
def test_a_base_in_a_directory_is_named_and_may_be_replaced(
    tmp_path, monkeypatch, capsys, is_relative
):
    """A path of this machine means nothing on another: transformers#10412."""
    monkeypatch.chdir(tmp_path)
    mine = shutil.copytree(registry.POLICIES["embedded"], tmp_path / "mine")
    policy = f"policy={'mine' if is_relative else mine}"
    fixed = [word for each in (*FIXED, *FEW, policy) for word in ("--set", each)]

    def run(*words):
        return export.main([SPACE, "--to", "trl", *fixed, *words])

    assert run("--out", "a") == 0
    assert f'"{mine}"' in Path("a/grpo.yaml").read_text()
    page = Path("a", PAGE).read_text()
    assert f"| `grpo.yaml` | the directory {mine}, which another machine lacks" in page
    assert "--collect a in place of --to and --out" in capsys.readouterr().out
    assert run("--base-model", "org/mine", "--out", "b") == 0
    assert "org/mine" in Path("b/grpo.yaml").read_text()
    assert str(mine) not in Path("b", PAGE).read_text().split("## What you supply")[1]
    with pytest.raises(UsageError, match="neither a whole path nor a Hub id"):
        run("--base-model", "./mine")
