"""The start of a sweep: published points and the trials of earlier sweeps."""

import csv

import pytest

from gdpo_tune.core import registry
from gdpo_tune.core.errors import SpecError
from gdpo_tune.core.trials import Part, TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.spec import load_spec
from gdpo_tune.spec.space import Space, Uniform
from gdpo_tune.spec.spec_warnings import list_warnings
from gdpo_tune.tuning.proposals import SamplerView, load_earlier_trials
from tests.support.search_driver import Driver
from tests.support.tuning import build_outcome, build_trade_off, load_code_spec

DECAY = "space.trl.weight_decay=[0, 0.1]"
QUICK = ["search.sampler=random", "search.trials=4", "search.replicates.max_runs=0"]


def run(spec):
    with Ledger.open(spec) as ledger:
        Driver(ledger).run()
        return ledger.get_records()


@pytest.fixture
def earlier(tmp_path):
    """A finished sweep."""
    spec = load_code_spec(tmp_path / "earlier", QUICK)
    run(spec)
    return spec


@pytest.fixture
def load_warm(tmp_path):
    """A function that loads the spec of a sweep that learns from an earlier one, or a table."""

    def load(source, *overrides):
        return load_code_spec(tmp_path / "new", [f"search.warm_start=[{source}]", *overrides])

    return load


def view_earlier(spec, records=None):
    """Return the sampler's view of earlier trials."""
    view = SamplerView(spec)
    view.load_earlier(load_earlier_trials(spec) if records is None else records)
    return view


def test_trials_of_before_have_the_values_of_the_grid(tmp_path, load_warm, monkeypatch):
    """A ledger may hold 0.1 + 2 * 0.1, which is not 0.3 in floats: it opens, goes on and pools."""
    grid = "space.temperature={range: [0.1, 0.7], step: 0.1}"
    spec = load_code_spec(tmp_path / "earlier", [*QUICK, grid])
    computed = [0.1 + 2 * 0.1, 0.1 + 6 * 0.1]
    with monkeypatch.context() as before, Ledger.open(spec) as ledger:
        before.setattr(Space, "align", lambda space, params: dict(params))
        before.setattr(Uniform, "align", lambda domain, value: value)
        base = spec.space.complete_baseline({})
        for number, temperature in enumerate(computed):
            ledger.start({**base, "temperature": temperature}, "search", "model", seed=1)
            ledger.complete(number, build_outcome(0.5))
        assert [r.params["temperature"] for r in ledger.get_records()] == computed
    with Ledger.open(spec) as ledger:
        assert [r.params["temperature"] for r in ledger.get_records()] == [0.3, 0.7]
    records = run(spec)
    assert sum(record.role == "search" for record in records) == 4
    values = {record.params["temperature"] for record in records}
    assert values <= {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 1.0}  # 1: the published setting
    warm = load_warm(spec.directory, "search.sampler=tpe", "space.temperature=[0.3, 0.7]")
    index = list(warm.space.searched_domains).index("temperature")
    assert {point[index] for point in view_earlier(warm)._earlier} >= {0.3, 0.7}


# Published points


def test_published_stands_for_the_weights_of_the_paper(tmp_path):
    spec = load_code_spec(tmp_path, [*QUICK, "enqueue=[published, {group_size: 4}]"])
    weights = [point.get("reward_weights.length") for point in spec.enqueue]
    assert weights == [0.75, 0.5, 0.25, None]
    again = load_code_spec(tmp_path, [*QUICK, f"enqueue={list(spec.enqueue)}"])
    assert again.enqueue == spec.enqueue
    searched = [record for record in run(spec) if record.role == "search"]
    assert [r.params["reward_weights.length"] for r in searched[:3]] == [0.75, 0.5, 0.25]


def test_published_points_outside_of_the_space_are_left_out(tmp_path):
    narrow = "space.reward_weights={correctness: 1, format: 1, length: {range: [0.4, 0.8]}}"
    spec = load_code_spec(tmp_path, [narrow, "enqueue=[published]"])
    assert [point["reward_weights.length"] for point in spec.enqueue] == [0.75, 0.5]


def test_a_task_without_published_points_refuses_the_word(tmp_path):
    path = tmp_path / "gsm8k.yaml"
    path.write_text(
        "task: gsm8k\nobjectives: {correctness: {direction: maximize, reference: 0}}\n"
        "space: {group_size: [4, 8]}\nenqueue: [published]\n"
    )
    with pytest.raises(SpecError, match="only the baseline"):
        load_spec(path)


# Earlier sweeps


def test_only_trained_trials_are_loaded_into_the_sampler(tmp_path, earlier, load_warm):
    elsewhere = tmp_path / "elsewhere"
    earlier.directory.rename(elsewhere)
    spec = load_warm(elsewhere)
    roles = [record.role for record in load_earlier_trials(spec)]
    assert roles == ["published"] + ["search"] * 4
    view = view_earlier(spec)
    assert [trial.state.name for trial in view.study.trials] == ["COMPLETE"] * 5
    assert view.propose().proposer == "model"  # as if the start-up were over


def test_candidates_and_their_replicates_are_not_loaded(tmp_path, load_warm):
    spec = load_code_spec(tmp_path / "earlier")
    params, part = spec.space.complete_baseline({}), Part(0, 20, 1.0)
    with Ledger.open(spec) as ledger:
        ledger.start(params, "published", "baseline", seed=0)
        ledger.start(params, "replicate", "replicate", seed=1, replicate_of=0)
        ledger.start(params, "checkpoint", "candidate", seed=2, parts=[part])
        ledger.start({}, "merge", "candidate", seed=3, parts=[part, Part(0, 60, 0.5)])
        ledger.start(params, "replicate", "candidate", 4, 2, parts=[part])
        for number in range(5):
            ledger.complete(number, build_trade_off(params))
    assert [r.number for r in load_earlier_trials(load_warm(spec.directory))] == [0, 1]


def test_earlier_trials_are_not_records_of_this_sweep(earlier, load_warm):
    spec = load_warm(
        earlier.directory, "search.sampler=tpe", "search.trials=3", "search.replicates.max_runs=0"
    )
    records = run(spec)
    assert [record.role for record in records] == ["untrained", "published"] + ["search"] * 3
    assert [record.proposer for record in records[2:]] == ["model"] * 3


def test_an_own_trial_of_an_earlier_configuration_counts_alone(earlier, load_warm):
    spec = load_warm(earlier.directory)
    *others, last = load_earlier_trials(spec)
    view, params = view_earlier(spec), last.params
    better = build_trade_off({**params, "learning_rate": 2 * float(params["learning_rate"])})
    view.observe(TrialRecord(2, "search", "running", params, 2, "model"))
    assert list_values(view) == [read_values(record) for record in (*others, last)]
    done = TrialRecord(2, "search", "complete", params, 2, "model", validation=better.validation)
    view.observe(done)
    assert sorted(list_values(view)) == sorted(read_values(record) for record in (*others, done))


def read_values(record):
    return [record.validation[n].mean for n in ("correctness", "format", "length")]


def list_values(view):
    return [trial.values for trial in view.study.trials if trial.state.name == "COMPLETE"]


OPPOSITE = "objectives.length={direction: minimize, reference: 1}"
MEAN_LENGTH = "objectives.mean_length={direction: minimize, reference: 64}"


@pytest.mark.parametrize(
    ("override", "reason", "key"),
    [
        ("search.sampler=random", "random learns from no trial", ""),
        ("search.sampler=qmc", "qmc learns from no trial", ""),
        (MEAN_LENGTH, "without mean_length", "[0]"),
        (OPPOSITE, "length had the opposite", "[0]"),
        ("task=twin", "its task is code, not twin", "[0]"),
        ('constraints.bug_rate="<= 0.5"', "bug_rate was neither objective nor constraint", "[0]"),
    ],
)
def test_earlier_sweeps_that_teach_nothing_are_refused(
    tmp_path, load_warm, override, reason, key, monkeypatch
):
    earlier = load_code_spec(tmp_path / "earlier", QUICK)
    Ledger.open(earlier).close()
    monkeypatch.setitem(registry.TASKS, "twin", registry.TASKS["code"])
    with pytest.raises(SpecError, match=reason) as caught:
        load_warm(earlier.directory, override)
    (problem,) = caught.value.problems
    assert problem.key == f"search.warm_start{key}"
    assert key or "remove the key" in problem.fix


def test_a_directory_that_is_listed_twice_or_has_a_damaged_file_is_refused(earlier, load_warm):
    with pytest.raises(SpecError, match="named twice") as caught:
        load_warm(f"{earlier.directory}, {earlier.directory}/../sweep")
    assert [p.key for p in caught.value.problems] == ["search.warm_start[1]"]
    (earlier.directory / "spec.yaml").write_text("task: [")
    with pytest.raises(SpecError, match=r"its spec.yaml cannot be read"):
        load_warm(earlier.directory)


def test_a_different_training_gives_a_warning_and_a_different_space_does_not(
    tmp_path, earlier, load_warm
):
    def warn(*overrides):
        return list_warnings(load_warm(earlier.directory, *overrides))

    assert warn() == list_warnings(load_code_spec(tmp_path))
    assert not any("warm_start" in doubt for doubt in warn("space.group_size=[4, 8, 16]"))
    (doubt,) = [doubt for doubt in warn("training.steps=120") if "warm_start" in doubt]
    assert "training.steps = 60, not 120" in doubt


# Tables


def write_table(file, spec, prefix=""):
    """Write the complete trainings of a sweep as a table of CSV."""
    with Ledger.open(spec, read_only=True) as ledger:
        records = [r for r in ledger.get_records() if r.is_training and r.state == "complete"]
    rows = [
        {
            **{f"{prefix}{name}": value for name, value in record.params.items()},
            **{name: e.mean for name, e in record.validation.items()},
            "state": "COMPLETE",
        }
        for record in records
    ]
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return file


@pytest.mark.parametrize("prefix", ["", "params_"])
def test_a_table_teaches_what_its_sweep_would(tmp_path, earlier, load_warm, prefix):
    """Source: optuna#320; `params_` is in front of names in Optuna's `trials_dataframe()`."""
    file = write_table(tmp_path / "earlier.csv", earlier, prefix)
    file.write_text(file.read_text() + "," * file.read_text().partition("\n")[0].count(",") + "\n")
    taught = [list_values(view_earlier(load_warm(source))) for source in (earlier.directory, file)]
    assert sorted(taught[0]) == sorted(taught[1]) != []
    assert "warm_start" not in " ".join(list_warnings(load_warm(file)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.replace("learning_rate", "lr"), "no column learning_rate"),
        (lambda t: t.replace("correctness", "right"), "no column correctness"),
        (lambda t: t.replace(",gdpo", ",gpdo").replace("gdpo,", "gpdo,"), "must be one of gdpo"),
        (lambda t: t.partition("\n")[0] + "\n", "no row with every metric"),
        (lambda t: "\x00" * 9, "fix: a CSV file"),
    ],
)
def test_a_table_that_teaches_nothing_is_refused(tmp_path, earlier, load_warm, change, message):
    file = write_table(tmp_path / "earlier.csv", earlier)
    file.write_text(change(file.read_text()))
    with pytest.raises(SpecError, match=message):
        load_warm(file)
    with pytest.raises(SpecError, match="No such file"):
        load_warm(tmp_path / "other.csv")


def test_a_field_of_trl_that_one_of_two_sweeps_lacks_counts_at_its_default(tmp_path):
    """A sweep learns from another that trained what its own space holds, and from no other."""
    field = "trl.weight_decay"
    plain, decayed = load_code_spec(tmp_path / "a"), load_code_spec(tmp_path / "b", [DECAY])
    without, validation = plain.space.complete_baseline({}), build_outcome().validation
    trials = [
        TrialRecord(n, "search", "complete", {**without, **more}, 1, "model", validation=validation)
        for n, more in enumerate(({}, {field: 0.0}, {field: 0.1}))
    ]
    for spec, expected in ((plain, [1, 1, 0]), (decayed, [1, 1, 1])):
        known = [len(view_earlier(spec, [trial]).study.trials) for trial in trials]
        assert known == expected
