"""`python -m gdpo_tune.evaluate`: policies on the test prompts of a sweep."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from gdpo_tune import evaluate
from gdpo_tune.core.content import Fact, measure_content
from gdpo_tune.core.errors import GdpoTuneError, UsageError
from gdpo_tune.ledger import Ledger
from gdpo_tune.spec import SweepSpec
from gdpo_tune.training import train
from tests.support.tuning import SPACE, load_code_spec

SMALL = [
    *("training.steps=2", "training.completions_per_step=16", "training.evaluate_every=2"),
    *("training.validation_prompts=4", "training.test_prompts=8"),
]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> SweepSpec:
    """A sweep whose trial was trained for real, beside the untrained policy."""
    spec = load_code_spec(tmp_path_factory.mktemp("sweep"), SMALL)
    with Ledger.open(spec) as ledger:
        params = spec.space.complete_baseline({})
        for number, role in enumerate(("untrained", "search")):
            ledger.start(params, role, "baseline", seed=70 + number)
            directory = ledger.get_trial_directory(number)
            config = spec.build_trial_config(params, 70 + number, directory)
            config = replace(config, train=role == "search")
            ledger.complete(number, train(config, resume=None, report=lambda *_: None))
    return spec


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # the command writes it


def run(out: Path, *words: str) -> dict[str, dict[str, float]]:
    assert evaluate.main([*words, "--json", str(out)]) == 0
    return json.loads(out.read_text())["test"]


@pytest.mark.system
def test_the_seed_of_a_trial_repeats_its_values(spec, tmp_path, capsys):
    with Ledger.open(spec, read_only=True) as ledger:
        recorded = ledger.get_records()[1].test
    again = run(tmp_path / "again.json", f"{spec.directory}:1", "--seed", "71")
    assert again == {name: asdict(estimate) for name, estimate in recorded.items()}
    printed = capsys.readouterr().out
    assert "against the untrained policy" in printed
    assert "…" not in printed  # a terminal of 80 columns cuts nothing
    fresh = run(tmp_path / "fresh.json", f"{spec.directory}:1")
    assert fresh != again
    assert "--seed 71 repeats the values that the sweep has of it" in capsys.readouterr().out


def test_a_directory_and_a_name_are_policies_too(spec, tmp_path, capsys):
    with Ledger.open(spec, read_only=True) as ledger:
        checkpoint = ledger.get_records()[1].checkpoint
    trained = run(tmp_path / "a.json", str(checkpoint), str(spec.directory))
    plain = run(tmp_path / "b.json", "embedded", str(spec.directory))
    assert trained != plain
    sets = [word for override in SMALL for word in ("--set", override)]
    capsys.readouterr()
    assert run(tmp_path / "c.json", "embedded", str(SPACE), *sets) == plain
    assert "against" not in capsys.readouterr().out  # a file has no front


def test_what_decides_values_and_has_changed_since_the_sweep_is_named(spec, tmp_path, capsys):
    with Ledger.open(spec) as ledger:
        facts = measure_content(spec)
        ledger.compare_content({**facts, "task mine.py": Fact("0" * 12)})
    run(tmp_path / "out.json", f"{spec.directory}:1")
    assert "warning: what decides results is not what it was" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["embedded"], "embedded: on which prompts"),
        (["{sweep}"], "a sweep, not a policy"),
        (["{sweep}:9"], "trial 9"),
        (["{sweep}:1", "{sweep}"], "on the prompts of its own sweep"),
        (["embedded", "nosuch.yaml"], "no such file"),
        (["embedded", "{sweep}", "--set", "policy=embedded_math"], "--set policy: the policy is"),
        (["{sweep}:1", "--set", "training.length_limit=5"], "--set changes what is compared"),
        (["{sweep}:1", "--set", "space.group_size=4"], "--set changes what is compared"),
        (["{sweep}:1", "--set", "model.lora_rank=4"], "--set changes what is compared"),
        (["{sweep}:1", "--json", "no/such/out.json"], "its directory is missing"),
        (["no-such-policy", "{sweep}"], "no such directory and not a Hub id"),
        (["embedded", "no/such/sweep"], "there is no sweep in no/such/sweep"),
    ],
)
def test_what_cannot_be_evaluated_says_why(spec, words, message):
    with pytest.raises(GdpoTuneError, match=message):
        evaluate.main([word.format(sweep=spec.directory) for word in words])


def test_a_policy_that_was_not_kept_says_how_to_make_it_again(tmp_path):
    spec = load_code_spec(tmp_path, SMALL)
    with Ledger.open(spec) as ledger:
        for number, role in enumerate(("untrained", "search")):
            ledger.start(spec.space.complete_baseline({}), role, "baseline", seed=number)
            ledger.fail(number, "stopped")
    with pytest.raises(UsageError, match=r"python -m gdpo_tune\.train --from"):
        evaluate.main([f"{spec.directory}:1"])
