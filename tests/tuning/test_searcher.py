"""The searcher without Ray's processes: suggestions, their order, and records."""

from __future__ import annotations

import copy
import errno
import pickle
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import cloudpickle
from ray.tune.experiment import Trial

from gdpo_tune.core.errors import DirectoryLostError, SandboxUnavailable
from gdpo_tune.core.events import (
    IncidentOccurred,
    Outlook,
    TrialFinished,
    TrialProgress,
    TrialStarted,
)
from gdpo_tune.core.settings import RolloutSettings, SandboxSettings
from gdpo_tune.core.trials import Cost, Estimate, Measurement, Outcome
from gdpo_tune.ledger import Ledger
from gdpo_tune.spec import SweepSpec
from gdpo_tune.tuning.attempts import Failed, TrialPlaced, unwrap_attempt, wrap_for_ray
from gdpo_tune.tuning.lifecycle import Lifecycle
from gdpo_tune.tuning.nodes import Nodes
from gdpo_tune.tuning.plan import count_planned, is_finished
from gdpo_tune.tuning.ray.cluster import Cluster
from gdpo_tune.tuning.ray.tune import (
    TuneCallback,
    TuneSearcher,
    free_trial,
)
from gdpo_tune.tuning.runner import run_sweep
from tests.support.search_driver import Driver
from tests.support.tuning import (
    build_measurement,
    build_outcome,
    build_trade_off,
    load_code_spec,
)

QUICK = ["search.sampler=random", "search.trials=4"]


@pytest.fixture
def spec(tmp_path: Path) -> SweepSpec:
    return load_code_spec(tmp_path, QUICK)


def test_baselines_then_search_then_replicates_of_the_front(spec: SweepSpec):
    with Ledger.open(spec) as ledger:
        driver = Driver(ledger)
        driver.run()
        records = ledger.get_records()
    roles = [record.role for record in records]
    replicates = roles.count("replicate")
    assert roles == ["untrained", "published"] + ["search"] * 4 + ["replicate"] * replicates
    assert 1 <= replicates <= spec.search.replicates.max_runs
    assert is_finished(spec, records)
    assert count_planned(spec, records) == 2 + 4 + spec.search.replicates.max_runs
    by_number = {record.number: record for record in records}
    for record in records[6:]:
        original = by_number[record.replicate_of or 0]
        assert record.params == original.params
        assert record.seed != original.seed
    assert len({record.seed for record in records}) == len(records)
    repeated = Counter(record.replicate_of for record in records[6:])
    assert max(repeated.values()) <= spec.search.replicates.per_point


def test_a_trial_has_the_settings_of_the_sweep_and_its_share_of_a_gpu(tmp_path: Path):
    sandbox = "sandbox={workers: 3, modules: [json], memory_mb: 100}"
    gpu = ["rollout.engine=vllm", "resources.gpus=0.25"]
    with Ledger.open(load_code_spec(tmp_path, [*QUICK, sandbox, *gpu])) as ledger:
        driver = Driver(ledger)
        config = driver.in_flight[driver.ask()]
    assert config.sandbox == SandboxSettings(workers=3, modules=("json",), memory_mb=100)
    assert config.rollout == RolloutSettings(engine="vllm")
    assert config.gpu_share == 0.25
    assert config.needs_gpu


def test_a_trial_is_handed_out_only_when_a_slot_is_free(spec: SweepSpec):
    with Ledger.open(spec) as ledger:
        driver = Driver(ledger, slots=2)
        first, second = driver.ask(), driver.ask()
        assert driver.ask() is None
        assert len(ledger.get_records()) == 2  # nothing is proposed before it can use every result
        driver.end(first)
        assert driver.ask() not in (None, driver.searcher.FINISHED, second)


def test_the_baselines_are_the_policy_as_it_is_and_the_published_weights(spec: SweepSpec):
    with Ledger.open(spec) as ledger:
        driver = Driver(ledger)
        untrained, published = (driver.in_flight[driver.ask()] for _ in range(2))
    assert (untrained.train, published.train) == (False, True)
    assert published.params["normalization"] == "gdpo"
    assert set(published.get_reward_weights().values()) == {1.0}
    assert spec.space.domains["learning_rate"].contains(published.params["learning_rate"])


def test_enqueued_points_come_first_and_the_sampler_completes_them(tmp_path: Path):
    points = "enqueue=[{group_size: 4, normalization: grpo}, {learning_rate: 1.0e-4}]"
    small = load_code_spec(
        tmp_path / "small", ["search.trials=1", "search.replicates.max_runs=0", points]
    )
    with Ledger.open(small) as ledger:
        Driver(ledger).run()
        assert [record.role for record in ledger.get_records()].count("search") == 1
    spec = load_code_spec(tmp_path, [*QUICK, points])
    with Ledger.open(spec) as ledger:
        Driver(ledger).run()
        search = [record for record in ledger.get_records() if record.role == "search"]
    assert [record.proposer for record in search] == ["enqueued"] * 2 + ["startup"] * 2
    assert (search[0].params["group_size"], search[0].params["normalization"]) == (4, "grpo")
    assert search[1].params["learning_rate"] == 1e-4
    for name, domain in spec.space.domains.items():
        assert domain.contains(search[0].params[name]), name


def test_an_unfinished_trial_resumes_unchanged(spec: SweepSpec):
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
    assert [record.role for record in records].count("search") == 4


def test_a_finished_sweep_starts_no_trial_and_a_larger_budget_extends_it(
    spec: SweepSpec, tmp_path: Path
):
    with Ledger.open(spec) as ledger:
        Driver(ledger).run()
        before = ledger.get_records()
    with Ledger.open(spec) as ledger:
        driver = Driver(ledger)
        assert driver.ask() == driver.searcher.FINISHED
    larger = load_code_spec(tmp_path, ["search.sampler=random", "search.trials=6"])
    with Ledger.open(larger) as ledger:
        assert not is_finished(larger, ledger.get_records())
        Driver(ledger).run()
        after = ledger.get_records()
    assert after[: len(before)] == before
    assert [record.role for record in after].count("search") == 6
    replicates = [record.role for record in after].count("replicate")
    assert replicates <= spec.search.replicates.max_runs


@pytest.mark.parametrize(
    ("result", "why"),
    [
        ({"failure": "loss is nan at step 3"}, "loss is nan at step 3"),
        ({"outcome": build_outcome(correctness=float("nan"))}, "validation correctness is nan"),
    ],
)
def test_a_failed_trial_is_recorded_and_counts_as_tried(
    spec: SweepSpec, result: dict[str, Any], why: str
):
    with Ledger.open(spec) as ledger:
        driver = Driver(ledger)
        for trial_id in [driver.ask(), driver.ask()]:
            driver.end(trial_id)
        driver.end(driver.ask(), **result)
        driver.run()
        records = ledger.get_records()
    assert (records[2].state, records[2].reason) == ("failed", why)
    assert [record.role for record in records].count("search") == 4


def test_an_error_is_recorded_with_the_reason_of_ray(spec: SweepSpec):
    with Ledger.open(spec) as ledger:
        driver = Driver(ledger)
        trial_id = driver.ask()
        spent = Cost(completions=64, seconds=1.5)
        driver.report(trial_id, Measurement(1, {}, spent))
        driver.searcher.on_end(trial_id, Failed("RuntimeError: broken"))
        record = ledger.get_record(0)
        assert (record.state, record.reason) == ("failed", "RuntimeError: broken")
        assert record.cost == spent
        driver.in_flight.clear()
        assert driver.ask() is not None  # the slot is free again


def build_ray_trial(config: dict[str, Any], actor: object) -> Any:
    """Build one of Ray's trials with a result, as a callback gets it."""
    trial = Trial("none", config=config, evaluated_params=dict(config), stub=True)
    trial.temporary_state.ray_actor = actor
    trial.update_last_result({"loss": 0.5, "training_iteration": 1})
    return trial


def test_processes_are_recorded_when_ray_starts_one(spec: SweepSpec):
    looked: list[str] = []
    with Ledger.open(spec) as ledger:
        driver = Driver(ledger, slots=4)
        callback = TuneCallback(driver.searcher, lambda: looked.append("again"))
        for actor in ("a", "a", "b", "a"):
            trial = SimpleNamespace(trial_id=driver.ask())
            callback.on_trial_result(0, [], trial, wrap_for_ray(TrialPlaced(actor, "node")))
    assert looked == ["again"] * 2


def test_ray_keeps_nothing_of_a_trial_that_has_ended(spec: SweepSpec):
    config = {"trial": spec.build_trial_config({}, 0, spec.directory), "setup": "any"}
    trial = build_ray_trial(config, "Actor(a)")
    trial._default_result_or_future = "a reference to a remote object"
    assert trial.metric_analysis
    assert trial.metric_n_steps
    free_trial(trial)
    assert trial.config == trial.evaluated_params == {}
    assert trial.metric_analysis == trial.metric_n_steps == {}
    assert trial.last_result == {"ended": True, "trial_id": trial.trial_id}
    assert trial._default_result_or_future is None


def test_ray_copies_a_config_cheaply_and_names_it_briefly(spec: SweepSpec):
    with Ledger.open(spec) as ledger:
        driver = Driver(ledger)
        config = TuneSearcher(driver.searcher).suggest("ray0")
    assert isinstance(config, dict)
    copied = copy.deepcopy(config)
    assert all(copied[key] is value for key, value in config.items())
    assert str(unwrap_attempt(config)) == "0"
    assert pickle.loads(cloudpickle.dumps(config)) == config


def test_an_interrupted_trial_stays_unfinished(spec: SweepSpec):
    with Ledger.open(spec) as ledger:
        driver = Driver(ledger)
        trial_id = driver.ask()
        driver.searcher.stop()
        assert driver.ask() == driver.searcher.FINISHED
        driver.end(trial_id, interrupted=True)
        assert [r.number for r in ledger.get_records() if r.state == "running"] == [0]


def test_an_error_that_affects_every_trial_ends_the_sweep(spec: SweepSpec):
    with Ledger.open(spec) as ledger:
        driver = Driver(ledger)
        error = SandboxUnavailable("no isolation")
        driver.end(driver.ask(), fatal=error)
        assert driver.searcher.fatal is error
        assert driver.ask() == driver.searcher.FINISHED
        assert [r.state for r in ledger.get_records()].count(
            "running"
        ) == 1  # on a machine with isolation it resumes


def test_a_ledger_that_is_not_writable_ends_the_sweep(
    spec: SweepSpec, monkeypatch: pytest.MonkeyPatch
):
    with Ledger.open(spec) as ledger:
        driver = Driver(ledger)
        trial_id = driver.ask()
        with monkeypatch.context() as patch:
            gone = OSError(errno.ESTALE, "Stale file handle")
            patch.setattr(ledger, "complete", lambda *_: raise_error(gone))
            driver.end(trial_id)
        assert isinstance(driver.searcher.fatal, DirectoryLostError)
        assert "cannot be written to (Stale file handle)" in str(driver.searcher.fatal)
        assert driver.ask() == driver.searcher.FINISHED


def raise_error(error: Exception) -> Any:
    raise error


@pytest.mark.parametrize("fails_before_the_end", [True, False])
def test_a_ledger_that_stays_lost_is_the_error_of_the_sweep(
    spec: SweepSpec, monkeypatch: pytest.MonkeyPatch, fails_before_the_end: bool
):
    """The end of the session cannot be recorded either, which hides no earlier error."""
    node = {"NodeID": "a", "NodeManagerHostname": "h", "Alive": True, "Resources": {"CPU": 2}}
    cluster = Cluster(Nodes(lambda: [node]), lambda: None, lambda: True)

    def fit(lifecycle: Lifecycle) -> None:
        monkeypatch.setattr(
            "gdpo_tune.ledger.journal.Journal.append_logs",
            lambda *_: raise_error(OSError(errno.EIO, "Input/output error")),
        )
        if fails_before_the_end:
            lifecycle.next_attempt("a")

    monkeypatch.setattr(
        "gdpo_tune.tuning.runner.cluster.open_cluster", lambda *_: nullcontext(cluster)
    )
    monkeypatch.setattr(
        "gdpo_tune.tuning.ray.tune.build_tuner",
        lambda *arguments: SimpleNamespace(fit=lambda: fit(arguments[4])),
    )
    with pytest.raises(DirectoryLostError, match="cannot be written to"):
        run_sweep(spec)


def test_listeners_get_the_events_of_every_trial(spec: SweepSpec):
    with Ledger.open(spec) as ledger:
        driver = Driver(ledger)
        trial_id = driver.ask()
        measurement = build_measurement(30, format=0.5)
        driver.report(trial_id, measurement)
        driver.end(trial_id)
        done = ledger.get_record(0)
    started, progressed, outlook, finished = driver.events
    assert isinstance(started, TrialStarted)
    assert started.record.state == "running"
    assert progressed == TrialProgress(0, measurement)
    assert isinstance(outlook, Outlook)
    assert finished == TrialFinished(done)
    assert [rung.validation for rung in done.rungs] == [measurement.validation]


class CheckpointDriver(Driver):
    """A driver whose trials write a checkpoint."""

    def end(self, trial_id: str, **result: Any) -> None:
        config = self.in_flight[trial_id]
        directory = config.directory / "checkpoint-60"
        directory.mkdir(parents=True)
        super().end(trial_id, outcome=replace(build_trade_off(config.params), checkpoint=directory))


def test_checkpoints_of_a_finished_sweep_are_deleted_by_the_next_process(
    spec: SweepSpec, tmp_path: Path
):
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


def test_checkpoints_stay_while_no_trial_is_feasible(tmp_path: Path):
    spec = load_code_spec(tmp_path, [*QUICK, "constraints={correctness: '>= 1'}"])
    with Ledger.open(spec) as ledger:
        CheckpointDriver(ledger).run()
    records = run_sweep(spec).records
    assert not any(record.feasible for record in records)
    assert all(record.checkpoint for record in records)


@pytest.mark.parametrize("share", [1.0, 0.9])
def test_first_steps_without_a_signal_are_reported_once(spec: SweepSpec, share: float):
    with Ledger.open(spec) as ledger:
        driver = Driver(ledger, slots=3)
        names = [driver.ask() for _ in range(3)]
        for step in (1, 2, 3, 4):
            measurement = Measurement(step, {"train/frac_advantage_zero": share}, Cost(64 * step))
            for name in names[1:]:
                driver.report(name, measurement)
        told = [str(e.incident) for e in driver.events if isinstance(e, IncidentOccurred)]
    assert len(told) == (share == 1)
    if told:
        assert "trial 1 learns nothing so far" in told[0]
        assert "first 3 steps" in told[0]


@pytest.mark.parametrize("se", [0.0, 0.01])
def test_an_untrained_policy_that_earns_nothing_is_reported(spec: SweepSpec, se: float):
    with Ledger.open(spec) as ledger:
        driver = Driver(ledger)
        equal = {
            name: Estimate(0.0, se, is_constant=not se)
            for name in ("correctness", "format", "length")
        }
        driver.end(driver.ask(), outcome=Outcome(equal, equal, Cost(), None))
        told = [str(e.incident) for e in driver.events if isinstance(e, IncidentOccurred)]
    assert len(told) == (se == 0)
    assert all("the untrained policy earns the same for every completion" in text for text in told)


def test_a_sweep_without_a_signal_starts_no_fourth_training(spec: SweepSpec):
    with Ledger.open(spec) as ledger:
        driver = Driver(ledger)
        driver.end(driver.ask())
        for _ in range(3):
            while (name := driver.ask()) is None:  # the sampler is thinking
                pass
            driver.end(name, failure="no signal: every advantage was 0")
        assert driver.ask() == driver.searcher.FINISHED
        records = ledger.get_records()
    assert [record.had_no_signal for record in records] == [False, True, True, True]
    assert is_finished(spec, records)
