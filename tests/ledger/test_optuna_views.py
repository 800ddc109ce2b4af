"""Optuna's plots and its dashboard show the names of a sweep and its values on test prompts."""

import json

import optuna
import pytest

from gdpo_tune import load_sweep
from gdpo_tune.ledger import Ledger
from tests.support.tuning import build_outcome, load_code_spec


def read_study(journal):
    """Read a journal as `optuna-dashboard` does, without this package."""
    backend = optuna.storages.journal.JournalFileBackend(str(journal))
    storage = optuna.storages.JournalStorage(backend)
    (found,) = storage.get_all_studies()
    return optuna.load_study(study_name=found.study_name, storage=storage)


def test_a_study_has_the_names_of_its_sweep_and_objectives_and_values_on_test_prompts(tmp_path):
    spec = load_code_spec(tmp_path)
    with Ledger.open(spec) as ledger:
        params = ledger.spec.space.complete_baseline({})
        ledger.start(params, "search", "model", seed=1)
        ledger.complete(0, build_outcome(0.6, test_shift=0.05))
    study = read_study(spec.directory / "ledger.journal")
    assert study.study_name == spec.name
    assert study.metric_names == list(spec.objectives)
    shown = {key: v for key, v in study.trials[0].user_attrs.items() if key.startswith("test/")}
    assert shown == pytest.approx(
        {"test/correctness": 0.65, "test/format": 0.55, "test/length": 0.55}
    )
    with Ledger.open(spec) as ledger:  # nothing is named again
        assert ledger.get_records()[0].test["correctness"].mean == pytest.approx(0.65)
    assert (spec.directory / "ledger.journal").read_text().count("metric_names") == 1


def test_a_renamed_sweep_keeps_its_study(tmp_path):
    spec = load_code_spec(tmp_path)
    with Ledger.open(spec) as ledger:
        ledger.start(ledger.spec.space.complete_baseline({}), "search", "model", seed=1)
    spec.directory.rename(tmp_path / "renamed")
    renamed = spec.model_copy(update={"name": "renamed"})
    with Ledger.open(renamed) as ledger:
        assert len(ledger.get_records()) == 1
    lines = (tmp_path / "renamed" / "ledger.journal").read_text().splitlines()
    assert [json.loads(line)["op_code"] for line in lines].count(0) == 1


def test_a_copy_of_the_study_has_the_names(tmp_path):
    spec = load_code_spec(tmp_path)
    with Ledger.open(spec) as ledger:
        for number in range(3):
            ledger.start(ledger.spec.space.complete_baseline({}), "search", "model", seed=number)
            ledger.complete(number, build_outcome(0.6 - 0.1 * number, 0.1 * number))
    study = load_sweep(str(spec.directory)).study
    figure = optuna.visualization.plot_pareto_front(study)
    assert figure.layout.scene.xaxis.title.text == "correctness"
