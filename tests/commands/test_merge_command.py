"""`python -m gdpo_tune.merge`: choices, requests, the session that it runs, refusals."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import load_file

import gdpo_tune.sweep
from gdpo_tune import merge, steer
from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.events import RecordedRequest, RequestEffect
from gdpo_tune.core.trials import Cost, Part
from gdpo_tune.ledger import Ledger
from gdpo_tune.ledger.requests import list_pending
from gdpo_tune.results.open_sweep import find_sweep
from gdpo_tune.spec import load_spec
from gdpo_tune.training import train
from gdpo_tune.training.checkpoints import write_checkpoint
from gdpo_tune.tuning.plan import is_finished
from gdpo_tune.tuning.retention import delete_unkept_checkpoints
from tests.support.paths import ROOT
from tests.support.search_driver import Driver
from tests.support.tuning import build_measurement, build_outcome, load_code_spec

VALUES = {1: (0.9, 0.5, 0.1), 2: (0.6, 0.7, 0.5), 3: (0.1, 0.9, 0.9)}
"""Trial -> correctness, format and length."""
TOWARD = ["--toward", "length >= 0.6"]
SPENT = ["constraints={}", "search.budget.trials=4", "search.replicates.max_runs=0"]


class FakeSession(Driver):
    """A session of the sweep in which a merge has the weighted means of its parts."""

    dies = False
    """True: it is killed while the merge is evaluated."""

    def advance(self, trial_id: str) -> None:
        config = self.in_flight[trial_id]
        if self.dies:
            raise KeyboardInterrupt
        parts = [(VALUES[int(p.checkpoint.parent.name)], p.weight) for p in config.parts]
        means = [sum(values[i] * weight for values, weight in parts) for i in range(3)]
        kept = write_checkpoint(config.directory, 0, Cost(), lambda d: None).path
        self.end(trial_id, outcome=replace(build_outcome(*means), checkpoint=kept))


@pytest.fixture
def sessions(monkeypatch):
    """Arguments of the sessions that were run; each is a fake one in this process."""
    started = []

    def run(arguments):
        started.append(arguments)
        file, _, name, _, storage = arguments
        spec = load_spec(file, [storage], name)
        with Ledger.open(spec) as ledger:
            number = ledger.begin_session(0.0, 1, {})
            FakeSession(ledger).run()
            delete_unkept_checkpoints(ledger)
            ledger.end_session(number, "the budget of 4 trials is spent")
        return 0

    monkeypatch.setattr(gdpo_tune.sweep, "main", run)
    monkeypatch.setattr(FakeSession, "dies", False)
    return started


def build_sweep(directory, overrides):
    """Write a sweep with three trials that kept their policies, and checkpoint 2@30."""
    spec = load_code_spec(directory, overrides)
    with Ledger.open(spec) as ledger:
        session = ledger.begin_session(0.0, 1, {})
        params = spec.space.complete_baseline({})
        ledger.start(params, "untrained", "baseline", seed=1)
        ledger.complete(0, build_outcome(0.1, 0.1, 0.1))
        for number, values in VALUES.items():
            ledger.start(params, "search", "model", seed=70 + number)
            names = dict(zip(("correctness", "format", "length"), values, strict=True))
            for step in (30, 60):
                ledger.record_rung(number, build_measurement(step, **names))
                if step == 60 or number == 2:
                    place = ledger.get_trial_directory(number)
                    kept = write_checkpoint(place, step, Cost(), lambda d: None)
            ledger.complete(number, replace(build_outcome(*values), checkpoint=kept.path))
        ledger.end_session(session, "the budget of 4 trials is spent")
    return spec


@pytest.fixture
def spec(tmp_path, monkeypatch):
    """A sweep that has finished."""
    monkeypatch.chdir(tmp_path)
    return build_sweep(tmp_path / "runs", SPENT)


def run(spec, *words):
    return merge.main([str(spec.directory), *words])


def list_merges(spec):
    return [r for r in find_sweep(str(spec.directory)).records if r.role == "merge"]


def list_files(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_finished_sweep_evaluates_the_merge_in_a_session(spec, sessions, capsys):
    assert run(spec, *TOWARD) == 0
    (record,) = list_merges(spec)
    assert (record.state, record.proposer) == ("complete", "candidate")
    assert record.test["length"].mean >= 0.6
    assert record.checkpoint is not None, "it stays although keep: front would not keep it"
    assert record.checkpoint.is_dir()
    printed = capsys.readouterr().out
    assert printed.startswith("merge: 0.")
    assert "merge, predicted on validation" in printed
    assert "merge, test" in printed
    assert "3@60, test" in printed
    assert "length >= 0.600 holds on test prompts" in printed
    assert printed.endswith(f"policy: {record.checkpoint}\n")
    assert len(sessions) == 1
    with Ledger.open(spec, read_only=True) as ledger:
        assert is_finished(ledger.spec, ledger.get_records()), "it has finished again"


def test_each_call_evaluates_another_merge_and_learns_from_those_before(spec, sessions, capsys):
    for _ in range(3):
        capsys.readouterr()
        assert run(spec, *TOWARD) == 0
    earlier = [record.name for record in list_merges(spec)[:2]]
    (line,) = [s for s in capsys.readouterr().out.splitlines() if "meet it on test" in s]
    assert {*earlier} <= {*line.partition(": ")[2].split(", ")}, "what meets the target is named"
    assert len({record.parts for record in list_merges(spec)}) == 3


def test_given_weights_are_merged_without_a_choice_and_once(spec, sessions, capsys):
    for _ in range(2):
        assert run(spec, "--weights", "3=0.75,2@30=0.25") == 0
    (record,) = list_merges(spec)
    assert record.parts == (Part(2, 30, 0.25), Part(3, 60, 0.75))
    assert len(sessions) == 1, "the second call finds its policy"
    assert capsys.readouterr().out.count(f"policy: {record.checkpoint}") == 2


def test_a_merge_that_is_killed_goes_on(spec, sessions, monkeypatch):
    monkeypatch.setattr(FakeSession, "dies", True)
    with pytest.raises(KeyboardInterrupt):
        run(spec, *TOWARD)
    (record,) = list_merges(spec)
    assert record.state == "running"
    monkeypatch.setattr(FakeSession, "dies", False)
    assert run(spec, *TOWARD) == 0
    (again,) = list_merges(spec)
    assert (again.state, again.parts, again.request) == ("complete", record.parts, record.request)


def test_a_request_that_no_session_has_taken_is_not_left_twice(spec, monkeypatch):
    monkeypatch.setattr(gdpo_tune.sweep, "main", MagicMock(side_effect=KeyboardInterrupt))
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run(spec, *TOWARD)
    assert len(list_pending(spec.directory)) == 1


def test_an_interrupted_sweep_gets_the_request_and_is_not_run(tmp_path, sessions, capsys):
    spec = build_sweep(tmp_path, ["constraints={}"])
    assert run(spec, *TOWARD) == 0
    assert "applied when the sweep is run again" in capsys.readouterr().out
    assert (len(list_pending(spec.directory)), sessions) == (1, [])


def test_a_paused_sweep_keeps_the_request_until_it_is_resumed(spec, sessions, capsys):
    pause = ("p", "pause", {}, "anna", 0.0, 1.0, "applied", "", RequestEffect(paused=True))
    with Ledger.open(spec) as ledger:
        ledger.record_request(RecordedRequest(*pause))
    assert run(spec, *TOWARD) == 0
    assert "anna has paused the sweep" in capsys.readouterr().out
    assert sessions == []
    assert steer.main([str(spec.directory), "resume", "--no-wait"]) == 0
    assert run(spec, *TOWARD) == 0
    assert [record.state for record in list_merges(spec)] == ["complete"]


def test_a_dry_run_prints_the_choice_and_its_prediction_alone(spec, sessions, tmp_path, capsys):
    before = list_files(tmp_path)
    assert run(spec, *TOWARD, "--dry-run") == 0
    printed = capsys.readouterr().out
    assert "merge, predicted on validation" in printed
    assert "3@60, test" in printed
    assert (list_files(tmp_path), sessions) == (before, [])


def test_preferences_choose_a_merge(spec, sessions):
    assert run(spec, "--prefer", "length=3,correctness=1") == 0
    (record,) = list_merges(spec)
    assert record.parts[-1].trial == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--toward", "lenght >= 0.6"], "did you mean 'length'"),
        (["--prefer", "corectness=1"], "did you mean 'correctness'"),
        (
            ["--toward", "length >= 1.5"],
            r"no merge of the policies of .* is expected to meet this: the closest, "
            r"2@60=0\.05,3@60=0\.95, is expected to have length 0\.\d+ ± 0\.\d+ on validation "
            r"prompts\n    fix: loosen length >= 1\.5, .* by python -m gdpo_tune\.merge .* "
            r"--weights 2@60=0\.05,3@60=0\.95$",
        ),
        (["--weights", "1=0.3,2=0.6"], r"must sum to 1: 0\.3 \+ 0\.6 = 0\.9; divide each"),
        (["--weights", "1=0.5,2=x"], "a number above 0"),
    ],
)
def test_a_merge_that_cannot_be_carried_out_writes_nothing(
    spec, sessions, tmp_path, words, message
):
    before = list_files(tmp_path)
    with pytest.raises(UsageError, match=message):
        run(spec, *words)
    assert (list_files(tmp_path), sessions) == (before, [])


def test_a_policy_that_is_gone_is_no_parent(spec, sessions):
    shutil.rmtree(spec.directory / "trials" / "3" / "checkpoint-60")
    with pytest.raises(UsageError, match=r"3: there is no such policy; .* the sweep has no policy"):
        run(spec, "--weights", "1=0.5,3=0.5")
    assert run(spec, "--toward", "length >= 0.3") == 0, "the others can be merged"
    assert all(part.trial != 3 for record in list_merges(spec) for part in record.parts)


@pytest.mark.parametrize(("left", "message"), [(0, "no policies"), (1, "one policy")])
def test_a_sweep_without_two_policies_is_refused(spec, left, message):
    for number in list(VALUES)[left:]:
        shutil.rmtree(spec.directory / "trials" / str(number))
    with pytest.raises(UsageError, match=rf"\(keep: front\) has {message} near its front"):
        run(spec, *TOWARD)


@pytest.mark.system
@pytest.mark.slow
def test_a_real_merge_has_the_mean_of_the_weights(tmp_path):
    """By a session of the sweep through Ray, as a person runs the command."""
    lengths = "steps: 2, completions_per_step: 8, max_completion_length: 16, length_limit: 8"
    prompts = "train_prompts: 8, validation_prompts: 4, test_prompts: 4"
    only = "replicates: {max_runs: 0}, merges: {budget: 0}, checkpoints: {budget: 0}"
    short = [f"storage={tmp_path / 'runs'}", "constraints={}", "space.group_size=4"]
    short += [f"training={{{lengths}, {prompts}}}"]
    short += [f"search={{trials: 2, budget: {{trials: 2}}, {only}}}"]
    spec = load_spec(ROOT / "search_spaces" / "math.yaml", short, "sweep")
    with Ledger.open(spec) as ledger:
        session = ledger.begin_session(0.0, 1, {})
        for number in range(2):
            params = spec.space.complete_baseline({"learning_rate": 3e-3, "group_size": 4})
            ledger.start(params, "search", "model", seed=number)
            config = spec.build_trial_config(params, number, ledger.get_trial_directory(number))
            outcome = train(config, resume=None, report=ledger_report(ledger, number))
            ledger.complete(number, outcome)
        ledger.end_session(session, "the budget of 2 trials is spent")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_ADDRESS")}
    words = [sys.executable, "-m", "gdpo_tune.merge", str(spec.directory)]
    done = subprocess.run(
        [*words, "--weights", "0=0.25,1=0.75"],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (record,) = list_merges(spec)
    assert f"policy: {record.checkpoint}" in done.stdout
    trained = [spec.directory / "trials" / str(number) / "checkpoint-2" for number in range(2)]
    places = [*trained, record.checkpoint]
    first, second, merged = (load_file(place / "model.safetensors") for place in places)
    means = {name: 0.25 * first[name] + 0.75 * second[name] for name in merged}
    assert all(torch.allclose(merged[name], means[name], atol=1e-7) for name in merged)
    assert any(not torch.equal(first[n], second[n]) for n in merged)
    assert set(record.test) >= set(spec.objectives)


def ledger_report(ledger, number):
    """Return a callback that records the rungs of a training."""

    def report(measurement, path):
        if measurement.has_validation:
            ledger.record_rung(number, measurement)

    return report
