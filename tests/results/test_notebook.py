"""`load_sweep`: tables, figures, choices and comparisons; and the page that shows them."""

import re
import shutil
from importlib.util import find_spec

import optuna
import pandas as pd
import pytest

from gdpo_tune import load_sweep
from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.trials import Part
from gdpo_tune.ledger import Ledger
from tests.support.paths import ROOT
from tests.support.tuning import build_outcome, load_code_spec

DOC = ROOT / "docs" / "notebook.md"


GDPO = {"normalization": "gdpo"}


def store(directory, trials, overrides=(), name="sweep"):
    """Store a sweep of trials: role, what differs from the baseline, values or a failure, parts."""
    spec = load_code_spec(directory, overrides).model_copy(update={"name": name})
    with Ledger.open(spec) as ledger:
        for number, (role, tried, values, *parts) in enumerate(trials):
            proposer = "model" if role == "search" else "candidate" if parts else "baseline"
            params = {} if role == "merge" else spec.space.complete_baseline(tried)
            ledger.start(params, role, proposer, seed=number, parts=parts)
            if isinstance(values, str):
                ledger.fail(number, values)
            else:
                ledger.complete(number, build_outcome(*values))
    return load_sweep(str(spec.directory))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notebook")
    trials = []
    for number in range(14):
        mode, share = ("gdpo", "grpo")[number % 2], (number + 1) / 15
        tried = {"normalization": mode, "reward_weights.format": 0.06 + 0.1 * number}
        values = "NaN in the loss" if number == 5 else (share, 1 - share, 0.5)
        trials.append(("search", tried, values))
    store(folder / "runs", trials, name="code")
    return folder


@pytest.fixture
def sweep(runs):
    return load_sweep(str(runs / "runs" / "code"))


def test_trials_are_a_table(sweep):
    table = sweep.trials
    assert list(table.index) == list(range(14))
    assert table.loc[5, "state"] == "failed"
    assert table.loc[5, "reason"] == "NaN in the loss"
    assert pd.isna(table.loc[5, "test/correctness"])
    assert table.loc[13, "test/correctness"] == pytest.approx(14 / 15)
    assert table.loc[13, "test/correctness_se"] == 0.01
    assert table.loc[3, "param/normalization"] == "grpo"
    assert table["finished"].dtype.kind == "M"
    assert table["finished"].dt.tz is None
    assert repr(sweep).startswith("<sweep code: 14 trials, ")


def test_a_failed_trial_costs_no_table_its_dtypes(sweep, tmp_path):
    """pandas#27008: one missing value makes objects of flags; Excel takes no time with a zone."""
    table = sweep.trials
    assert list(table[table.feasible].index) == [2, 3, 4, *range(6, 14)]
    kinds = ("feasible", "on_front", "replicate_of", "param/group_size")
    assert [str(table[n].dtype) for n in kinds] == ["boolean", "boolean", "Int64", "Int64"]
    times = table.select_dtypes(["datetime", "datetimetz"])
    assert sorted(times) == ["finished", "started"]
    assert all(times[name].dt.tz is None for name in times)
    if find_spec("openpyxl"):
        table.to_excel(tmp_path / "trials.xlsx")


def test_a_notebook_shows_state_front_baselines_and_report(runs, monkeypatch):
    monkeypatch.chdir(runs)
    sweep = load_sweep("runs/code")
    shown = sweep._repr_html_()
    assert "13 trials complete, 1 failed" in shown
    assert "python -m gdpo_tune.report" in shown
    assert "href" not in shown
    (sweep.spec.directory / "report.html").write_text("")
    shown = sweep._repr_html_()
    assert '<a href="runs/code/report.html"' in shown
    assert "knee" in shown
    assert "trial\xa0" not in shown
    assert shown.count("<tr") == 1 + min(8, len(sweep.analysis.members))
    assert f"{len(sweep.analysis.members) - 8} more configurations on the front" in shown


def test_a_notebook_shows_how_the_sweep_stands_and_escapes_texts(tmp_path):
    spec = load_code_spec(tmp_path)
    params = spec.space.complete_baseline({"normalization": "gdpo"})
    with Ledger.open(spec) as ledger:
        assert "</b><br>" in load_sweep(str(spec.directory))._repr_html_()
        session = ledger.begin_session(0.0, 1, {})
        for number, role in enumerate(("untrained", "published")):
            ledger.start(params, role, "baseline", seed=number)
            ledger.complete(number, build_outcome(0.5 + number / 4))
        assert "</b>: running, or killed<br>" in load_sweep(str(spec.directory))._repr_html_()
        ledger.end_session(session)
        assert "</b>: interrupted<br>" in load_sweep(str(spec.directory))._repr_html_()
        ledger.end_session(ledger.begin_session(0.0, 1, {}), "<all> were tried")
    shown = load_sweep(str(spec.directory))._repr_html_()
    assert "</b>: finished (&lt;all&gt; were tried)<br>" in shown
    assert "untrained policy" in shown
    assert "published weights" in shown
    assert "0.750\xa0±\xa00.010" in shown or "0.750&nbsp;±&nbsp;0.010" in shown


def test_a_trial_that_trained_nothing_has_no_parameters(tmp_path):
    trials = [
        ("untrained", GDPO, (0.9, 0.5, 0.5)),
        ("search", GDPO, (0.3, 0.5, 0.5)),
        ("checkpoint", GDPO, (0.2, 0.5, 0.5), Part(1, 20, 1.0)),
    ]
    sweep = store(tmp_path, trials)
    table = sweep.trials
    params = [name for name in table if name.startswith("param/")]
    assert table.loc[[0, 2], params].isna().all(axis=None)
    assert not table.loc[1, params].isna().any()
    means = table.groupby("param/normalization")["test/correctness"].mean()
    assert means.to_dict() == {"gdpo": 0.3}
    assert [trial.user_attrs["trial"] for trial in sweep.study.trials] == [1]


def test_a_parameter_without_effect_has_no_value(tmp_path):
    """README's `beta`: under another mode its default is no value of it."""
    beta = "space.beta={log: [1.0e-4, 0.04], when: {normalization: gdpo}}"
    trials = [
        ("search", {**GDPO, "beta": 0.002}, (0.3, 0.5, 0.5)),
        ("search", {"normalization": "grpo"}, (0.4, 0.5, 0.5)),
    ]
    sweep = store(tmp_path, trials, [beta])
    assert sweep.trials["param/beta"].tolist()[0] == 0.002
    assert sweep.trials["param/beta"].isna().tolist() == [False, True]
    assert sorted("beta" in c.params for c in sweep.analysis.configurations) == [False, True]


def test_optunas_importance_reads_the_study(tmp_path):
    """optuna#1856: parameters that all trials have, so one trial without any leaves none."""
    trials = [("untrained", {}, (0.2, 0.5, 0.5))]
    for number in range(1, 13):
        tried = {"reward_weights.format": 0.1 * number, "learning_rate": 1e-4}
        trials.append(("search", tried, (0.9 - 0.05 * number, 0.5, 0.5)))
    study = store(tmp_path, trials).study
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
    found = optuna.importance.get_param_importances(
        study, evaluator=evaluator, target=lambda trial: trial.values[0]
    )
    assert max(found, key=found.get) == "reward_weights.format"


def test_the_study_has_the_constraints_that_optunas_dashboard_reads(tmp_path):
    """optuna-dashboard#772: its "Best trials" drop those with a positive `constraints` entry.

    Version 0.21 reads the list of Optuna 4 (`_serializer.py`), and Optuna 5 writes named entries.
    """
    sweep = store(tmp_path, [("search", {}, (share, 0.5, 0.5)) for share in (0.01, 0.9)])
    trials = sweep.study.trials
    lists = [trial.system_attrs["constraints"] for trial in trials]
    assert [len(found) for found in lists] == [len(sweep.spec.constraints)] * 2
    assert [all(value <= 0 for value in found) for found in lists] == [False, True]
    assert [list(trial.constraints.values()) for trial in trials] == lists


def test_the_front_is_a_table_with_the_best_first(sweep):
    assert sweep.front["correctness"].is_monotonic_decreasing
    assert set(sweep.front.index) == {member.first for member in sweep.analysis.members}
    assert sweep.trials["on_front"].sum() == len(sweep.front)
    assert "knee" in " ".join(sweep.front["picked_as"])


def test_every_figure_is_drawn_by_its_name(sweep):
    assert {"pairs", "slices", "progress", "all"} <= set(sweep.figures)
    for name in sweep.figures:
        assert sweep.figure(name).data
    with pytest.raises(UsageError, match="did you mean 'pairs'"):
        sweep.figure("pair")


def test_merges_have_names_and_parts_and_take_no_part_in_a_comparison_of_modes(tmp_path):
    trials = [
        ("search", GDPO, (0.1, 0.8, 0.5)),
        ("search", {"normalization": "grpo"}, (0.9, 0.0, 0.5)),
        ("merge", {}, (0.6, 0.5, 0.5), Part(0, 60, 0.5), Part(1, 60, 0.5)),
    ]
    sweep = store(tmp_path, trials)
    parts = "0.5 x 0@60 + 0.5 x 1@60"
    assert list(sweep.trials["name"]) == ["0", "1", "merge-2"]
    assert sweep.trials.loc[2, "parts"] == parts
    assert "evaluation_completions" in sweep.trials
    assert dict(zip(sweep.front["name"], sweep.front["parts"], strict=True))["merge-2"] == parts
    comparison = sweep.compare_modes("gdpo", "grpo").comparison
    assert (comparison.left.tried_count, comparison.right.tried_count) == (1, 1)
    assert sweep.pick("merge-2").name == "merge-2"
    other = shutil.copytree(sweep.spec.directory, tmp_path / "other" / "sweep")
    notes = sweep.compare(load_sweep(str(other))).notes
    assert sum("has 1 trial of checkpoints and merges, which count with" in n for n in notes) == 2
    for name in sweep.figures:
        assert sweep.figure(name).data


def test_a_sweep_without_a_finished_trial_has_empty_tables(tmp_path):
    sweep = store(tmp_path, [])
    assert sweep.trials.empty
    assert sweep.front.empty
    assert sweep.figures == ()


@pytest.mark.parametrize("name", ["nowhere", "~nobody-of-this-name/x", "x" * 5000, "a\0b"])
def test_what_is_no_path_names_no_sweep(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="there is no sweep in"):
        load_sweep(name)


def test_the_page_does_what_it_says(runs, monkeypatch):
    monkeypatch.chdir(runs)
    blocks = re.findall(r"```python\n(.*?)```", DOC.read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 4
    known: dict[str, object] = {}
    for block in blocks:
        exec(block, known)
    assert known["sweep"].pick("max correctness where format >= 0.5").record.number == 6
    assert len(known["done"]) == 13
    (table,) = re.findall(r"done\.groupby.*", DOC.read_text("utf-8"))
    assert eval(table, known)["count"].sum() == 13
