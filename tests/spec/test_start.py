"""The section `start:` of a sweep file."""

from __future__ import annotations

from pathlib import Path

import pytest

from gdpo_tune.core.errors import SpecError
from gdpo_tune.core.policy_shapes import PolicyShapes
from gdpo_tune.core.settings import StartSettings
from gdpo_tune.ledger.opening import describe_differences
from gdpo_tune.spec import load_spec
from gdpo_tune.spec.dry_run import render_dry_run
from gdpo_tune.spec.model import list_decisive_values, list_differences
from tests.support.tuning import SPACE, load_code_spec

SIZE = PolicyShapes({"model.layers.0.q_proj.weight": (1000, 1000)})
START = "start={steps: 20}"


def read_problem(tmp_path: Path, *overrides: str) -> str:
    with pytest.raises(SpecError) as error:
        load_code_spec(tmp_path, overrides)
    return str(error.value)


def test_defaults_and_a_round_trip(tmp_path: Path):
    spec = load_code_spec(tmp_path, ["start={}"])
    assert spec.start == StartSettings(
        demonstrations="data", steps=60, learning_rate=1e-4, completions_per_step=16
    )
    assert spec.baselines == ("start", "untrained", "published")
    file = tmp_path / "again.yaml"
    file.write_text(spec.dump_yaml())
    assert load_spec(file).start == spec.start


def test_without_the_section_nothing_changes(tmp_path: Path):
    spec = load_code_spec(tmp_path)
    assert spec.start is None
    assert spec.baselines == ("untrained", "published")
    assert "\nstart:" not in spec.dump_yaml()
    assert not [key for key in list_decisive_values(spec) if key.startswith("start")]


def test_a_start_is_part_of_the_identity(tmp_path: Path):
    plain, short, long = (
        load_code_spec(tmp_path, words) for words in ([], [START], ["start={steps: 21}"])
    )
    assert len({spec.compute_identity() for spec in (plain, short, long)}) == 3
    differences = list_differences(list_decisive_values(short), list_decisive_values(long))
    assert differences == ["start.steps = 20, not 21"]
    short.directory.mkdir(parents=True)
    (short.directory / "spec.yaml").write_text(short.dump_stored_yaml())
    assert describe_differences(long) == "start.steps = 20, not 21"


def test_problems_name_line_value_reason_and_fix(tmp_path: Path):
    text = SPACE.read_text() + "\nstart: {step: 3}\n"
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(SpecError) as error:
        load_spec(file)
    line = text.splitlines().index("start: {step: 3}") + 1
    assert f"{file}:{line}: start.step = 3: unknown key" in str(error.value)
    assert "did you mean 'steps'?" in str(error.value)
    assert "must be at least 1" in read_problem(tmp_path, "start={steps: 0}")
    gone = read_problem(tmp_path, f"start={{demonstrations: {tmp_path}/gone.jsonl}}")
    assert "gone.jsonl: no such file of demonstrations" in gone
    assert "fix: write data, or the path of a" in gone
    assert "no such file" in read_problem(tmp_path, f"start={{demonstrations: {tmp_path}}}")


def test_a_start_divides_among_workers(tmp_path: Path):
    problem = read_problem(tmp_path, "start={completions_per_step: 9}", "resources.workers=2")
    assert "start.completions_per_step = 9: does not divide among resources.workers = 2" in problem
    assert "write a multiple of 2" in problem


def test_a_bound_may_refer_to_a_start_that_there_is(tmp_path: Path):
    bound = 'constraints.correctness=">= start - 0.02"'
    spec = load_code_spec(tmp_path, [START, bound])
    assert spec.constraints["correctness"].text == ">= start - 0.02"
    problem = read_problem(tmp_path, bound)
    assert "this sweep has no supervised start" in problem
    assert "add start: {demonstrations: data}" in problem


def test_a_file_stays_a_path_and_data_stays_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    for directory in (project / "data", elsewhere):
        directory.mkdir(parents=True)
    (project / "mine.jsonl").write_text("{}")
    monkeypatch.chdir(project)
    for written, expected in (("mine.jsonl", str(project / "mine.jsonl")), ("data", "data")):
        spec = load_code_spec(Path("runs"), [f"start={{demonstrations: {written}}}"])
        spec.directory.mkdir(parents=True, exist_ok=True)
        file = (spec.directory / "spec.yaml").absolute()
        file.write_text(spec.dump_stored_yaml())
        monkeypatch.chdir(elsewhere)
        moved = load_spec(file)
        assert moved.start is not None
        assert moved.start.demonstrations == expected
        assert moved.compute_identity() == spec.compute_identity()
        monkeypatch.chdir(project)


def test_a_dry_run_shows_the_start(tmp_path: Path):
    plain, spec = (load_code_spec(tmp_path, words) for words in ([], [START]))
    text = render_dry_run(spec, SIZE)
    assert "# Start: 20 steps of 16 demonstrations, learning rate 0.0001; the solutions" in text
    assert "# Start" not in render_dry_run(plain, SIZE)
    evaluated = [
        next(line for line in render_dry_run(each, SIZE).splitlines() if "held-out" in line)
        for each in (plain, spec)
    ]
    counts = [int(line.split()[2].replace(",", "")) for line in evaluated]
    settings = spec.training
    once = settings.samples_per_prompt * (settings.validation_prompts + settings.test_prompts)
    assert counts[1] - counts[0] == once
