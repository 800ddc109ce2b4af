"""`python -m gdpo_tune.report`: the sweep that it draws, and the trial that it marks."""

from __future__ import annotations

import importlib.util
import shutil

import pytest

from gdpo_tune import compare, export, load_sweep, report
from gdpo_tune.core.errors import DataError, PickError, SpecError, UsageError
from gdpo_tune.core.trials import Cost
from gdpo_tune.ledger import Ledger
from gdpo_tune.results.retrain import build_request_from_sweep
from gdpo_tune.spec import load_spec
from tests.support.tuning import build_measurement, build_outcome, load_code_spec


@pytest.fixture
def searched(tmp_path):
    spec = load_code_spec(tmp_path)
    with Ledger.open(spec) as ledger:
        for number, (correct, form) in enumerate([(0.9, 0.2), (0.7, 0.7), (0.2, 0.9)]):
            params = spec.space.complete_baseline({"reward_weights.format": 0.1 * (number + 1)})
            ledger.start(params, "search", "model", seed=70 + number)
            ledger.complete(number, build_outcome(correct, form, 0.5))
    return spec.directory


def test_a_picked_trial_is_marked_and_printed(searched, capsys):
    choice = "max correctness where format >= 0.5"
    assert report.main([str(searched), "--pick", choice]) == 0
    page = (searched / "report.html").read_text()
    sentence = "trial 1: correctness 0.700 ± 0.010, format 0.700 ± 0.010"
    assert sentence in page
    assert '<span class="badge chosen">chosen</span>' in page
    printed = capsys.readouterr().out
    assert sentence in printed
    assert f"python -m gdpo_tune.train --from {searched}:1" in printed
    assert f"python -m gdpo_tune.export {searched}:1 --to trl" in printed
    assert (searched / "front.png").stat().st_size > 0


def test_without_a_pick_no_trial_is_marked(searched, capsys):
    assert report.main([str(searched)]) == 0
    assert "badge chosen" not in (searched / "report.html").read_text()
    assert "chosen" not in capsys.readouterr().out


def test_sweeps_and_picks_that_cannot_be_drawn_are_refused(searched, tmp_path):
    with pytest.raises(PickError, match="did you mean 'knee'"):
        report.main([f"{searched}:kne"])
    with pytest.raises(UsageError, match="there is no sweep in"):
        report.main([str(tmp_path / "nowhere")])


def test_a_directory_with_a_colon_in_its_name(searched, tmp_path, capsys):
    directory = tmp_path / "at 12:30" / "sweep"
    directory.parent.mkdir()
    searched.rename(directory)
    assert report.main([str(directory)]) == 0
    # A sweep that was moved is drawn again by its own command.
    assert f"python -m gdpo_tune.report '{directory}'\n" in capsys.readouterr().out
    assert report.main([f"{directory}:max_format"]) == 0
    assert "trial 2: correctness" in (directory / "report.html").read_text()
    assert "trial 2: correctness" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[":"], [":knee:knee"], [":knee", "--pick", "knee"]])
def test_two_picks_are_refused(words, searched):
    with pytest.raises(UsageError, match="pick once, after a single colon or with --pick"):
        report.main([f"{searched}{words[0]}", *words[1:]])


def test_a_report_that_cannot_be_written(searched):
    (searched / "report.html").mkdir()
    with pytest.raises(UsageError, match=r"the report cannot be written: .*Is a directory"):
        report.main([str(searched)])
    assert not list(searched.glob(".report.html*"))


WITH_DATA = ["data={source: rows.jsonl, layout: mbpp}", "sandbox.modules=[numpy]"]


def test_a_sweep_is_read_without_the_files_that_only_its_run_needs(tmp_path, monkeypatch):
    """Elsewhere, and with the earlier sweep, the data and a package gone."""
    monkeypatch.chdir(tmp_path)
    rows = tmp_path / "rows.jsonl"
    rows.touch()
    earlier = run_made_up_sweep(tmp_path / "runs", "earlier", overrides=WITH_DATA)
    warm = ["search.warm_start=[runs/earlier]", *WITH_DATA]
    later = run_made_up_sweep(tmp_path / "runs", "later", overrides=warm)
    shutil.rmtree(earlier)
    rows.unlink()
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "numpy" else find(n))
    for place in (tmp_path, "/"):
        monkeypatch.chdir(place)
        assert report.main([str(later)]) == 0
    assert load_sweep(str(later)).trials.shape[0] == 12
    arguments = [f"{later}:knee", "--to", "trl", "--out", str(tmp_path / "o")]
    with pytest.raises(DataError, match="or --reference-data, which writes"):
        export.main(arguments)
    assert export.main([*arguments, "--reference-data"]) == 0
    with pytest.raises(SpecError, match=r"data.source = rows.jsonl") as caught:
        build_request_from_sweep(f"{later}:knee", [])
    assert "no module numpy" in str(caught.value)
    assert "warm_start" not in str(caught.value)


def run_made_up_sweep(
    directory, name, shift=0.0, mode="gdpo", overrides=(), trials=12, proposer="startup"
):
    """Write a ledger with trials along a trade-off; return the sweep's directory."""
    spec = load_code_spec(directory, ["search.trials=12", *overrides])
    spec = spec.model_copy(update={"name": name})
    with Ledger.open(spec) as ledger:
        for number in range(trials):
            varied = {"normalization": mode if number % 2 else "gdpo"}
            varied["reward_weights.format"] = 0.06 + 0.1 * number
            params = spec.space.complete_baseline(varied)
            ledger.start(params, "search", proposer, seed=number)
            share = (number + 1) / 14
            ledger.complete(number, build_outcome(share + shift, 1 - share + shift, 0.5 + shift))
    return spec.directory


def test_two_sweeps_are_compared(tmp_path, capsys):
    better, worse = run_made_up_sweep(tmp_path, "better", 0.3), run_made_up_sweep(tmp_path, "worse")
    assert report.main([str(better), str(worse)]) == 0
    printed = capsys.readouterr().out
    assert "better beats worse: its front covers more." in printed
    page = (better / "comparison_worse.html").read_text()
    assert "better beats worse" in page
    assert 'id="figure-sides"' in page
    assert 'id="figure-effects"' in page


def test_two_modes_of_one_sweep_are_compared(tmp_path, capsys):
    directory = run_made_up_sweep(tmp_path, "both", mode="grpo")
    assert compare.main([str(directory), "--modes", "gdpo", "grpo"]) == 0
    assert "gdpo and grpo: no significant difference" in capsys.readouterr().out
    page = (directory / "comparison_gdpo_grpo.html").read_text()
    assert "the 6 and 6 configurations that no model proposed" in page


def test_modes_that_cannot_be_compared_come_with_the_commands_that_compare_them(tmp_path, capsys):
    """A model proposed every trial, so there is nothing to compare in the objectives."""
    directory = run_made_up_sweep(tmp_path, "both", mode="grpo", proposer="model")
    assert compare.main([str(directory), "--modes", "gdpo", "grpo"]) == 0
    printed = capsys.readouterr().out
    assert "correctness, format and length: nothing to compare. gdpo has 0 and grpo 0" in printed
    assert "0 % to 100 %" not in printed
    for mode in ("gdpo", "grpo"):
        words = f"{directory / 'spec.yaml'} --name both_{mode} --set space.normalization={mode} "
        words += f"--set search.trials=40 --set storage={tmp_path}"
        assert f"gdpo_tune.sweep {words}\n" in printed
        spec = load_spec(directory / "spec.yaml", [f"space.normalization={mode}"])
        assert spec.space.fixed_values["normalization"] == mode
    assert f"python -m gdpo_tune.report {tmp_path}/both_gdpo {tmp_path}/both_grpo\n" in printed
    page = (directory / "comparison_gdpo_grpo.html").read_text()
    assert "nothing to compare" in page
    assert 'id="figure-effects"' not in page


def run_wide_sweep(directory, name="wide"):
    """Write a ledger of a wide rung: 13 trainings to step 20, of which one of `gdpo` went on."""
    spec = load_code_spec(directory, ["search.trials=12"]).model_copy(update={"name": name})
    with Ledger.open(spec) as ledger:
        for number in range(13):
            mode = ("gdpo", "grpo", "grpo_no_std")[number % 3]
            varied = {"normalization": mode}
            for reward, place in (("format", 3), ("length", 6)):
                varied[f"reward_weights.{reward}"] = (0.05, 2.0)[number // place % 2]
            params = spec.space.complete_baseline(varied)
            ledger.start(params, "search" if number else "published", "startup", seed=number)
            values = [0.5 + 0.01 * (number * k % 5) for k in (1, 2, 3)]
            values[2] += 0.3 * (mode == "grpo")
            estimates = dict(zip(("correctness", "format", "length"), values, strict=True))
            ledger.record_rung(number, build_measurement(20, **estimates))
            if number == 3:
                ledger.complete(number, build_outcome(*values))
            else:
                ledger.prune(number, "the wide rung", Cost(1280))
    return spec


def test_modes_without_full_trainings_are_compared_where_most_were_measured(tmp_path, capsys):
    spec = run_wide_sweep(tmp_path)
    assert compare.main([str(spec.directory), "--modes", "gdpo", "grpo"]) == 0
    printed = capsys.readouterr().out
    assert "At step 20, where most trainings were measured: grpo is better in length." in printed
    assert "normalization grpo above gdpo in length by 0." in printed
    assert "told apart there: normalization in correctness and format." in printed
    assert compare.main([str(spec.directory), "--modes", "gdpo", "grpo_no_std"]) == 0
    assert "measured: gdpo and grpo_no_std cannot be told apart." in capsys.readouterr().out
    sweep = load_sweep(str(spec.directory))
    assert sweep.compare_modes("grpo", "gdpo").verdict.winner == "left"
    assert sweep.compare_modes("gdpo", "grpo").verdict.winner == "right"
    assert (spec.directory / "comparison_gdpo_grpo.html").exists()
    assert report.main([str(spec.directory)]) == 0
    page = (spec.directory / "report.html").read_text()
    assert 'id="figure-effects"' in page
    effects = load_sweep(str(spec.directory)).effects
    told = effects[effects.told_apart & (effects.dimension == "normalization")]
    pairs = set(zip(told.before, told.after, strict=True))
    assert pairs == {("gdpo", "grpo"), ("grpo", "grpo_no_std")}
    assert set(told.objective) == {"length"}
    assert (effects.completions == 1280 * effects.more).all()


def test_a_mode_that_only_the_published_setting_has_is_compared_by_effects(tmp_path, capsys):
    """It has no configuration of the search, and the data tell nothing of it either."""
    spec = load_code_spec(tmp_path, ["search.trials=12"])
    with Ledger.open(spec) as ledger:
        for number, mode in enumerate(("gdpo", *["grpo"] * 6)):
            weight = 0.1 + 0.2 * (number * number % 7)
            varied = {"normalization": mode, "reward_weights.format": weight}
            params = spec.space.complete_baseline(varied)
            ledger.start(params, "search" if number else "published", "startup", seed=number)
            of_length = 0.2 + 0.01 * (number % 3) + 0.5 * (mode == "grpo")
            values = {"correctness": 0.3 + 0.1 * (number % 2), "format": 0.5, "length": of_length}
            ledger.record_rung(number, build_measurement(20, **values))
            ledger.prune(number, "the wide rung", Cost(1280))
    assert compare.main([str(spec.directory), "--modes", "gdpo", "grpo"]) == 0
    assert "grpo is better in length" in capsys.readouterr().out


def test_other_differences_between_sweeps_are_reported(tmp_path, capsys):
    one = run_made_up_sweep(tmp_path, "one")
    other = run_made_up_sweep(tmp_path, "other", overrides=["training.steps=80"])
    assert report.main([str(one), str(other)]) == 0
    assert "one has training.steps = 60, not 80 as other" in capsys.readouterr().out


def run_half_stopped_sweep(directory, name):
    """Write a ledger whose odd trials were stopped at a third of the completions."""
    halving = ["search.scheduler={type: halving}", "search.budget.completions=64000"]
    spec = load_code_spec(directory, ["search.trials=12", *halving])
    spec = spec.model_copy(update={"name": name})
    with Ledger.open(spec) as ledger:
        for number in range(12):
            params = spec.space.complete_baseline({"reward_weights.format": 0.06 + 0.1 * number})
            ledger.start(params, "search", "startup", seed=number)
            outcome = build_outcome((number + 1) / 14, 1 - (number + 1) / 14, 0.5)
            if number % 2:
                ledger.prune(number, "dominated", Cost(outcome.cost.completions // 10))
            else:
                ledger.complete(number, outcome)
    return spec.directory


def test_stopped_trials_and_saved_completions_are_reported(tmp_path, capsys):
    fifo = ["search.scheduler={type: fifo}"]
    one = run_half_stopped_sweep(tmp_path, "one")
    other, third = (run_made_up_sweep(tmp_path, n, overrides=fifo) for n in ("other", "third"))
    assert report.main([str(one), str(other)]) == 0
    printed = capsys.readouterr().out
    assert "one has search.scheduler = " in printed
    assert "6 of one and 0 of other were stopped early" in printed
    assert "A configuration of other took 640 completions on average, one of one 352" in printed
    assert report.main([str(other), str(third)]) == 0
    printed = capsys.readouterr().out
    assert not any(word in printed for word in ("search.scheduler", "stopped early", "on average"))


def test_a_name_under_runs_is_enough(tmp_path, capsys, monkeypatch):
    run_made_up_sweep(tmp_path / "runs", "one")
    run_made_up_sweep(tmp_path / "runs", "other")
    monkeypatch.chdir(tmp_path)
    assert compare.main(["one", "other"]) == 0
    assert "no significant difference" in capsys.readouterr().out
    assert report.main(["one"]) == 0


def test_sweeps_that_cannot_be_compared_are_refused(tmp_path):
    for name, changes in {
        "one": {},
        "other": {"overrides": ["objectives.format.reference=0.1"]},
        "none": {"trials": 0},
    }.items():
        run_made_up_sweep(tmp_path, name, **changes)
    one, other, none = (str(tmp_path / name) for name in ("one", "other", "none"))
    modes = ["--modes", "gdpo", "grpo"]
    for words, message in (
        ([one, other], r"objectives.format = .*reference: 0"),
        ([one, one], "are the same sweep"),
        ([one, "--modes", "gdop", "grpo"], "did you mean 'gdpo'"),
        ([one, "--modes", "gdpo", "gdpo"], "name two different modes"),
        ([none, *modes], "it has none yet"),
        ([one, none], "none cannot be compared: no configuration of it"),
        ([one, ""], "no sweep in"),
        ([one, other, *modes], "name two sweeps, or one"),
        ([one, other, "--pick", "knee"], "no effect on a comparison"),
        ([one, other, "--sync"], "no effect on a comparison"),
    ):
        with pytest.raises(UsageError, match=message):
            report.main(words)
