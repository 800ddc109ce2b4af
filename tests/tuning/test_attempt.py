"""An attempt at a trial between train() and Ray: results, reports, and a directory that is away."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError
from ray.train import WorkerGroupError

from gdpo_tune.core.errors import (
    CrowdedGpuError,
    DirectoryLostError,
    DiskFullError,
    EngineDiedError,
    NonFiniteError,
    PolicyError,
    ResourcesError,
    SandboxUnavailable,
)
from gdpo_tune.core.object_store import SPEC
from gdpo_tune.core.settings import TrainingSettings
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.core.trials import Cost, Measurement
from gdpo_tune.spec import Resources
from gdpo_tune.tracking.run_content import select_curve_values
from gdpo_tune.tuning.attempts import (
    AttemptConfig,
    AttemptError,
    Failed,
    Fatal,
    Finished,
    Interrupted,
    RunSettings,
    StopFlag,
    TrialMessage,
    TrialPlaced,
    TrialResult,
    TrialUpdate,
    choose_interval,
    unwrap_message,
    wrap_for_ray,
)
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

FAILURE = NonFiniteError("loss is nan at step 3")
NO_ISOLATION, NO_TOKEN = SandboxUnavailable("no isolation"), PolicyError("no pad token")
NODES = [{"CPU": 3.0}, {"CPU": 4.0}]
behaviour: list[Any] = []
"""What `train` below does next: an exception to raise, or something to return."""


def train(config: TrialConfig, *, resume: Path | None, report: Reporter) -> Any:
    report(Measurement(1, {}, Cost()), None)
    action = behaviour.pop()
    if isinstance(action, BaseException):
        raise action
    return action


@pytest.fixture
def config(tmp_path: Path) -> TrialConfig:
    return build_trial_config(tmp_path)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Measurement]:
    """Measurements that were sent to Ray."""
    monkeypatch.setattr(adapter, "_trials_served", 0)
    monkeypatch.setattr(adapter, "describe_place", lambda: TrialPlaced("process", "node"))
    return record_reports(monkeypatch)


def run_attempt(config: TrialConfig) -> TrialMessage | None:
    return unwrap_message(run_trial(wrap_for_ray(build_attempt(config, f"{__name__}:train"))))


def request_stop(config: TrialConfig, trial: int | None = None) -> None:
    StopFlag(build_attempt(config).setup.spec_file.parent).request(trial)


def test_ray_formats_an_attempt_as_its_trial_alone(config: TrialConfig):
    """`TuneController._process_trial_results` formats every result with its config each time."""
    assert str(wrap_for_ray(build_attempt(config))) == "{'gdpo_tune': 3}"


@pytest.mark.parametrize(
    ("end", "result"),
    [
        (build_outcome(), Finished(build_outcome())),
        (FAILURE, Failed("loss is nan at step 3")),
        (NO_ISOLATION, Fatal(NO_ISOLATION)),
        (NO_TOKEN, Fatal(NO_TOKEN)),
    ],
)
def test_an_attempt_returns_what_another_one_would_not_change(
    config: TrialConfig, sent: list[Measurement], end: Any, result: TrialMessage
):
    behaviour.append(end)
    assert run_attempt(config) == result


@pytest.mark.parametrize(
    "error",
    [RuntimeError("broken"), EngineDiedError("vLLM died after 3 optimizer steps: CUDA error")],
)
def test_other_errors_are_raised_to_be_tried_again(
    config: TrialConfig, sent: list[Measurement], error: Exception
):
    behaviour.append(error)
    with pytest.raises(type(error), match=str(error)):
        run_attempt(config)


def test_a_crowded_gpu_ends_an_attempt_and_not_the_trial(
    config: TrialConfig, sent: list[Measurement]
):
    behaviour.append(CrowdedGpuError("other processes hold memory"))
    with pytest.raises(AttemptError, match="other processes hold memory") as caught:
        run_attempt(config)
    assert caught.value.cause == "gpu_contention"


def test_an_interruption_stops_at_the_next_report(config: TrialConfig, sent: list[Measurement]):
    request_stop(config)
    assert run_attempt(config) == Interrupted()
    assert sent == []


def test_a_stop_by_ray_is_raised_unchanged(config: TrialConfig, sent: list[Measurement]):
    behaviour.append(SystemExit())
    with pytest.raises(SystemExit):
        run_attempt(config)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Nodes of a Ray cluster; this process is on `here`, in a container of 8 GiB."""
    table = [
        {"NodeID": "here", "Resources": {"CPU": 4.0}},
        {"NodeID": "there", "Resources": {"CPU": 60.0}},
    ]
    monkeypatch.setattr(adapter, "read_machine_memory", lambda: 8 * 2**30)
    monkeypatch.setattr(adapter.ray, "nodes", lambda: table)
    context = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr(adapter.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(adapter, "count_on_node", adapter.count_on_node.__wrapped__)
    return table


@pytest.mark.usefixtures("nodes")
def test_a_process_that_has_grown_too_large_takes_no_second_trial(
    config: TrialConfig, sent: list[Measurement], monkeypatch: pytest.MonkeyPatch
):
    first, second, third = (build_outcome(correctness=share) for share in (0.1, 0.2, 0.3))
    behaviour.extend([third, second, first])
    monkeypatch.setattr(adapter, "read_machine_memory", lambda: 2**50)
    assert run_attempt(config) == Finished(first)
    assert run_attempt(config) == Finished(second)
    monkeypatch.setattr(adapter, "read_machine_memory", lambda: 1)
    with pytest.raises(AttemptError, match="grown too large"):
        run_attempt(config)
    monkeypatch.setattr(adapter, "_trials_served", 0)
    assert run_attempt(config) == Finished(third)  # or no trial would ever run


def test_a_process_may_grow_to_its_share_of_its_node(nodes: list[dict[str, Any]]):
    assert compute_memory_limit(1.0) == pytest.approx(0.6 * 8 * 2**30 / 4)
    assert compute_memory_limit(0.5) == pytest.approx(0.6 * 8 * 2**30 / 8)
    nodes[0]["Resources"]["GPU"] = 2.0  # of which there are fewer than cores
    assert compute_memory_limit(1.0, 1.0) == pytest.approx(0.6 * 8 * 2**30 / 2)
    assert compute_memory_limit(3.0, 0.5) == pytest.approx(0.6 * 8 * 2**30 * 3 / 4)
    nodes[0]["Resources"] = {"GPU": 1.0}  # for processes that only wait for others
    assert compute_memory_limit(1.0) == pytest.approx(0.6 * 8 * 2**30)


@pytest.mark.parametrize(
    ("cpus", "gpus", "workers", "nodes", "expected"),
    [
        (1, 0, 1, [{"CPU": 2}], 2),
        (0.1, 0, 1, [{"CPU": 1}], 10),
        (2, 0, 1, [{"CPU": 3}, {"CPU": 5}], 3),
        (1, 0.5, 1, [{"CPU": 8, "GPU": 1}, {"CPU": 8}], 2),
        (4, 0.25, 1, [{"CPU": 8, "GPU": 1}], 2),
        (1, 0.6, 1, [{"CPU": 8, "GPU": 2}], 2),  # one a device: a third would lie across both
        (1, 0.1, 1, [{"CPU": 64, "GPU": 2}], 20),
        (1, 2, 1, [{"CPU": 8, "GPU": 5}], 2),
        (1, 0, 2, NODES, 3),
        (2, 0, 2, NODES, 1),
        (1, 0, 7, NODES, 1),
        (3, 0, 2, NODES, 1),
    ],
)
def test_slots(
    tmp_path: Path,
    cpus: float,
    gpus: float,
    workers: int,
    nodes: list[dict[str, float]],
    expected: int,
):
    amounts = {"cpus": cpus, "gpus": gpus, "workers": workers}
    assert count_trial_slots(tmp_path, nodes, **amounts) == expected


def count_trial_slots(directory: Path, nodes: list[dict[str, float]], **resources: float) -> int:
    alive = [ClusterNode("id", "host", amounts) for amounts in nodes]
    requested = Resources(**resources)
    return count_slots(load_code_spec(directory).model_copy(update={"resources": requested}), alive)


@pytest.mark.parametrize(
    ("nodes", "fix"),
    [
        ([{"CPU": 1}, {"CPU": 1.5}], "at most --set resources.cpus=1.5 --set resources.gpus=0,"),
        ([{"CPU": 9}, {"CPU": 1, "GPU": 8}], "resources.cpus=1 --set resources.gpus=1,"),
        ([], "join a node that has them"),
    ],
)
def test_a_trial_that_fits_nowhere_is_refused(
    tmp_path: Path, nodes: list[dict[str, float]], fix: str
):
    with pytest.raises(ResourcesError, match=rf"(?s)20 CPUs .* fix: .*{re.escape(fix)}"):
        count_trial_slots(tmp_path, nodes, cpus=20)


# Resources requested from Ray Tune


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], reused: bool
):
    monkeypatch.setattr(tune, "Tuner", lambda trainable, **options: options)
    lifecycle: Any = None
    spec = load_code_spec(tmp_path, overrides)
    setup = RunSettings("", tmp_path, gpus=spec.resources.gpus)
    options: Any = tune.build_tuner(spec, tmp_path, 64, setup, lifecycle, lifecycle, lambda: None)
    assert os.environ["TUNE_MAX_PENDING_TRIALS_PG"] == "64"  # processes start side by side
    assert options["tune_config"].reuse_actors is reused


def test_a_server_holds_one_policy_at_a_time(tmp_path: Path):
    nodes = [ClusterNode("a", "here", {"CPU": 8.0, "GPU": 4.0})]
    server = "rollout={engine: vllm, vllm_mode: server, vllm_server: 'http://a:1'}"
    assert count_slots(load_code_spec(tmp_path, ["resources.gpus=0.5"]), nodes) == 8
    assert count_slots(load_code_spec(tmp_path, ["resources.gpus=0.5", server]), nodes) == 1


def test_workers_that_do_not_fit_are_refused(tmp_path: Path):
    with pytest.raises(
        ResourcesError,
        match=r"(?s)8 workers of 1 CPU .* room for 7 \(2 nodes alive\).*resources.workers=4, or",
    ):
        count_trial_slots(tmp_path, NODES, workers=8)


def test_a_process_that_waits_for_workers_takes_no_cpu(tmp_path: Path):
    alone = tune.build_resources(load_code_spec(tmp_path))
    assert alone == {"cpu": 1.0, "gpu": 0.0}
    group = tune.build_resources(load_code_spec(tmp_path, ["resources.workers=2"]))
    assert group.required_resources == {"node:__internal_head__": 0.0001}


class LostProcess(Exception):
    """The error of the other processes of a group when one fails."""


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        ({0: LostProcess("peer"), 1: NonFiniteError("loss is nan")}, "loss is nan"),
        (
            {0: LostProcess("peer"), 1: RayActorError(error_msg="gone")},
            "one of the trial's 2 processes died",
        ),
        ({1: LostProcess("peer")}, "peer"),
        ({}, "could not start"),
    ],
)
def test_the_error_of_a_group_is_its_first_cause(failures: dict[int, Exception], expected: str):
    error = WorkerGroupError("could not start", failures)
    assert expected in str(workers.find_cause(error, 2))


@pytest.mark.usefixtures("nodes")
def test_a_full_disk_and_a_damaged_checkpoint_are_reported(
    config: TrialConfig, sent: list[Measurement], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(adapter, "read_machine_memory", lambda: 2**50)
    full = OSError(errno.ENOSPC, "No space left on device")
    behaviour.append(full)
    result = run_attempt(config)
    assert isinstance(result, Fatal)
    assert isinstance(result.error, DiskFullError)
    assert str(config.directory) in str(result.error)
    (config.directory / "checkpoint-5").mkdir()
    behaviour.append(build_outcome())
    result = run_attempt(config)
    assert isinstance(result, Finished)
    assert result.outcome.environment["resumed"] == (
        "checkpoint-5 is incomplete (complete.json is missing): the trial starts over"
    )


@pytest.mark.usefixtures("nodes")
def test_a_gpu_that_cuda_cannot_use_ends_the_sweep(config, sent, monkeypatch):
    config = replace(config, needs_gpu=True)
    monkeypatch.setattr(adapter, "read_machine_memory", lambda: 2**50)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    attempt = build_attempt(config, "gdpo_tune.training:train", gpus=0.5)
    result = unwrap_message(run_trial(wrap_for_ray(attempt)))
    assert isinstance(result, Fatal)
    assert "cannot use a GPU" in str(result.error)
    with pytest.raises(ResourcesError, match="cannot use a GPU"):
        workers.train_in_worker(wrap_for_ray(attempt))
    behaviour.append(build_outcome())
    other = build_attempt(config, f"{__name__}:train", gpus=0.5)
    assert isinstance(unwrap_message(run_trial(wrap_for_ray(other))), Finished)


def test_a_trial_of_one_process_gets_no_rendezvous_of_a_launcher(tmp_path, monkeypatch):
    from gdpo_tune.core.system import RENDEZVOUS

    seen = {}

    def look(config, *, resume, report):
        seen.update({name: os.environ.get(name) for name in RENDEZVOUS})

    for name in RENDEZVOUS:
        monkeypatch.setenv(name, "2")
    monkeypatch.setattr(adapter.registry, "load", lambda _: look)
    attempt = build_attempt(build_trial_config(tmp_path))
    assert adapter.run_attempt(attempt) == Interrupted()
    assert seen == dict.fromkeys(RENDEZVOUS)


@pytest.mark.parametrize("steps", [1, 7, 20, 21, 59, 60, 61, 100, 119, 199, 200, 400, 1000, 5000])
def test_a_fast_trial_has_20_to_60_points_per_curve(
    config: TrialConfig, sent: list[Measurement], monkeypatch: pytest.MonkeyPatch, steps: int
):
    """Measurements are thinned twice: for the driver and for the tracker."""
    monkeypatch.setattr(adapter.time, "monotonic", lambda: 100.0)
    training = TrainingSettings(steps=steps)
    report = Reporter(build_attempt(replace(config, training=training)))
    for step in range(1, steps + 1):
        report(Measurement(step, {"train/loss": 1.0}, Cost()), None)
    curve = [m.step for m in sent if select_curve_values(m, training)]
    assert min(steps, 20) <= len(curve) <= 60
    assert curve[-1] == steps
    assert len(sent) <= len(curve) + 1  # the first is sent at once


def test_an_evaluation_is_always_sent(
    config: TrialConfig, sent: list[Measurement], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(adapter.time, "monotonic", lambda: 100.0)
    report = Reporter(build_attempt(config))
    for step in range(1, 101):
        plain = Measurement(step, {"train/loss": 1.0}, Cost())
        report(build_measurement(33, format=0.5) if step == 33 else plain, None)
    assert 33 in {m.step for m in sent}


def test_a_trial_that_the_driver_halts_at_a_rung_takes_no_further_step(
    config: TrialConfig, sent: list[Measurement], monkeypatch: pytest.MonkeyPatch
):
    def halt(result: dict[str, Any]) -> None:  # Ray returns once the driver has dealt with it
        message = unwrap_message(result)
        assert isinstance(message, TrialUpdate)
        sent.append(message.measurement)
        if message.measurement.has_validation:
            request_stop(config, 3)

    monkeypatch.setattr(adapter.tune, "report", halt)
    report = Reporter(build_attempt(config))
    report(Measurement(1, {}, Cost()), None)
    with pytest.raises(SystemExit):
        report(build_measurement(2, format=0.5), None)
    assert report.stopped
    assert [m.step for m in sent] == [1, 2]


def test_a_process_that_begins_with_a_request_to_halt_ends_at_its_first_step(
    config: TrialConfig, sent: list[Measurement]
):
    request_stop(config, 3)
    with pytest.raises(SystemExit):
        Reporter(build_attempt(config))(Measurement(1, {}, Cost()), None)
    assert not sent


def test_many_trials_report_seldom_and_validation_at_once(
    config: TrialConfig, monkeypatch: pytest.MonkeyPatch
):
    """One step per second, one result every five seconds."""
    results: list[Any] = []
    clock = iter(range(1, 1000))
    monkeypatch.setattr(
        adapter.tune, "report", lambda packed: results.append(unwrap_message(packed))
    )
    monkeypatch.setattr(adapter.time, "monotonic", lambda: float(next(clock)))
    training = TrainingSettings(steps=120)
    report = Reporter(build_attempt(replace(config, training=training), interval=5.0))
    for step in range(1, 121):
        plain = Measurement(step, {"train/loss": 1.0}, Cost())
        report(build_measurement(step, format=0.5) if step in (33, 120) else plain, None)
    steps = [result.measurement.step for result in results]
    assert steps[:3] == [1, 6, 11]
    assert {33, 120} <= {*steps}, "what is validated waits for nothing"
    assert len(steps) <= 27


def test_the_report_interval_grows_with_the_number_of_slots():
    assert choose_interval(200) == 0
    assert choose_interval(1000) == 5


def test_a_slow_trial_sends_every_point(
    config: TrialConfig, sent: list[Measurement], monkeypatch: pytest.MonkeyPatch
):
    clock = iter(range(0, 1000, 2))
    monkeypatch.setattr(adapter.time, "monotonic", lambda: float(next(clock)))
    report = Reporter(build_attempt(config))
    for step in range(1, 8):
        report(Measurement(step, {}, Cost()), None)
    assert [m.step for m in sent] == list(range(1, 8))


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AttemptConfig:
    monkeypatch.setattr(adapter, "describe_place", lambda: TrialPlaced("process", "node"))
    monkeypatch.setattr(adapter.tune, "report", lambda _: None)
    return build_attempt(build_trial_config(tmp_path))


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    return tmp_path / SPEC


def test_an_empty_directory_in_its_place_is_not_the_directory(
    attempt: AttemptConfig, spec_file: Path
):
    assert has_directory(attempt.setup)
    spec_file.unlink()
    assert not has_directory(attempt.setup)
    assert has_directory(replace(attempt.setup, address="s3://bucket/night")), "none to lose"


@pytest.mark.parametrize("ends", ["failure", "error"])
def test_an_attempt_without_the_directory_waits_for_it_and_does_not_count(
    attempt: AttemptConfig, spec_file: Path, monkeypatch: pytest.MonkeyPatch, ends: str
):
    waits = list[float]()

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            spec_file.touch()

    def run(attempt: AttemptConfig) -> TrialResult:
        spec_file.unlink()
        if ends == "error":
            raise FileNotFoundError("checkpoint-1")
        return Failed("no task file")

    replace_pauses(monkeypatch, sleep)
    monkeypatch.setattr(adapter, "run_attempt", run)
    with pytest.raises(AttemptError, match="waited 3 s for it"):
        adapter.run_trial(wrap_for_ray(attempt))
    assert waits == [1, 1, 1]


def test_a_directory_that_stays_missing_ends_the_sweep(
    attempt: AttemptConfig, spec_file: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(adapter, "OUTAGE_SECONDS", -1.0)
    monkeypatch.setattr(adapter, "run_attempt", lambda _: spec_file.unlink())
    result = unwrap_message(adapter.run_trial(wrap_for_ray(attempt)))
    assert isinstance(result, Fatal)
    assert isinstance(result.error, DirectoryLostError)
    assert re.search(r"is gone.*\n.*fix: mount it again", str(result.error))


def test_other_failures_are_returned_unchanged(
    attempt: AttemptConfig, monkeypatch: pytest.MonkeyPatch
):
    def fail(attempt: AttemptConfig) -> TrialResult:
        raise RuntimeError("its own")

    monkeypatch.setattr(adapter, "run_attempt", lambda _: Failed("its own"))
    assert unwrap_message(adapter.run_trial(wrap_for_ray(attempt))) == Failed("its own")
    monkeypatch.setattr(adapter, "run_attempt", fail)
    with pytest.raises(RuntimeError, match="its own"):
        adapter.run_trial(wrap_for_ray(attempt))


def test_a_report_without_the_directory_is_ignored(attempt: AttemptConfig, spec_file: Path):
    report = Reporter(attempt)
    spec_file.unlink()
    with pytest.raises(AttemptError, match="is away"):
        report(Measurement(1, {}, Cost(64, 1.0)), None)
