"""The command `export`."""

from __future__ import annotations

import shutil
import subprocess
import sys
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


@pytest.fixture
def sweep(tmp_path):
    spec = load_code_spec(tmp_path, ["training.train_prompts=16"])
    with Ledger.open(spec) as ledger:
        for number, (correct, form) in enumerate([(0.9, 0.2), (0.7, 0.7), (0.2, 0.9)]):
            params = spec.space.complete_baseline({"reward_weights.format": 0.1 * (number + 1)})
            ledger.start(params, "search", "model", seed=70 + number)
            ledger.complete(number, build_outcome(correct, form, 0.5))
    return spec


def test_a_trial_of_a_sweep_is_exported(sweep, tmp_path, capsys):
    directory, choice = str(sweep.directory), "max correctness where format >= 0.5"
    assert export.main([directory, "--pick", choice, "--to", "verl"]) == 0
    written = tmp_path / "sweep-trial-1-verl"
    names = {"verl.yaml", PAGE, "run.sh", "rewards.py", "prompts.parquet", "policy", "modules"}
    assert {file.name for file in written.iterdir()} >= names
    assert "gdpo_reward_weights: [1.0, 0.2, 1.0]" in (written / "verl.yaml").read_text()
    page = (written / PAGE).read_text()
    assert f"trial 1 of {sweep.directory.name}." in page
    assert str(sweep.directory.parent) not in page  # a directory may name a person
    printed = capsys.readouterr().out
    assert "trial 1: correctness 0.700" in printed
    assert f"bash {written / 'run.sh'}" in printed
    assert export.main([f"{directory}:knee", "--to", "trl", "--out", str(tmp_path / "o")]) == 0
    assert (tmp_path / "o" / "grpo.yaml").is_file()


def test_a_name_under_runs_is_enough(tmp_path, monkeypatch):
    spec = load_code_spec(tmp_path / "runs", ["training.train_prompts=16"])
    with Ledger.open(spec) as ledger:
        ledger.start(spec.space.complete_baseline({}), "search", "model", seed=7)
        ledger.complete(0, build_outcome(0.9, 0.2, 0.5))
    monkeypatch.chdir(tmp_path)
    assert export.main([f"{spec.name}:knee", "--to", "trl", "--out", "o"]) == 0
    assert (tmp_path / "o" / "grpo.yaml").is_file()


def test_the_policy_and_the_budget_may_differ(sweep, tmp_path):
    other = ["--set", "policy=Qwen/Qwen2.5-7B-Instruct", "--set", "training.steps=500"]
    other += ["--recipe", "code_qwen", "--reference-data"]
    out = tmp_path / "o"
    export.main([f"{sweep.directory}:0", "--to", "trl", "--out", str(out), *other])
    text = (out / "grpo.yaml").read_text()
    assert 'model_name_or_path: "Qwen/Qwen2.5-7B-Instruct"' in text or (
        "model_name_or_path: Qwen/Qwen2.5-7B-Instruct" in text
    )
    assert "max_steps: 500" in text


def test_a_policy_in_a_relative_directory_is_found_from_the_export(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(registry.POLICIES["embedded"], "mine")
    space = str(ROOT / "search_spaces" / "code.yaml")
    fixed = [word for each in (*FIXED, *FEW, "policy=mine") for word in ("--set", each)]
    assert export.main([space, "--to", "trl", "--out", "o", *fixed]) == 0
    assert f'"{tmp_path}/mine"' in Path("o/grpo.yaml").read_text()


def test_a_file_that_was_edited_is_kept(sweep, tmp_path):
    arguments = [f"{sweep.directory}:knee", "--to", "trl", "--out", str(tmp_path / "o")]
    export.main(arguments)
    assert export.main(arguments) == 0
    (tmp_path / "o" / "grpo.yaml").write_text("mine")
    with pytest.raises(UsageError, match="exists with other content"):
        export.main(arguments)
    assert (tmp_path / "o" / "grpo.yaml").read_text() == "mine"


@pytest.mark.parametrize("damage", ["file", "below a file", "binary", "directory"])
def test_where_nothing_can_be_written(damage, sweep, tmp_path):
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
        export.main([f"{sweep.directory}:knee", "--to", "trl", "--out", str(out)])


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


def test_help_imports_nothing_heavy():
    program = (
        "import sys; from gdpo_tune import export; print(export.build_parser().format_help());"
        "print({'torch', 'optuna', 'pydantic', 'rich', 'ray', 'numpy'} & set(sys.modules))"
    )
    said = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert said.strip().endswith("set()")
    assert all(name in said for name in registry.EXPORTERS)


def test_a_base_in_a_directory_is_named_and_may_be_replaced(tmp_path, capsys):
    """A path of this machine means nothing on another: transformers#10412."""
    mine = tmp_path / "mine"
    shutil.copytree(registry.POLICIES["embedded"], mine)
    space = str(ROOT / "search_spaces" / "code.yaml")
    fixed = [word for each in (*FIXED, *FEW, f"policy={mine}") for word in ("--set", each)]
    assert export.main([space, "--to", "trl", "--out", str(tmp_path / "a"), *fixed]) == 0
    page = (tmp_path / "a" / PAGE).read_text()
    assert f"| `grpo.yaml` | the directory {mine}, which another machine lacks" in page
    assert f"--collect {tmp_path / 'a'} in place of --to and --out" in capsys.readouterr().out
    other = ["--base-model", "org/mine", "--out", str(tmp_path / "b")]
    assert export.main([space, "--to", "trl", *other, *fixed]) == 0
    assert "org/mine" in (tmp_path / "b" / "grpo.yaml").read_text()
    assert str(mine) not in (tmp_path / "b" / PAGE).read_text().split("## What you supply")[1]
    with pytest.raises(UsageError, match="neither a whole path nor a Hub id"):
        export.main([space, "--to", "trl", *fixed, "--base-model", "./mine"])
