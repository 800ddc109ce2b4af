"""MLflow's own variables stand in for keys of `tracking` that a file does not have.

https://mlflow.org/docs/latest/api_reference/cli.html: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME.
"""

import pytest

from gdpo_tune.clusters.backends.submit import explain_lost_tracking
from gdpo_tune.core.errors import SpecError
from gdpo_tune.ledger.opening import write_spec
from gdpo_tune.report import _load_named as load_for_report
from gdpo_tune.report import build_parser
from gdpo_tune.spec import load_spec
from gdpo_tune.spec.dry_run import render_dry_run
from gdpo_tune.spec.load import keep_recorded_tracking
from tests.support.spec_cases import GOOD

URI, NAME = "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for variable in (URI, NAME):
        monkeypatch.delenv(variable, raising=False)

    def load(*overrides, text=GOOD):
        (tmp_path / "sweep.yaml").write_text(text)
        return load_spec("sweep.yaml", overrides)

    return load


def get_places(spec):
    return spec.tracking.uri, spec.tracking.experiment


def test_variables_stand_in_for_keys_alone(load, monkeypatch):
    plain = load()
    monkeypatch.setenv(URI, "http://host:5000")
    monkeypatch.setenv(NAME, "team")
    spec = load()
    assert get_places(spec) == ("http://host:5000", "team")
    assert spec.compute_identity() == plain.compute_identity()
    assert get_places(load("tracking.uri=http://other:1")) == ("http://other:1", "team")
    assert get_places(load("tracking={}")) == ("http://host:5000", "team")
    monkeypatch.setenv(URI, "")  # as if it were not set, as in MLflow
    monkeypatch.delenv(NAME)
    assert load() == plain


def test_the_dry_run_says_where_each_comes_from(load, monkeypatch):
    text = GOOD.replace("search:", "tracking: {experiment: mine}\nsearch:")
    line = text.splitlines().index("tracking: {experiment: mine}") + 1
    monkeypatch.setenv(URI, "http://me:secret@host:5000")
    shown = render_dry_run(load(text=text))
    place = f"http://me:***@host:5000 ({URI}), experiment mine (sweep.yaml:{line})"
    assert f"# Tracking: {place}" in shown


def test_a_variable_of_no_use_is_named_in_the_refusal(load, monkeypatch):
    monkeypatch.setenv(URI, "file:./mlruns")
    with pytest.raises(SpecError, match=f"{URI}: tracking.uri = file:./mlruns: not the address"):
        load()
    with pytest.raises(SpecError, match=r"sweep\.yaml:14: tracking = 3"):
        load(text=GOOD.replace("search:", "tracking: 3\nsearch:"))


def test_a_password_of_a_variable_reaches_no_file(load, monkeypatch, tmp_path):
    monkeypatch.setenv(URI, "http://me:secret@host:5000")
    spec = load()
    spec.directory.mkdir(parents=True)
    write_spec(spec)
    file = spec.directory / "spec.yaml"
    assert "http://me:***@host:5000" in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o644 & ~0o022 | 0o044
    again = load_spec(file)
    assert again.tracking.uri == spec.tracking.uri
    assert "secret" not in again.dump_yaml()
    monkeypatch.setenv(URI, "http://me:other@elsewhere:5000")
    assert load_spec(file).tracking.uri == "http://me:***@host:5000"


def test_later_commands_use_what_the_sweep_began_with(load, monkeypatch, capsys):
    monkeypatch.setenv(URI, "http://first:5000")
    spec = load()
    assert keep_recorded_tracking(spec) == spec, "a sweep that begins has no record"
    spec.directory.mkdir(parents=True)
    write_spec(spec)
    for change in ("http://me:secret@second:5000", ""):
        monkeypatch.setenv(URI, change)
        capsys.readouterr()
        kept = keep_recorded_tracking(load())
        assert get_places(kept) == ("http://first:5000", "sweep")
        told = capsys.readouterr().err
        assert told.startswith(
            "note: sweep keeps tracking.uri = http://first:5000, as it began, not "
        )
        assert (f"http://me:***@second:5000 ({URI})" if change else "mlflow.db (default)") in told
        assert kept.tracking.origins["uri"].startswith("runs/sweep/spec.yaml:")
    assert keep_recorded_tracking(load("tracking.uri=http://x")).tracking.uri == "http://x"
    options = build_parser().parse_args(["sweep.yaml", "--sync"])
    assert get_places(load_for_report(options)[0]) == ("http://first:5000", "sweep")
    assert get_places(load_spec("runs/sweep/spec.yaml")) == ("http://first:5000", "sweep")


def test_a_variable_of_this_machine_does_not_reach_a_job(load, monkeypatch):
    monkeypatch.setenv(URI, "http://host:5000")
    assert explain_lost_tracking(load()).startswith(URI)
    assert explain_lost_tracking(load("tracking.uri=http://host:5000")) == ""


@pytest.mark.parametrize(("uri", "most"), [("sqlite:///x.db", 500), ("postgresql://h/db", 256)])
def test_an_experiment_whose_name_the_store_cannot_hold_is_refused(load, uri, most):
    """MLflow's `MAX_EXPERIMENT_NAME_LENGTH`, and `experiments.name VARCHAR(256)`."""
    written = f"tracking={{uri: '{uri}', experiment: {'x' * most}"
    load(written + "}")
    with pytest.raises(SpecError, match=f"{most + 1} characters; MLflow takes at most {most} ther"):
        load(written + "x}")
