"""The searcher without Ray's processes: suggestions, their order, and records."""

import copy
import errno
import pickle
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from ray import cloudpickle
from ray.tune.experiment import Trial

from gdpo_tune.core import events
from gdpo_tune.core.errors import DirectoryLostError, SandboxUnavailable
from gdpo_tune.core.settings import RolloutSettings, SandboxSettings
from gdpo_tune.core.trials import Cost, Estimate, Measurement, Outcome
from gdpo_tune.ledger import Ledger
from gdpo_tune.ledger.journal import Journal
from gdpo_tune.tuning import runner
from gdpo_tune.tuning.attempts import FINISHED, TrialPlaced, unwrap_attempt, wrap_for_ray
from gdpo_tune.tuning.nodes import Nodes
from gdpo_tune.tuning.plan import count_planned, explain_end, is_finished
from gdpo_tune.tuning.ray.cluster import Cluster
from gdpo_tune.tuning.ray.tune import TuneCallback, TuneSearcher, free_trial
from gdpo_tune.tuning.runner import run_sweep
from tests.support.search_driver import Driver
from tests.support.tuning import (
    build_measurement,
    build_outcome,
    build_trade_off,
    load_code_spec,
    load_halving_spec,
)

QUICK = ["search.sampler=random", "search.trials=4"]


@pytest.fixture
def spec(tmp_path):
    return load_code_spec(tmp_path, QUICK)


def run(spec):
    with Ledger.open(spec) as ledger:
        Driver(ledger).run()
        return ledger.get_records()


def count_roles(records):
    return Counter(record.role for record in records)


def list_incidents(driver):
    return [str(e.incident) for e in driver.events if isinstance(e, events.IncidentOccurred)]


def test_baselines_then_search_then_replicates_of_the_front(spec):
    records = run(spec)
    replicates = records[6:]
    roles = [record.role for record in records]
    assert roles == ["untrained", "published", *["search"] * 4, *["replicate"] * len(replicates)]
    assert 1 <= len(replicates) <= spec.search.replicates.max_runs
    assert is_finished(spec, records)
    assert count_planned(spec, records) == 2 + 4 + spec.search.replicates.max_runs
    for record in replicates:
        assert record.params == records[record.replicate_of].params
    assert len({record.seed for record in records}) == len(records)
    repeated = Counter(record.replicate_of for record in replicates)
    assert max(repeated.values()) <= spec.search.replicates.per_point


def test_a_trial_has_the_settings_of_the_sweep_and_its_share_of_a_gpu(tmp_path):
    sandbox = "sandbox={workers: 3, modules: [json], memory_mb: 100}"
    gpu = ["rollout.engine=vllm", "resources.gpus=0.25"]
    with Ledger.open(load_code_spec(tmp_path, [*QUICK, sandbox, *gpu])) as ledger:
        driver = Driver(ledger)
        config = driver.in_flight[driver.ask()]
    assert config.sandbox == SandboxSettings(workers=3, modules=("json",), memory_mb=100)
    assert config.rollout == RolloutSettings(engine="vllm")
    assert config.gpu_share == 0.25
    assert config.needs_gpu


def test_a_trial_is_handed_out_only_when_a_slot_is_free(ledger, driver):
    first, second = driver.ask(), driver.ask()
    assert driver.ask() is None
    assert len(ledger.get_records()) == 2  # nothing is proposed before it can use every result
    driver.end(first)
    assert driver.ask() not in (None, driver.searcher.FINISHED, second)


def test_the_baselines_are_the_policy_as_it_is_and_the_published_weights(spec, driver):
    untrained, published = (driver.in_flight[driver.ask()] for _ in range(2))
    assert (untrained.train, published.train) == (False, True)
    assert published.params["normalization"] == "gdpo"
    assert set(published.get_reward_weights().values()) == {1.0}
    assert spec.space.domains["learning_rate"].contains(published.params["learning_rate"])


def test_enqueued_points_come_first_and_the_sampler_completes_them(tmp_path):
    points = "enqueue=[{group_size: 4, normalization: grpo}, {learning_rate: 1.0e-4}]"
    few = ["search.trials=1", "search.replicates.max_runs=0", points]
    assert count_roles(run(load_code_spec(tmp_path / "small", few)))["search"] == 1
    spec = load_code_spec(tmp_path, [*QUICK, points])
    search = [record for record in run(spec) if record.role == "search"]
    assert [record.proposer for record in search] == ["enqueued"] * 2 + ["startup"] * 2
    assert (search[0].params["group_size"], search[0].params["normalization"]) == (4, "grpo")
    assert search[1].params["learning_rate"] == 1e-4
    for name, domain in spec.space.domains.items():
        assert domain.contains(search[0].params[name]), name


def test_an_unfinished_trial_resumes_unchanged(spec):
    with Ledger.open(spec) as ledger:
        driver = Driver(ledger)
        done, lost = driver.ask(), driver.ask()
        before = driver.in_flight[lost]
        driver.end(done)
        third = driver.in_flight[driver.ask()]
    with Ledger.open(spec) as ledger:  # the process was killed
        driver = Driver(ledger)
        assert driver.in_flight[driver.ask()] == before
        assert driver.in_flight[driver.ask()] == third
        assert driver.ask() is None
        assert len(ledger.get_records()) == 3
        driver.end(next(iter(driver.in_flight)))
        driver.run()
        records = ledger.get_records()
    assert is_finished(spec, records)
    assert count_roles(records)["search"] == 4


def test_a_finished_sweep_starts_no_trial_and_a_larger_budget_extends_it(spec, tmp_path):
    before = run(spec)
    with Ledger.open(spec) as ledger:
        assert Driver(ledger).ask() == FINISHED
    larger = load_code_spec(tmp_path, ["search.sampler=random", "search.trials=6"])
    assert not is_finished(larger, before)
    after = run(larger)
    assert after[: len(before)] == before
    assert count_roles(after)["search"] == 6
    assert count_roles(after)["replicate"] <= spec.search.replicates.max_runs


@pytest.mark.parametrize(
    ("result", "why"),
    [
        ({"failure": "loss is nan at step 3"}, "loss is nan at step 3"),
        ({"outcome": build_outcome(correctness=float("nan"))}, "validation correctness is nan"),
    ],
)
def test_a_failed_trial_is_recorded_and_counts_as_tried(ledger, driver, result, why):
    for trial_id in [driver.ask(), driver.ask()]:
        driver.end(trial_id)
    driver.end(driver.ask(), **result)
    driver.run()
    records = ledger.get_records()
    assert (records[2].state, records[2].reason) == ("failed", why)
    assert count_roles(records)["search"] == 4


def test_an_error_is_recorded_with_its_cost_and_frees_the_slot(ledger):
    driver, spent = Driver(ledger, slots=1), Cost(completions=64, seconds=1.5)
    trial_id = driver.ask()
    driver.report(trial_id, Measurement(1, {}, spent))
    driver.end(trial_id, failure="RuntimeError: broken")
    record = ledger.get_record(0)
    assert (record.state, record.reason) == ("failed", "RuntimeError: broken")
    assert record.cost == spent
    assert driver.ask() is not None


def test_ray_keeps_nothing_of_a_trial_that_has_ended(spec):
    config = {"trial": spec.build_trial_config({}, 0, spec.directory), "setup": "any"}
    trial = Trial("none", config=config, evaluated_params=dict(config), stub=True)
    trial.temporary_state.ray_actor = "Actor(a)"
    trial.update_last_result({"loss": 0.5, "training_iteration": 1})
    trial._default_result_or_future = "a reference to a remote object"
    assert trial.metric_analysis
    assert trial.metric_n_steps
    free_trial(trial)
    assert trial.config == trial.evaluated_params == {}
    assert trial.metric_analysis == trial.metric_n_steps == {}
    assert trial.last_result == {"ended": True, "trial_id": trial.trial_id}
    assert trial._default_result_or_future is None


def test_processes_are_recorded_when_ray_starts_one(ledger):
    driver, looked = Driver(ledger, slots=4), []
    callback = TuneCallback(driver.searcher, lambda: looked.append("again"))
    for actor in ("a", "a", "b", "a"):
        trial = SimpleNamespace(trial_id=driver.ask())
        callback.on_trial_result(0, [], trial, wrap_for_ray(TrialPlaced(actor, "node")))
    assert looked == ["again"] * 2


def test_ray_copies_a_config_cheaply_and_names_it_briefly(driver):
    config = TuneSearcher(driver.searcher).suggest("ray0")
    copied = copy.deepcopy(config)
    assert all(copied[key] is value for key, value in config.items())
    assert str(unwrap_attempt(config)) == "0"
    assert pickle.loads(cloudpickle.dumps(config)) == config


def test_an_interrupted_trial_stays_unfinished(ledger, driver):
    trial_id = driver.ask()
    driver.searcher.stop()
    assert driver.ask() == FINISHED
    driver.end(trial_id, interrupted=True)
    assert [r.number for r in ledger.get_records() if r.state == "running"] == [0]


def test_an_error_that_affects_every_trial_ends_the_sweep(ledger, driver):
    error = SandboxUnavailable("no isolation")
    driver.end(driver.ask(), fatal=error)
    assert driver.searcher.fatal is error
    assert driver.ask() == FINISHED
    # on a machine with isolation it resumes
    assert [r.state for r in ledger.get_records()] == ["running"]


def test_a_ledger_that_is_not_writable_ends_the_sweep(ledger, driver):
    trial_id = driver.ask()
    gone = OSError(errno.ESTALE, "Stale file handle")
    with patch.object(ledger, "complete", side_effect=gone):
        driver.end(trial_id)
    assert isinstance(driver.searcher.fatal, DirectoryLostError)
    assert "cannot be written to (Stale file handle)" in str(driver.searcher.fatal)
    assert driver.ask() == FINISHED


@pytest.mark.parametrize("fails_before_the_end", [True, False])
def test_a_ledger_that_stays_lost_is_the_error_of_the_sweep(
    spec, monkeypatch, fails_before_the_end
):
    """The end of the session cannot be recorded either, which hides no earlier error."""
    node = {"NodeID": "a", "NodeManagerHostname": "h", "Alive": True, "Resources": {"CPU": 2}}
    cluster = Cluster(Nodes(lambda: [node]), lambda: None, lambda: True)

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    def build_tuner(spec, directory, pending, setup, lifecycle, *_):
        def fit():
            monkeypatch.setattr(Journal, "append_logs", fail)
            if fails_before_the_end:
                lifecycle.next_attempt("a")

        return SimpleNamespace(fit=fit)

    monkeypatch.setattr(runner.cluster, "open_cluster", lambda *_: nullcontext(cluster))
    monkeypatch.setattr("gdpo_tune.tuning.ray.tune.build_tuner", build_tuner)
    with pytest.raises(DirectoryLostError, match="cannot be written to"):
        runner.run_sweep(spec)


def test_listeners_get_the_events_of_every_trial(ledger, driver):
    trial_id, measurement = driver.ask(), build_measurement(30, format=0.5)
    driver.report(trial_id, measurement)
    driver.end(trial_id)
    done = ledger.get_record(0)
    started, progressed, outlook, finished = driver.events
    assert isinstance(started, events.TrialStarted)
    assert started.record.state == "running"
    assert progressed == events.TrialProgress(0, measurement)
    assert isinstance(outlook, events.Outlook)
    assert finished == events.TrialFinished(done)
    assert [rung.validation for rung in done.rungs] == [measurement.validation]


class CheckpointDriver(Driver):
    """A driver whose trials write a checkpoint."""

    def end(self, trial_id, **result):
        config = self.in_flight[trial_id]
        directory = config.directory / "checkpoint-60"
        directory.mkdir(parents=True)
        super().end(trial_id, outcome=replace(build_trade_off(config.params), checkpoint=directory))


def test_checkpoints_of_a_finished_sweep_are_deleted_by_the_next_process(spec, tmp_path):
    with Ledger.open(spec) as ledger:
        CheckpointDriver(ledger).run()
        assert all(record.checkpoint for record in ledger.get_records())
    records = run_sweep(spec).records
    with_checkpoint = {record.number for record in records if record.checkpoint}
    on_disk = {int(p.parent.name) for p in spec.directory.glob("trials/*/checkpoint-*")}
    assert with_checkpoint == on_disk
    assert 0 < len(with_checkpoint) < len(records)
    without = load_code_spec(tmp_path, [*QUICK, "keep=none"])
    assert not any(record.checkpoint for record in run_sweep(without).records)


def test_checkpoints_stay_while_no_trial_is_feasible(tmp_path):
    spec = load_code_spec(tmp_path, [*QUICK, "constraints={correctness: '>= 1'}"])
    with Ledger.open(spec) as ledger:
        CheckpointDriver(ledger).run()
    records = run_sweep(spec).records
    assert not any(record.feasible for record in records)
    assert all(record.checkpoint for record in records)


@pytest.mark.parametrize("share", [1.0, 0.9])
def test_first_steps_without_a_signal_are_reported_once(ledger, share):
    driver = Driver(ledger, slots=3)
    names = [driver.ask() for _ in range(3)]
    for step in (1, 2, 3, 4):
        measurement = Measurement(step, {"train/frac_advantage_zero": share}, Cost(64 * step))
        for name in names[1:]:
            driver.report(name, measurement)
    told = list_incidents(driver)
    assert len(told) == (share == 1)
    assert all("trial 1 learns nothing so far" in text for text in told)
    assert all("first 3 steps" in text for text in told)


EQUAL = "the untrained policy earns the same for every completion"
CEILING = "the untrained policy earns nearly everything already"


@pytest.mark.parametrize(
    ("value", "se", "expected"),
    [
        (
            0.0,
            0.0,
            [f"{EQUAL} (correctness 0.000, format 0.000, length 0.000), so it may learn nothing"],
        ),
        (0.0, 0.01, []),
        (0.96, 0.01, []),
        (0.98, 0.01, [f"{CEILING} (correctness 0.980, format 0.980, length 0.980), so few groups"]),
    ],
)
def test_an_untrained_policy_that_earns_the_same_or_everything_is_reported(
    spec, driver, value, se, expected
):
    earned = dict.fromkeys(spec.objectives, Estimate(value, se, is_constant=not se))
    driver.end(driver.ask(), outcome=Outcome(earned, earned, Cost(), None))
    told = list_incidents(driver)
    assert [text[: len(part)] for text, part in zip(told, expected, strict=True)] == expected


TARGET = "search.target={correctness: '>= 0.6'}"


def test_the_search_stops_once_a_policy_meets_the_target_on_test_prompts_too(tmp_path):
    spec = load_code_spec(tmp_path, [*QUICK, TARGET])
    with Ledger.open(spec) as ledger:
        driver = Driver(ledger, slots=1)
        for value, shift in ((0.5, 0.0), (0.7, -0.2), (0.5, 0.2), (0.65, 0.0)):
            while (name := driver.ask()) is None:  # the sampler is thinking
                pass
            assert name != FINISHED
            driver.end(name, outcome=build_outcome(value, test_shift=shift))
        assert driver.ask() == FINISHED
        assert explain_end(spec, ledger.get_records()) == "trial 3 meets search.target"


def test_a_waiting_training_that_meets_the_target_is_tested_at_once(tmp_path):
    with Ledger.open(load_halving_spec(tmp_path, 1400, TARGET)) as ledger:
        driver = Driver(ledger, slots=1)
        driver.end(driver.ask(), outcome=build_outcome(0.3))
        for correctness in (0.5, 0.65):
            driver.report(name := driver.ask(), build_measurement(26, correctness=correctness))
            driver.end(name, interrupted=True)
        meets = "it meets search.target on validation prompts"
        for number, value, reason in ((2, 0.65, meets), (1, 0.5, "the budget is spent")):
            name = driver.ask()
            assert driver.in_flight[name].directory.name == str(number)
            driver.end(name, outcome=build_outcome(value))
            assert ledger.get_record(number).reason == reason
        assert driver.ask() == FINISHED


def test_a_sweep_without_a_signal_starts_no_fourth_training(spec, ledger, driver):
    driver.end(driver.ask())
    for _ in range(3):
        while (name := driver.ask()) is None:  # the sampler is thinking
            pass
        driver.end(name, failure="no signal: every advantage was 0")
    assert driver.ask() == FINISHED
    records = ledger.get_records()
    assert [record.had_no_signal for record in records] == [False, True, True, True]
    assert is_finished(spec, records)
