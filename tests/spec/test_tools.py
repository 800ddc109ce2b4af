"""Sweep files of tasks with tools: what they may say, and what the commands say of them."""

import shutil
from dataclasses import replace

import pytest

from gdpo_tune import export, load_sweep, report, score, sweep
from gdpo_tune.core.errors import ExportError, PolicyError, UsageError
from gdpo_tune.core.registry import EXPORTERS
from gdpo_tune.core.trials import Estimate
from gdpo_tune.core.trl_fields import NO_LIMIT
from gdpo_tune.ledger import Ledger
from gdpo_tune.spec import load_spec
from gdpo_tune.tracking.front_content import build_front_content
from gdpo_tune.tracking.views import Site
from tests.support.paths import ROOT
from tests.support.tuning import build_outcome

SPACE = "search_spaces/calculator.yaml"
TASK = f"{ROOT / 'search_spaces' / 'calculator.py'}:Calculator"


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "search_spaces", tmp_path / "search_spaces")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", ["turns", "tool_calls", "tool_errors", "tool_tokens"])
def test_turns_are_objectives_and_constraints(name):
    goal = f"objectives={{{name}: {{direction: minimize, reference: 9}}}}"
    spec = load_spec(SPACE, [goal, f"constraints={{{name}: '<= 3'}}"])
    assert spec.objectives[name].direction == "minimize"
    assert spec.constraints[name].bound == 3


def test_other_tasks_have_no_such_metric(refuse):
    (problem,) = refuse("objectives={tool_calls: {direction: minimize, reference: 9}}")
    assert problem.reason == "unknown objective"


def test_most_turns_are_part_of_a_space_with_tools_alone(refuse):
    spec = load_spec(SPACE, ["space.trl.max_tool_calling_iterations=[1, 3]"])
    assert spec.space.list_reachable("trl.max_tool_calling_iterations") == (1, 3)
    assert NO_LIMIT > 3
    (problem,) = refuse("space.trl={max_tool_calling_iterations: 2}")
    assert (problem.key, problem.reason) == (
        "space.trl.max_tool_calling_iterations",
        "has no effect: the task has no tools",
    )


def test_a_divided_policy_is_refused():
    with pytest.raises(UsageError, match="each worker samples at a pace of its own") as caught:
        load_spec(SPACE, ["resources.workers=2"])
    assert "write resources.sharding: none" in str(caught.value)
    load_spec(SPACE, ["resources={workers: 2, sharding: none}"])


def test_a_dry_run_names_the_tools_and_counts_demonstrations_with_their_answers(capsys):
    assert sweep.main([SPACE, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "\ntools: add; called between turns, and their tokens have no gradient\n" in printed
    assert "\ndemonstrations: 800 with " in printed


def test_a_dry_run_refuses_a_policy_without_a_template(tmp_path):
    file = tmp_path / "search_spaces" / "calculator.py"
    text = file.read_text().replace("    chat_template = TEMPLATE\n", "")
    (tmp_path / "search_spaces" / "plain.py").write_text(text)
    changes = ["--set", "task=search_spaces/plain.py:Calculator", "--set", "start=null"]
    with pytest.raises(PolicyError, match=r": policy .* cannot call tools: there is no"):
        sweep.main([SPACE, "--dry-run", *changes])


@pytest.mark.parametrize("library", [name for name in EXPORTERS if name != "mergekit"])
def test_exports_are_refused_in_one_line(library, tmp_path):
    fixed = ("normalization=gdpo", "learning_rate=1e-4", "reward_weights={no_call: 1, length: 1}")
    changes = ["--set", "start=null"]
    changes += [word for change in fixed for word in ("--set", f"space.{change}")]
    with pytest.raises(ExportError) as caught:
        export.main([SPACE, "--to", library, "--out", str(tmp_path / "out"), *changes])
    (problem,) = [one for one in caught.value.problems if one.key == "task"]
    assert problem.reason == "the turns of tools are not exported"


def test_scores_of_a_policy_and_of_references(tmp_path):
    out = tmp_path / "scores.jsonl"
    command = [SPACE, "--policy", "embedded_tools", "-n", "4", "--json", str(out)]
    assert score.main(command) == 0
    assert out.read_text().count('"turns": ') == 4
    with pytest.raises(UsageError, match="states no solutions of its problems in one turn"):
        score.main([SPACE, "--reference"])


def test_no_page_offers_an_export_that_would_be_refused(capsys):
    spec = load_spec(SPACE)
    values = {"correctness": 0.9, "tool_calls": 0.5, "mean_length": 9.0}
    measured = {name: Estimate(value, 0.1) for name, value in values.items()}
    with Ledger.open(spec) as ledger:
        ledger.start(spec.space.complete_baseline({}), "search", "model", seed=7)
        ledger.complete(0, replace(build_outcome(), validation=measured, test=measured))
    assert report.main([f"{spec.directory}:0"]) == 0
    pages = [capsys.readouterr().out, (spec.directory / "report.html").read_text()]
    content = build_front_content(spec, load_sweep(spec.directory).records, Site("", "1", "p"), 1)
    for page in [*pages, content.policies[0]["policy/README.md"]]:
        assert "gdpo_tune.train --from" in page
        assert "gdpo_tune.export" not in page
