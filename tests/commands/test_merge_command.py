"""`python -m gdpo_tune.merge`: choices, directories, refusals and resumption."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import gdpo_tune.spec.machine
import gdpo_tune.training
from gdpo_tune import cli, merge
from gdpo_tune.core.errors import PickError, UsageError
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.core.trials import Cost, Outcome, Part
from gdpo_tune.ledger import Ledger
from gdpo_tune.results.merge_request import MERGE_FILE
from gdpo_tune.spec import SweepSpec, load_spec
from gdpo_tune.training.checkpoints import read_checkpoint, write_checkpoint
from tests.support.paths import ROOT
from tests.support.tuning import build_measurement, build_outcome, load_code_spec

VALUES = {1: (0.9, 0.5, 0.1), 2: (0.6, 0.7, 0.5), 3: (0.1, 0.9, 0.9)}
"""Trial -> correctness, format and length."""
TOWARD = ["--toward", "length >= 0.6"]
COST = Cost(cpu_seconds=1.5, evaluation_completions=256)
TRAIN = gdpo_tune.training.train


class FakeMerging:
    """A fake `train()`: the values of a merge are the weighted means of its parents'."""

    def __init__(self) -> None:
        self.configs: list[TrialConfig] = []
        self.splits: list[str] = []
        self.actions: dict[int, Callable[[], None]] = {}
        self.shift = 0.0

    def __call__(self, config, *, resume, report, with_test) -> Outcome:
        assert not config.train
        self.configs.append(config)
        self.splits.append(("validation " if resume is None else "") + "test" * with_test)
        self.actions.pop(len(self.configs), lambda: None)()
        parts = [(VALUES[int(p.checkpoint.parent.name)], p.weight) for p in config.parts]
        means = [sum(v[i] * weight for v, weight in parts) for i in range(3)]
        outcome = build_outcome(means[0], means[1], means[2] + self.shift)
        if resume is None:
            held = outcome.validation
            resume = write_checkpoint(config.directory, 0, COST, lambda d: None, held).path
        spent = read_checkpoint(resume).cost.evaluation_completions + 512 * with_test
        cost = Cost(cpu_seconds=1.5 + 3 * with_test, evaluation_completions=spent)
        return Outcome(outcome.validation, outcome.test if with_test else {}, cost, resume, {})


@pytest.fixture
def fake(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gdpo_tune.spec.machine, "check_resources", lambda spec: None)
    monkeypatch.setattr(cli, "preflight", lambda spec, tracked: {"sandbox": "fake"})
    merging = FakeMerging()
    monkeypatch.setattr(gdpo_tune.training, "train", merging, raising=False)
    return merging


@pytest.fixture
def sweep(tmp_path) -> SweepSpec:
    """A sweep with the untrained policy, three trials that kept theirs, and checkpoint 2@30."""
    spec = load_code_spec(tmp_path / "runs", ["constraints={}"])
    with Ledger.open(spec) as ledger:
        params = spec.space.complete_baseline({})
        ledger.start(params, "untrained", "baseline", seed=1)
        ledger.complete(0, build_outcome(0.1, 0.1, 0.1))
        for number, values in VALUES.items():
            ledger.start(params, "search", "model", seed=70 + number)
            names = dict(zip(("correctness", "format", "length"), values, strict=True))
            ledger.record_rung(number, build_measurement(30, **names))
            ledger.record_rung(number, build_measurement(60, **names))
            steps = (30, 60) if number == 2 else (60,)
            for step in steps:
                kept = write_checkpoint(
                    ledger.get_trial_directory(number), step, Cost(), lambda d: None
                )
            ledger.complete(number, replace(build_outcome(*values), checkpoint=kept.path))
        part = Part(2, 30, 1.0)
        ledger.start(params, "checkpoint", "candidate", seed=80, parts=[part])
        ledger.complete(4, build_outcome(0.55, 0.65, 0.45))
    return spec


def run(spec: SweepSpec, *words: str) -> int:
    return merge.main([str(spec.directory), *words])


def read_file(directory: Path) -> dict:
    return json.loads((directory / MERGE_FILE).read_text())


def list_files(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_the_best_of_a_few_merges_is_written_with_all_that_repeats_it(fake, sweep, capsys):
    before = list_files(sweep.directory)
    assert run(sweep, *TOWARD) == 0
    assert fake.splits == ["validation "] * 4 + ["test"]
    place = sweep.directory.with_name("sweep-merge-length-ge-0.6")
    assert {path.name for path in place.iterdir()} == {"checkpoint-0", "merge.json", "merge.lock"}
    read_checkpoint(place / "checkpoint-0")
    written = read_file(place)
    assert len(written["evaluations"]) == 4
    result = written["result"]
    chosen = written["evaluations"][result["index"]]
    assert chosen["validation"]["length"][0] >= 0.6
    assert set(chosen["prediction"]) == {"correctness", "format", "length"}
    others = [e["validation"] for e in written["evaluations"] if e["validation"]["length"][0] > 0.6]
    assert chosen["validation"]["correctness"][0] >= max(v["correctness"][0] for v in others) - 0.02
    parents = result["parents"]
    assert sum(parent["weight"] for parent in parents) == pytest.approx(1)
    assert all(Path(parent["policy"]).is_dir() for parent in parents)
    assert parents[0]["source"] == f"{sweep.directory}:{parents[0]['trial']}"
    assert result["cost"]["evaluation_completions"] == 4 * 256 + 512
    assert result["cost"]["cpu_seconds"] == pytest.approx(3 * 1.5 + 4.5)
    assert (written["request"]["toward"], written["request"]["seed"]) == ("length >= 0.6", 0)
    printed = capsys.readouterr().out
    assert "merge, predicted on validation" in printed
    assert "length >= 0.6 holds on test prompts" in printed
    assert "1,536 completions in evaluations" in printed
    assert f"policy:  {place / 'checkpoint-0'}" in printed
    assert list_files(sweep.directory) == before, "the sweep stays as it is"


def test_the_same_command_finds_it_done(fake, sweep, capsys):
    assert run(sweep, *TOWARD) == 0
    first = capsys.readouterr().out
    assert run(sweep, *TOWARD) == 0
    again = capsys.readouterr().out
    assert len(fake.configs) == 5
    assert again.startswith("already finished: nothing was started\n")
    assert first.splitlines()[-12:] == again.splitlines()[-12:]
    with pytest.raises(UsageError, match="has the best of 4 evaluations already"):
        run(sweep, *TOWARD, "--evaluations", "5")


def test_a_search_that_runs_out_of_merges_is_done_too(fake, sweep, capsys):
    for number in (1, 3):
        shutil.rmtree(sweep.directory / "trials" / str(number))
    words = ["--prefer", "length=1", "--evaluations", "30", "--out", "m"]
    assert run(sweep, *words) == 0
    assert fake.splits.count("validation ") == 19, "as many pairs of 2@30 and 2"
    assert run(sweep, *words) == 0
    assert "already finished" in capsys.readouterr().out


@pytest.mark.parametrize("killed", [1, 3, 5])
def test_a_merge_that_is_killed_goes_on(fake, sweep, tmp_path, killed):
    def kill():
        raise KeyboardInterrupt

    assert run(sweep, *TOWARD, "--out", "whole") == 0
    fake.actions[5 + killed] = kill
    with pytest.raises(KeyboardInterrupt):
        run(sweep, *TOWARD, "--out", "killed")
    assert run(sweep, *TOWARD, "--out", "killed") == 0
    assert len(fake.configs) == 11, "one evaluation is done again"
    whole, again = read_file(tmp_path / "whole"), read_file(tmp_path / "killed")
    assert whole == again
    assert {path.name for path in (tmp_path / "killed").iterdir()} == {
        "checkpoint-0",
        "merge.json",
        "merge.lock",
    }


def test_only_the_best_policy_so_far_is_on_the_disk(fake, sweep, tmp_path):
    counts = []
    for call in (2, 3, 4, 5):
        fake.actions[call] = lambda: counts.append(len(list(tmp_path.glob("m/merge-*"))))
    assert run(sweep, *TOWARD, "--out", "m") == 0
    assert counts == [1, 1, 1, 1]


def test_a_dry_run_prints_the_choice_and_its_prediction_alone(fake, sweep, tmp_path, capsys):
    before = list_files(tmp_path)
    assert run(sweep, *TOWARD, "--dry-run") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("'length >= 0.6': 0.")
    assert "merge, predicted on validation" in printed
    assert "trial 3, test" in printed
    assert (list_files(tmp_path), fake.configs) == (before, [])


def test_given_weights_are_merged_without_a_choice(fake, sweep, tmp_path):
    assert run(sweep, "--weights", "2@30=0.25,3=0.75", "--out", "m") == 0
    assert fake.splits == ["validation ", "test"]
    first = fake.configs[0]
    assert [(part.checkpoint, part.weight) for part in first.parts] == [
        (sweep.directory.absolute() / "trials" / "2" / "checkpoint-30", 0.25),
        (sweep.directory.absolute() / "trials" / "3" / "checkpoint-60", 0.75),
    ]
    parents = read_file(tmp_path / "m")["result"]["parents"]
    assert [parent["source"].rpartition(":")[2] for parent in parents] == ["2@30", "3"]
    assert parents[0]["step"] == 30


def test_preferences_choose_a_merge_and_name_its_directory(fake, sweep):
    assert run(sweep, "--prefer", "length=3,correctness=1", "--evaluations", "2") == 0
    place = sweep.directory.with_name("sweep-merge-length-3-correctness-1")
    written = read_file(place)
    assert len(written["evaluations"]) == 2
    assert written["result"]["parents"][-1]["trial"] == 3


def test_settings_of_the_file_can_be_overridden_but_not_the_space(fake, sweep):
    overrides = ["--set", "training.test_prompts=32", "--set", "resources.cpus=2"]
    assert run(sweep, *TOWARD, *overrides) == 0
    assert (fake.configs[0].training.test_prompts, fake.configs[0].threads) == (32, 2)
    with pytest.raises(UsageError, match=r"training\.test_prompts = 32, not 256"):
        run(sweep, *TOWARD)
    with pytest.raises(UsageError, match="has no effect"):
        run(sweep, *TOWARD, "--set", "space.group_size=8")


def test_a_parent_that_is_better_alone_is_named(fake, sweep, capsys):
    assert run(sweep, "--prefer", "correctness=1", "--evaluations", "1") == 0
    assert "trial 1 alone meets this better on validation prompts" in capsys.readouterr().out


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--toward", "lenght >= 0.6"], "did you mean 'length'"),
        (["--prefer", "corectness=1"], "did you mean 'correctness'"),
        (
            ["--toward", "length >= 1.5"],
            r"no merge of the policies of .* is expected to meet this: the closest, "
            r"2=0\.05,3=0\.95, is expected to have length 0\.\d+ ± 0\.\d+ on validation prompts\n"
            r"    fix: loosen length >= 1\.5, .* is written by python -m gdpo_tune\.merge .* "
            r"--weights 2=0\.05,3=0\.95$",
        ),
        (["--weights", "1=0.3,2=0.6"], r"sum to 0\.9\n.*--weights 1=0\.3333333333,2=0\.6666666667"),
        (["--weights", "1=1"], "two parts or more"),
        (["--weights", "1=0.5,1@60=0.5"], "1@60 stands twice"),
        (["--weights", "1=0.5,9=0.5"], "has no trial 9; the last one is 4"),
        (["--weights", "1=0.5,1@7=0.5"], "trial 1 has no candidate at step 7"),
        (["--weights", "1=0.5,0=0.5"], "trial 0 is the untrained policy"),
        (["--weights", "1=0.5,knee=0.5"], "the end of a trial or a checkpoint"),
        (["--weights", "1=0.5,2=x"], "a number above 0"),
        ([*TOWARD, "--adapters"], "whole policies"),
    ],
)
def test_a_request_that_cannot_be_carried_out_writes_nothing(fake, sweep, tmp_path, words, message):
    before = list_files(tmp_path)
    with pytest.raises(UsageError, match=message):
        run(sweep, *words)
    assert (list_files(tmp_path), fake.configs) == (before, [])


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--weights", "1=0.5,2=0.5", *TOWARD],
        [*TOWARD, "--evaluations", "0"],
    ],
)
def test_wrong_arguments_are_refused(words, capsys):
    with pytest.raises(SystemExit) as caught:
        merge.main(["runs/code", *words])
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_a_merge_as_a_part_is_refused_with_its_parents(fake, sweep):
    with Ledger.open(sweep) as ledger:
        parts = [Part(1, 60, 0.5), Part(2, 60, 0.5)]
        ledger.start({}, "merge", "candidate", seed=81, parts=parts)
    with pytest.raises(PickError, match=r"merge-5 is a merge: 0\.5 x 1@60 \+ 0\.5 x 2@60\n"):
        run(sweep, "--weights", "merge-5=0.5,3=0.5")


def test_a_parent_that_is_gone_is_named_with_the_command_that_trains_it(fake, sweep):
    shutil.rmtree(sweep.directory / "trials" / "3" / "checkpoint-60")
    command = f"python -m gdpo_tune.train --from {sweep.directory}:3"
    with pytest.raises(UsageError, match="policy of trial 3 was not kept") as caught:
        run(sweep, "--weights", "1=0.5,3=0.5")
    assert str(caught.value).endswith(command)
    assert run(sweep, "--toward", "length >= 0.3", "--out", "m") == 0, "the others can be merged"
    assert all(p.checkpoint.parent.name != "3" for c in fake.configs for p in c.parts)


@pytest.mark.parametrize(("left", "message"), [(0, "no policies"), (1, "one policy")])
def test_a_sweep_without_two_policies_is_refused(fake, sweep, left, message):
    for number in list(VALUES)[left:]:
        shutil.rmtree(sweep.directory / "trials" / str(number))
    with pytest.raises(UsageError, match=rf"\(keep: front\) has {message}\n.*train --from"):
        run(sweep, *TOWARD)


def test_a_sweep_that_has_just_begun_is_refused(fake, tmp_path):
    with Ledger.open(load_code_spec(tmp_path)):
        pass
    with pytest.raises(UsageError, match="let the sweep continue"):
        merge.main([str(tmp_path / "sweep"), *TOWARD])


def test_a_damaged_parent_is_refused_and_nothing_is_left(fake, sweep, tmp_path):
    (sweep.directory / "trials" / "3" / "checkpoint-60" / "complete.json").unlink()
    with pytest.raises(UsageError, match=r"cannot be merged: checkpoint-60 is incomplete .*/3"):
        run(sweep, "--weights", "1=0.5,3=0.5", "--out", "m")
    assert not (tmp_path / "m").exists()


def test_a_wish_that_no_evaluation_meets_is_refused_and_can_go_on(fake, sweep, tmp_path):
    fake.shift = -0.5
    with pytest.raises(UsageError, match=r"was found to meet this: the closest, .*length 0\.\d+"):
        run(sweep, *TOWARD, "--evaluations", "2", "--out", "m")
    assert {p.name for p in (tmp_path / "m").iterdir()} == {"merge.json", "merge.lock"}
    assert read_file(tmp_path / "m")["result"] is None
    fake.shift = 0.2
    assert run(sweep, *TOWARD, "--evaluations", "3", "--out", "m") == 0
    assert fake.splits == ["validation "] * 3 + ["test"]
    assert read_file(tmp_path / "m")["result"]["index"] == 2


def test_another_merge_in_the_same_directory_is_refused(fake, sweep):
    assert run(sweep, *TOWARD, "--out", "m") == 0
    with pytest.raises(UsageError, match=r"another merge: toward = .*0\.6.*, not .*0\.5"):
        run(sweep, "--toward", "length >= 0.5", "--out", "m")


def test_a_damaged_file_of_a_merge_is_refused(fake, sweep, tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / MERGE_FILE).write_text("{}")
    with pytest.raises(UsageError, match=r"merge\.json: it is damaged"):
        run(sweep, *TOWARD, "--out", "m")


# --- real merges ----------------------------------------------------------------------------------


def train_sweep(directory: Path, overrides: list[str]) -> SweepSpec:
    """Train the embedded policy of `math` twice for two steps, and record both trials."""
    short = [
        f"storage={directory}",
        "constraints={}",
        "training={steps: 2, completions_per_step: 8, max_completion_length: 16, "
        "length_limit: 8, train_prompts: 8, validation_prompts: 4, test_prompts: 4}",
        "space.group_size=4",
    ]
    spec = load_spec(ROOT / "search_spaces" / "math.yaml", [*short, *overrides], "sweep")
    with Ledger.open(spec) as ledger:
        for number in range(2):
            rate = {"learning_rate": 3e-3, "group_size": 4}
            params = spec.space.complete_baseline(rate)
            ledger.start(params, "search", "model", seed=number)
            config = spec.build_trial_config(params, number, ledger.get_trial_directory(number))
            ledger.complete(number, TRAIN(config, resume=None, report=lambda *_: None))
    return spec


def test_a_real_merge_has_the_mean_of_the_weights(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    spec = train_sweep(tmp_path / "runs", [])
    assert run(spec, "--weights", "0=0.25,1=0.75", "--out", "m") == 0
    first, second, merged = (
        load_file(directory / "model.safetensors")
        for directory in (
            spec.directory / "trials" / "0" / "checkpoint-2",
            spec.directory / "trials" / "1" / "checkpoint-2",
            tmp_path / "m" / "checkpoint-0",
        )
    )
    assert all(
        torch.allclose(merged[n], 0.25 * first[n] + 0.75 * second[n], atol=1e-7) for n in merged
    )
    assert any(not torch.equal(first[n], second[n]) for n in merged)
    result = read_file(tmp_path / "m")["result"]
    assert result["cost"]["evaluation_completions"] == 2 * 4 * spec.training.samples_per_prompt
    assert set(result["test"]) >= set(spec.objectives)
    assert "trial 1, test" in capsys.readouterr().out


def test_a_real_merge_of_adapters_stays_a_set_of_adapters(tmp_path, monkeypatch):
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    spec = train_sweep(tmp_path / "runs", ["model.lora_rank=2"])
    words = ["--prefer", "length=1", "--evaluations", "2", "--adapters", "--out", "m"]
    assert run(spec, *words) == 0
    names = {path.name for path in (tmp_path / "m").iterdir()}
    assert "adapters" in names
    assert not [name for name in names if name.startswith("checkpoint-")]
    mixture = json.loads((tmp_path / "m" / "adapters" / "mixture.json").read_text())
    parents = read_file(tmp_path / "m")["result"]["parents"]
    assert [entry["weight"] for entry in mixture] == [parent["weight"] for parent in parents]
    assert all(
        (tmp_path / "m" / "adapters" / entry["adapter"] / "adapter_model.safetensors").is_file()
        for entry in mixture
    )
