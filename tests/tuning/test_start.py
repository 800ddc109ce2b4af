"""A supervised start in a sweep: first, once, kept, and where all other trials begin."""

from dataclasses import replace

import pytest

from gdpo_tune.core.content import measure_content
from gdpo_tune.core.errors import IdentityError, UsageError
from gdpo_tune.core.events import IncidentOccurred, Request
from gdpo_tune.core.trials import Cost, Outcome, Part
from gdpo_tune.ledger import Ledger
from gdpo_tune.ledger.requests import check_request
from gdpo_tune.training.checkpoints import write_checkpoint
from gdpo_tune.tuning.plan import count_planned, find_next_trial
from gdpo_tune.tuning.ray.preflight import list_needed_paths
from gdpo_tune.tuning.retention import delete_unkept_checkpoints
from tests.support.search_driver import Driver
from tests.support.tuning import build_measurement, build_outcome, load_code_spec

QUICK = ["search.sampler=random", "search.trials=3", "search.scheduler={type: fifo}"]
START = "start={steps: 7, completions_per_step: 4}"


@pytest.fixture
def load(tmp_path):
    """A function that loads the sweep with a start and more overrides."""
    return lambda *overrides: load_code_spec(tmp_path, [*QUICK, START, *overrides])


@pytest.fixture
def spec(load):
    return load()


def end_start(driver, trial):
    """End the start with a kept policy; return that."""
    directory = driver.in_flight[trial].directory
    kept = write_checkpoint(directory, 7, Cost(), lambda path: (path / "w").touch()).path
    driver.end(trial, outcome=replace(build_outcome(0.3), checkpoint=kept))
    return kept


def test_all_but_the_untrained_policy_wait_for_the_start_and_begin_there(spec, ledger):
    driver = Driver(ledger, slots=4)
    start, untrained = driver.ask(), driver.ask()
    assert driver.ask() is None
    own, other = driver.in_flight[start], driver.in_flight[untrained]
    assert (own.supervised, own.start, own.train) == (spec.start, None, True)
    assert (own.training.steps, own.training.completions_per_step) == (7, 4)
    assert (other.supervised, other.start, other.train) == (None, None, False)
    driver.end(untrained)
    assert driver.ask() is None
    kept = end_start(driver, start)
    later = [driver.in_flight[driver.ask()] for _ in range(4)]
    assert {config.start for config in later} == {kept}
    assert all(config.supervised is None and config.train for config in later)
    roles = [record.role for record in ledger.get_records()]
    assert roles == ["start", "untrained", "published", *["search"] * 3]
    assert all(config.policy == spec.policy for config in later)


def test_measurements_of_the_start_are_neither_rungs_nor_signals(ledger, driver):
    driver.report(driver.ask(), build_measurement(1, Cost()))
    assert not ledger.get_record(0).rungs
    assert not driver.searcher._knows_signal


def test_merges_and_replicates_begin_at_the_start(ledger, driver):
    kept = end_start(driver, driver.ask())
    params = ledger.get_record(0).params
    record = ledger.start({}, "merge", "candidate", 1, parts=[Part(0, 7, 1.0)])
    config = driver.searcher._build_config(record)
    assert (config.start, config.train) == (kept, False)
    again = ledger.start(params, "replicate", "replicate", 2, replicate_of=0)
    assert driver.searcher._build_config(again).start == kept


def test_a_start_that_fails_stops_the_sweep_and_is_tried_again(spec):
    with Ledger.open(spec) as ledger:
        driver = Driver(ledger)
        driver.end(driver.ask(), failure="loss is nan at step 1")
        assert isinstance(driver.searcher.fatal, UsageError)
        text = str(driver.searcher.fatal)
        assert text.startswith(
            "start: the supervised training failed: loss is nan at step 1\n    fix: "
        )
        assert driver.ask() == driver.searcher.FINISHED
        assert ledger.get_record(0).state == "running"
    with Ledger.open(spec) as ledger:
        driver = Driver(ledger)
        trial = driver.ask()
        assert driver.in_flight[trial].supervised == spec.start
        assert len(ledger.get_records()) == 1
        end_start(driver, trial)
        assert ledger.get_record(0).state == "complete"


def test_a_start_without_a_value_of_an_objective_stops_the_sweep(ledger, driver):
    driver.end(driver.ask(), outcome=Outcome({}, {}, Cost(), None))
    assert "validation correctness is missing" in str(driver.searcher.fatal)
    assert find_next_trial(ledger.spec, ledger.get_records()).role == "start"


@pytest.mark.parametrize("keep", ["none", "front", "all"])
def test_the_start_is_kept(load, keep):
    with Ledger.open(load(f"keep={keep}", "search.replicates.max_runs=0")) as ledger:
        driver = Driver(ledger)
        kept = end_start(driver, driver.ask())
        driver.run()
        delete_unkept_checkpoints(ledger)
        assert kept.is_dir()
        assert ledger.get_record(0).checkpoint == kept


def test_a_bound_takes_the_value_of_the_start(load):
    with Ledger.open(load('constraints.correctness=">= start - 0.02"')) as ledger:
        driver = Driver(ledger)
        assert not ledger.spec.constraints["correctness"].is_known
        end_start(driver, driver.ask())
        assert ledger.spec.constraints["correctness"].limit == pytest.approx(0.28)
        assert str(ledger.spec.constraints["correctness"]) == ">= start - 0.02 (0.28)"


def test_a_person_cannot_stop_the_start(ledger, driver):
    driver.ask()
    stop = Request("a", "stop", {"trial": 0}, "b", 1.0)
    with pytest.raises(UsageError, match="trial 0 is the start, for which all other trials"):
        check_request(ledger.take_snapshot(), stop)


def test_a_start_that_earns_the_same_everywhere_is_reported(driver):
    outcome = build_outcome(0.0)
    test = {n: replace(e, is_constant=True) for n, e in outcome.test.items()}
    driver.end(driver.ask(), outcome=replace(outcome, test=test))
    (incident,) = [e for e in driver.events if isinstance(e, IncidentOccurred)]
    assert incident.incident.description.startswith("the supervised start earns the same")


def test_a_sweep_with_a_start_has_one_trial_more(tmp_path):
    each = (QUICK, [*QUICK, START])
    counts = [count_planned(load_code_spec(tmp_path, words), []) for words in each]
    assert counts[1] == counts[0] + 1


def test_demonstrations_that_changed_under_a_sweep_are_refused(tmp_path, load):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "1", "completion": "2"}\n')
    spec = load(f"start.demonstrations={file}")
    assert str(file) in list_needed_paths(spec)

    def start():
        with Ledger.open(spec) as ledger:
            ledger.compare_content(measure_content(spec, str(file)))

    start()
    start()
    file.write_text('{"prompt": "1", "completion": "3"}\n')
    with pytest.raises(IdentityError, match=r"start mine.jsonl: \w+, now \w+ \(written"):
        start()
    with pytest.raises(IdentityError, match=r"start.steps = 7, not 8"):
        Ledger.open(load(f"start.demonstrations={file}", "start.steps=8"))
