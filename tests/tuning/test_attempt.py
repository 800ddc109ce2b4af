"""An attempt at a trial between train() and Ray: results, reports, and a directory that is away."""

import errno
import itertools
import os
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError
from ray.train import WorkerGroupError

from gdpo_tune.core import errors
from gdpo_tune.core.object_store import SPEC
from gdpo_tune.core.settings import TrainingSettings
from gdpo_tune.core.system import RENDEZVOUS
from gdpo_tune.core.trials import Cost, Measurement
from gdpo_tune.spec import Resources
from gdpo_tune.tracking.run_content import select_curve_values
from gdpo_tune.tuning import attempts
from gdpo_tune.tuning.nodes import ClusterNode, count_slots
from gdpo_tune.tuning.ray import attempt as adapter
from gdpo_tune.tuning.ray import tune, workers
from gdpo_tune.tuning.ray.attempt import Reporter, compute_memory_limit, has_directory, run_trial
from tests.support.clock import replace_pauses
from tests.support.tuning import (
    build_attempt,
    build_measurement,
    build_outcome,
    build_trial_config,
    load_code_spec,
    record_reports,
)

FAILURE = errors.NonFiniteError("loss is nan at step 3")
NO_ISOLATION, NO_TOKEN = (
    errors.SandboxUnavailable("no isolation"),
    errors.PolicyError("no pad token"),
)
FULL = OSError(errno.ENOSPC, "No space left on device")
behaviour = []
"""What `train` below does next: an exception to raise, or something to return."""
GIB = 2**30


def train(config, *, resume, report):
    report(Measurement(1, {}, Cost()), None)
    action = behaviour.pop()
    if isinstance(action, BaseException):
        raise action
    return action


@pytest.fixture
def config(tmp_path):
    return build_trial_config(tmp_path)


@pytest.fixture
def sent(monkeypatch):
    """Measurements that were sent to Ray."""
    monkeypatch.setattr(adapter, "_trials_served", 0)
    monkeypatch.setattr(adapter, "describe_place", lambda: attempts.TrialPlaced("process", "node"))
    return record_reports(monkeypatch)


def run_attempt(config, does=None, train=f"{__name__}:train", **setup):
    behaviour.extend([] if does is None else [does])
    return attempts.unwrap_message(
        run_trial(attempts.wrap_for_ray(build_attempt(config, train, **setup)))
    )


def request_stop(config, trial=None):
    attempts.StopFlag(config.directory.parent.parent).request(trial)


def test_ray_formats_an_attempt_as_its_trial_alone(config):
    """`TuneController._process_trial_results` formats every result with its config each time."""
    assert str(attempts.wrap_for_ray(build_attempt(config))) == "{'gdpo_tune': 3}"


@pytest.mark.parametrize(
    ("end", "result"),
    [
        (build_outcome(), attempts.Finished(build_outcome())),
        (FAILURE, attempts.Failed("loss is nan at step 3")),
        (NO_ISOLATION, attempts.Fatal(NO_ISOLATION)),
        (NO_TOKEN, attempts.Fatal(NO_TOKEN)),
    ],
)
def test_an_attempt_returns_what_another_one_would_not_change(config, sent, end, result):
    assert run_attempt(config, end) == result


@pytest.mark.parametrize(
    ("error", "raised", "cause"),
    [
        (RuntimeError("broken"), RuntimeError, None),
        (
            errors.EngineDiedError("vLLM died after 3 steps: CUDA error"),
            errors.EngineDiedError,
            None,
        ),
        (SystemExit("by Ray"), SystemExit, None),
        (
            errors.CrowdedGpuError("other processes hold memory"),
            attempts.AttemptError,
            "gpu_contention",
        ),
    ],
)
def test_other_errors_end_an_attempt_and_not_the_trial(config, sent, error, raised, cause):
    with pytest.raises(raised, match=str(error)) as caught:
        run_attempt(config, error)
    assert getattr(caught.value, "cause", None) == cause


def test_an_interruption_stops_at_the_next_report(config, sent):
    request_stop(config)
    assert run_attempt(config) == attempts.Interrupted()
    assert sent == []


@pytest.fixture
def machine(monkeypatch):
    """Nodes of a Ray cluster, and the memory of this one, on which the process is `here`."""
    machine = SimpleNamespace(memory=2**50, here={"CPU": 4.0})
    nodes = [("here", machine.here), ("there", {"CPU": 60.0})]
    table = [{"NodeID": name, "Resources": resources} for name, resources in nodes]
    context = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr(adapter, "read_machine_memory", lambda: machine.memory)
    monkeypatch.setattr(adapter.ray, "nodes", lambda: table)
    monkeypatch.setattr(adapter.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(adapter, "count_on_node", adapter.count_on_node.__wrapped__)
    return machine


def test_a_process_that_has_grown_too_large_takes_no_second_trial(
    config, sent, machine, monkeypatch
):
    first, second, third = (build_outcome(correctness=share) for share in (0.1, 0.2, 0.3))
    assert run_attempt(config, first) == attempts.Finished(first)
    assert run_attempt(config, second) == attempts.Finished(second)
    machine.memory = 1
    with pytest.raises(attempts.AttemptError, match="grown too large"):
        run_attempt(config)
    monkeypatch.setattr(adapter, "_trials_served", 0)
    assert run_attempt(config, third) == attempts.Finished(third)  # or no trial would ever run


@pytest.mark.parametrize(
    ("here", "cpus", "gpus", "share"),
    [
        ({"CPU": 4.0}, 1.0, 0.0, 1 / 4),
        ({"CPU": 4.0}, 0.5, 0.0, 1 / 8),
        ({"CPU": 4.0, "GPU": 2.0}, 1.0, 1.0, 1 / 2),  # of which there are fewer than cores
        ({"CPU": 4.0, "GPU": 2.0}, 3.0, 0.5, 3 / 4),
        ({"GPU": 1.0}, 1.0, 0.0, 1),  # for processes that only wait for others
    ],
)
def test_a_process_may_grow_to_its_share_of_its_node(machine, here, cpus, gpus, share):
    machine.memory = 8 * GIB
    machine.here.clear()
    machine.here.update(here)
    assert compute_memory_limit(cpus, gpus) == pytest.approx(0.6 * 8 * GIB * share)


def count_trial_slots(directory, nodes, *overrides, **resources):
    alive = [ClusterNode("id", "host", amounts) for amounts in nodes]
    changes = {"resources": Resources(**resources)}
    return count_slots(load_code_spec(directory, overrides).model_copy(update=changes), alive)


NODES = [{"CPU": 3.0}, {"CPU": 4.0}]
GPUS = [{"CPU": 8.0, "GPU": 4.0}]
SERVER = "rollout={engine: vllm, vllm_mode: server, vllm_server: 'http://a:1'}"


@pytest.mark.parametrize(
    ("cpus", "gpus", "workers", "nodes", "overrides", "expected"),
    [
        (1, 0, 1, [{"CPU": 2}], [], 2),
        (0.1, 0, 1, [{"CPU": 1}], [], 10),
        (2, 0, 1, [{"CPU": 3}, {"CPU": 5}], [], 3),
        (1, 0.5, 1, [{"CPU": 8, "GPU": 1}, {"CPU": 8}], [], 2),
        (4, 0.25, 1, [{"CPU": 8, "GPU": 1}], [], 2),
        # one a device: a third would lie across both
        (1, 0.6, 1, [{"CPU": 8, "GPU": 2}], [], 2),
        (1, 0.1, 1, [{"CPU": 64, "GPU": 2}], [], 20),
        (1, 2, 1, [{"CPU": 8, "GPU": 5}], [], 2),
        (1, 0, 2, NODES, [], 3),
        (2, 0, 2, NODES, [], 1),
        (1, 0, 7, NODES, [], 1),
        (3, 0, 2, NODES, [], 1),
        (1, 0.5, 1, GPUS, [], 8),
        (1, 0.5, 1, GPUS, [SERVER], 1),  # which holds one policy at a time
    ],
)
def test_slots(tmp_path, cpus, gpus, workers, nodes, overrides, expected):
    amounts = {"cpus": cpus, "gpus": gpus, "workers": workers}
    assert count_trial_slots(tmp_path, nodes, *overrides, **amounts) == expected


CPUS_20 = "20 CPUs .* fix: .*"


@pytest.mark.parametrize(
    ("nodes", "amounts", "message"),
    [
        (
            [{"CPU": 1}, {"CPU": 1.5}],
            {"cpus": 20},
            f"{CPUS_20}at most --set resources.cpus=1.5 --set resources.gpus=0,",
        ),
        (
            [{"CPU": 9}, {"CPU": 1, "GPU": 8}],
            {"cpus": 20},
            f"{CPUS_20}resources.cpus=1 --set resources.gpus=1,",
        ),
        ([], {"cpus": 20}, f"{CPUS_20}join a node that has them"),
        (
            NODES,
            {"workers": 8},
            r"8 workers of 1 CPU .* room for 7 \(2 nodes alive\).*resources.workers=4, or",
        ),
    ],
)
def test_a_trial_that_fits_nowhere_is_refused(tmp_path, nodes, amounts, message):
    with pytest.raises(errors.ResourcesError, match=f"(?s){message}"):
        count_trial_slots(tmp_path, nodes, **amounts)


@pytest.mark.parametrize(
    ("overrides", "reused"),
    [
        ([], True),
        (["rollout.engine=vllm"], True),
        (["resources.gpus=0.5", "rollout.reuse_engine=false"], False),
        (["rollout={engine: vllm, reuse_engine: false}"], False),
        (["rollout.reuse_engine=false"], True),
    ],
)
def test_a_trial_that_may_use_an_engine_gets_a_new_process_on_request(
    tmp_path, monkeypatch, overrides, reused
):
    monkeypatch.setattr(tune, "Tuner", lambda trainable, **options: options)
    spec = load_code_spec(tmp_path, overrides)
    setup = attempts.RunSettings("", tmp_path, gpus=spec.resources.gpus)
    options = tune.build_tuner(spec, tmp_path, 64, setup, None, None, lambda: None)
    assert os.environ["TUNE_MAX_PENDING_TRIALS_PG"] == "64"  # processes start side by side
    assert options["tune_config"].reuse_actors is reused
    run = options["run_config"]
    assert (run.failure_config.max_failures, run.verbose) == (0, 0)  # both are the sweep's


def test_a_process_that_waits_for_workers_takes_no_cpu(tmp_path):
    assert tune.build_resources(load_code_spec(tmp_path)) == {"cpu": 1.0, "gpu": 0.0}
    group = tune.build_resources(load_code_spec(tmp_path, ["resources.workers=2"]))
    assert group.required_resources == {"node:__internal_head__": 0.0001}


class LostProcess(Exception):
    """The error of the other processes of a group when one fails."""


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        ({0: LostProcess("peer"), 1: errors.NonFiniteError("loss is nan")}, "loss is nan"),
        ({0: LostProcess("peer"), 1: RayActorError()}, "one of the trial's 2 processes died"),
        ({1: LostProcess("peer")}, "peer"),
        ({}, "could not start"),
    ],
)
def test_the_error_of_a_group_is_its_first_cause(failures, expected):
    assert expected in str(workers.find_cause(WorkerGroupError("could not start", failures), 2))


def test_a_full_disk_and_a_damaged_checkpoint_are_reported(config, sent, machine):
    result = run_attempt(config, FULL)
    assert isinstance(result, attempts.Fatal)
    assert isinstance(result.error, errors.DiskFullError)
    assert str(config.directory) in str(result.error)
    (config.directory / "checkpoint-5").mkdir()
    result = run_attempt(config, build_outcome())
    assert isinstance(result, attempts.Finished)
    assert result.outcome.environment["resumed"] == (
        "checkpoint-5 is incomplete (complete.json is missing): the trial starts over"
    )


def test_a_gpu_that_cuda_cannot_use_ends_the_sweep(config, sent, machine, monkeypatch):
    config = replace(config, needs_gpu=True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = run_attempt(config, train="gdpo_tune.training:train", gpus=0.5)
    assert isinstance(result, attempts.Fatal)
    assert "cannot use a GPU" in str(result.error)
    attempt = build_attempt(config, "gdpo_tune.training:train", gpus=0.5)
    with pytest.raises(errors.ResourcesError, match="cannot use a GPU"):
        workers.train_in_worker(attempts.wrap_for_ray(attempt))
    assert isinstance(run_attempt(config, build_outcome(), gpus=0.5), attempts.Finished)


def test_a_trial_of_one_process_gets_no_rendezvous_of_a_launcher(config, sent, monkeypatch):
    seen = {}

    def look(config, *, resume, report):
        seen.update({name: os.environ.get(name) for name in RENDEZVOUS})

    for name in RENDEZVOUS:
        monkeypatch.setenv(name, "2")
    monkeypatch.setattr(adapter.registry, "load", lambda _: look)
    assert run_attempt(config) == attempts.Interrupted()
    assert seen == dict.fromkeys(RENDEZVOUS)


def send_steps(config, steps, validated=(), **setup):
    """Report every step of a trial; those that are `validated` have an evaluation."""
    training = TrainingSettings(steps=steps)
    report = Reporter(build_attempt(replace(config, training=training), **setup))
    for step in range(1, steps + 1):
        plain = Measurement(step, {"train/loss": 1.0}, Cost())
        report(build_measurement(step, format=0.5) if step in validated else plain, None)
    return training


def advance_clock(monkeypatch, seconds):
    """Let so many seconds pass between two readings of the clock, which no other thread reads."""
    clock = itertools.count(100.0, seconds)
    monkeypatch.setattr(adapter, "time", SimpleNamespace(monotonic=lambda: next(clock)))


@pytest.mark.parametrize("steps", [1, 7, 20, 21, 59, 60, 61, 100, 119, 199, 200, 400, 1000, 5000])
def test_a_fast_trial_has_20_to_60_points_per_curve(config, sent, monkeypatch, steps):
    """Measurements are thinned twice: for the driver and for the tracker."""
    advance_clock(monkeypatch, 0.0)
    training = send_steps(config, steps)
    curve = [m.step for m in sent if select_curve_values(m, training)]
    assert min(steps, 20) <= len(curve) <= 60
    assert curve[-1] == steps
    assert len(sent) <= len(curve) + 1  # the first is sent at once


def test_an_evaluation_is_always_sent(config, sent, monkeypatch):
    advance_clock(monkeypatch, 0.0)
    send_steps(config, 100, validated=[33])
    assert 33 in {m.step for m in sent}


def test_many_trials_report_seldom_and_validation_at_once(config, sent, monkeypatch):
    """One step per second, one result every five seconds."""
    advance_clock(monkeypatch, 1.0)
    send_steps(config, 120, validated=(33, 120), interval=5.0)
    steps = [measurement.step for measurement in sent]
    assert steps[:3] == [1, 6, 11]
    assert {33, 120} <= {*steps}, "what is validated waits for nothing"
    assert len(steps) <= 27


def test_a_slow_trial_sends_every_point(config, sent, monkeypatch):
    advance_clock(monkeypatch, 2.0)
    send_steps(config, 7)
    assert [m.step for m in sent] == list(range(1, 8))


def test_the_report_interval_grows_with_the_number_of_slots():
    assert [attempts.choose_interval(slots) for slots in (200, 1000)] == [0, 5]


def test_a_trial_that_the_driver_halts_at_a_rung_takes_no_further_step(config, sent, monkeypatch):
    receive = adapter.tune.report

    def halt(result):  # Ray returns once the driver has dealt with it
        receive(result)
        if sent[-1].has_validation:
            request_stop(config, 3)

    monkeypatch.setattr(adapter.tune, "report", halt)
    report = Reporter(build_attempt(config))
    report(Measurement(1, {}, Cost()), None)
    with pytest.raises(SystemExit):
        report(build_measurement(2, format=0.5), None)
    assert report.stopped
    assert [m.step for m in sent] == [1, 2]


def test_a_process_that_begins_with_a_request_to_halt_ends_at_its_first_step(config, sent):
    request_stop(config, 3)
    with pytest.raises(SystemExit):
        Reporter(build_attempt(config))(Measurement(1, {}, Cost()), None)
    assert not sent


# The sweep's directory is away


@pytest.fixture
def spec_file(tmp_path):
    return tmp_path / SPEC


def replace_attempt(monkeypatch, run):
    monkeypatch.setattr(adapter, "run_attempt", lambda _: run())


def test_an_empty_directory_in_its_place_is_not_the_directory(config, sent, spec_file):
    attempt = build_attempt(config)
    report = Reporter(attempt)
    assert has_directory(attempt.setup)
    spec_file.unlink()
    assert not has_directory(attempt.setup)
    assert has_directory(replace(attempt.setup, address="s3://bucket/night")), "none to lose"
    with pytest.raises(attempts.AttemptError, match="is away"):
        report(Measurement(1, {}, Cost(64, 1.0)), None)


@pytest.mark.parametrize("error", [None, FileNotFoundError("checkpoint-1")])
def test_an_attempt_without_the_directory_waits_for_it_and_does_not_count(
    config, sent, spec_file, monkeypatch, error
):
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            spec_file.touch()

    def run():
        spec_file.unlink()
        if error:
            raise error
        return attempts.Failed("no task file")

    replace_pauses(monkeypatch, sleep)
    replace_attempt(monkeypatch, run)
    with pytest.raises(attempts.AttemptError, match="waited 3 s for it"):
        run_attempt(config)
    assert waits == [1, 1, 1]


def test_a_directory_that_stays_missing_ends_the_sweep(config, sent, spec_file, monkeypatch):
    monkeypatch.setattr(adapter, "OUTAGE_SECONDS", -1.0)
    replace_attempt(monkeypatch, spec_file.unlink)
    result = run_attempt(config)
    assert isinstance(result, attempts.Fatal)
    assert isinstance(result.error, errors.DirectoryLostError)
    assert re.search(r"is gone.*\n.*fix: mount it again", str(result.error))


def test_other_failures_are_returned_unchanged(config, sent, monkeypatch):
    replace_attempt(monkeypatch, lambda: attempts.Failed("its own"))
    assert run_attempt(config) == attempts.Failed("its own")
