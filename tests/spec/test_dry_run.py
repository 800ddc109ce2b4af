"""The text of --dry-run, its warnings, and the machine's resources."""

import dataclasses
import json
import os

import pytest

from gdpo_tune.core.errors import ResourcesError
from gdpo_tune.core.object_store import SPEC
from gdpo_tune.core.redaction import redact_passwords
from gdpo_tune.core.task_info import UNKNOWN_RANGE
from gdpo_tune.spec import load_spec, machine
from gdpo_tune.spec.dry_run import describe_time, render_dry_run
from gdpo_tune.spec.machine import check_resources, count_visible_gpus, list_sandbox_warnings
from gdpo_tune.spec.spec_warnings import list_warnings
from gdpo_tune.tasks import code
from tests.support.paths import ROOT


def test_dry_run_tells_space_prompts_and_budget(load):
    spec = load(
        "space.group_size={range: [4, 16], step: 12}",
        "space.beta={log: [1e-3, 1], when: {normalization: gdpo}}",
        "training={steps: 10, completions_per_step: 64, evaluate_every: 4}",
        "training.validation_prompts=100",
        "training.test_prompts=200",
        "search={trials: 5, replicates: {max_runs: 3}}",
        "search={merges: {budget: 2}, checkpoints: {budget: 1}}",
    )
    text = render_dry_run(spec)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert spec.dump_yaml().rstrip() in text
    assert f"# Identity: {spec.compute_identity()} (kept in runs/sweep)" in lines
    assert "# Space: 5 dimensions" in lines
    assert "normalization choice [gdpo, grpo]" in lines
    assert "group_size integer {range: [4, 16], step: 12}" in lines
    assert "reward_weights.format float (log) {log: [0.05, 2]}" in lines
    assert "beta float (log) {log: [0.001, 1]} when {normalization: [gdpo]}" in lines
    assert "group_size 4 16 prompts" in lines
    assert "group_size 16 4 prompts" in lines
    # 640 completions a training; 3 validations of 200 and a test of 400; 5 + 3 + 1 trainings, and
    # the untrained policy, which is evaluated once on each.
    assert "search 3,200 5 trials x 640" in lines
    assert "replicates 1,920 3 x 640" in lines
    assert "published baseline 640 1 x 640" in lines
    assert "held-out evaluation 9,600 3 x 200 + 400 a trained run" in lines
    # two merges and the fresh seeds of three: a validation and a test each, as for a checkpoint
    assert "merges 3,000 5 x 600" in lines
    assert "checkpoints 600 1 x 600" in lines
    assert "total 18,960" in lines
    assert any(line.startswith("- space.group_size = 16: 4 prompts a step") for line in lines)
    assert describe_time(spec).startswith("unknown before a first sweep")


def test_time_is_that_of_the_last_sweep_like_it(load, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "cluster:6379")  # nobody knows how many trials fit there
    planned = ["training={steps: 10, completions_per_step: 64, evaluate_every: 4}"]
    planned += ["training.validation_prompts=100", "training.test_prompts=200"]
    planned += ["search={replicates: {max_runs: 3}, merges: {budget: 2}, checkpoints: {budget: 1}}"]
    planned += ["search.trials=5", f"storage={tmp_path}"]
    for age, name, seconds, change in (
        (3, "older", 900, "search.trials=5"),
        (2, "like_it", 500, "search.trials=9"),
        (1, "of_longer_answers", 9_000, "training.max_completion_length=99"),
    ):
        trial = tmp_path / name / "trials" / "0"
        trial.mkdir(parents=True)
        file = tmp_path / name / SPEC
        file.write_text(load(*planned, change).dump_yaml())
        os.utime(file, (2e9 - age, 2e9 - age))
        cost = {"completions": 640, "evaluation_completions": 1_200, "seconds": seconds}
        line = json.dumps({"step": 10, "metrics": {}, "cost": cost})
        (trial / "steps.jsonl").write_text(line + "\n")
    # Work: 5,760 completions in training as above, and .3 x 13,200 in evaluation = 9,720 units; the
    # sweep like it took 500 s for 640 + .3 x 1,200 = 1,000.
    time = "at most 1 h 21 min of one trial at a time, at the pace of like_it"
    assert f"# Time: {time}" in render_dry_run(load(*planned)).splitlines()


def test_passwords_are_not_shown(load):
    spec = load("tracking.uri=postgresql://me:secret@host/db")
    text = render_dry_run(spec)
    assert "postgresql://me:***@host/db" in text
    assert "secret" not in text
    assert "me:secret@host" in spec.dump_yaml()  # the ledger's copy must load again
    for shown in ("http://host:5000/a@b", "tracking.uri=https://host:5000/a@b"):
        assert redact_passwords(shown) == shown
    assert redact_passwords("x=https://me:pw@host/a@b") == "x=https://me:***@host/a@b"


def test_dry_run_tells_the_sandbox(load):
    assert "# Sandbox: local, up to 1 at a time: 1 s CPU, 4 s wall, 512 MiB" in render_dry_run(
        load()
    )
    text = render_dry_run(load("sandbox={modules: [json, re], workers: 2, cpu_seconds: 0.5}"))
    assert "# Sandbox: local with json, re, up to 2 at a time: 0.5 s CPU, 4 s wall" in text


def test_dry_run_tells_the_workers_of_a_trial(load):
    assert "# A trial: 1 worker with 1 CPU and 0 GPUs" in render_dry_run(load())
    text = render_dry_run(load("resources={workers: 4, cpus: 2, gpus: 1}"))
    shown = "# A trial: 4 workers, each with 2 CPUs and 1 GPU and 16 completions of a step"
    assert f"{shown}; one policy among them" in text.splitlines()
    text = render_dry_run(load("resources={workers: 4, cpus: 2, gpus: 1, sharding: none}"))
    assert f"{shown}; a whole policy each" in text.splitlines()


def test_the_workers_of_a_trial_share_its_policy_unless_asked_otherwise(load, tmp_path):
    def shards(*overrides):
        spec = load(*overrides)
        return spec.build_trial_config({}, 0, tmp_path).sharded

    assert not shards()
    assert shards("resources.workers=2")
    assert shards("resources={workers: 2, sharding: full}")
    assert not shards("resources={workers: 2, sharding: none}")


def test_dry_run_without_warnings(load):
    assert render_dry_run(load()).endswith("# Warnings: none")


def test_dry_run_without_dimensions(load):
    fixed = ("normalization=gdpo", "group_size=8", "reward_weights.format=1", "learning_rate=1e-4")
    text = render_dry_run(load(*(f"space.{one}" for one in fixed), "search.trials=1"))
    assert "# Space: 0 dimensions" in text


def test_replicates_cost_nothing_when_there_are_none(load):
    text = render_dry_run(load("search.replicates.per_point=0"))
    assert "replicates 0 0 x 3840" in " ".join(text.split())


@pytest.mark.parametrize("task", ["code", "math", "tools"])
def test_the_sweeps_that_ship_for_embedded_policies_have_no_lint(task):
    assert list_warnings(load_spec(ROOT / "search_spaces" / f"{task}.yaml")) == []


LINTS = {
    "few prompts": (["space.group_size=[8, 16]"], "space.group_size = 16: 4 prompts a step"),
    "one prompt": (["space.group_size=64"], "space.group_size = 64: 1 prompt a step"),
    "pairs": (["space.group_size=[2, 4]"], "space.group_size = 2: divided by the deviation"),
    "single reward": (
        ["space.reward_weights={correctness: 1, format: 0, length: 0}"],
        "space.normalization = gdpo: only reward_weights.correctness is above 0",
    ),
    "no anchor": (
        [
            "space.reward_weights.correctness={log: [0.5, 2]}",
            "space.reward_weights.length={log: [0.5, 2]}",
        ],
        "space.reward_weights: all are searched although only their ratios matter",
    ),
    "modes at one rate": (
        ["space.learning_rate=1e-4"],
        "space.learning_rate: one value for gdpo, grpo",
    ),
    "loss and length": (
        ["space.loss_type=[dapo, grpo]"],
        "space.loss_type: each weights short and long completions differently",
    ),
    "idle clip": (["space.epsilon=[0.1, 0.2]"], "space.epsilon: with num_iterations = 1"),
    "coarse test": (["training.test_prompts=25"], "training.test_prompts = 25: the standard error"),
    "few configurations": (
        ["space.learning_rate=[1e-4, 2e-4]", "space.reward_weights.format=1"],
        "space: 8 different configurations at most, and search.trials = 16",
    ),
    "against the metric": (
        ["objectives.bug_rate={direction: maximize, reference: 0}"],
        "objectives.bug_rate.direction = maximize",
    ),
    "no isolation": (
        ["sandbox.type=unsafe_no_isolation"],
        "sandbox.type = unsafe_no_isolation: code that the policy writes runs with all the rights",
    ),
    "idle constraint": (
        ['constraints.correctness=">= 0"'],
        "constraints.correctness = >= 0: every",
    ),
    "idle patience": (["search.patience=16"], "search.patience = 16: with search.trials = 16"),
    "points left out": (
        ["enqueue=[{group_size: 8}, {group_size: 4}, {group_size: 8}]", "search.trials=1"],
        "enqueue: 2 different points, and search.trials = 1",
    ),
}


@pytest.mark.parametrize("case", LINTS)
def test_lint(case, load):
    overrides, start = LINTS[case]
    (warning,) = list_warnings(load(*overrides))
    assert warning.startswith(start)
    assert warning.count(". ") >= 1  # why, then what to do


@pytest.mark.parametrize(
    ("settings", "room", "start"),
    [
        ("{workers: 2}", 2048, None),
        ("{workers: 3}", 2048, "sandbox.workers = 3: 2 at a time will run"),
        ("{workers: 9, memory_mb: 1500}", 2048, "sandbox.workers = 9: 1 at a time will run"),
        ("{workers: 1, memory_mb: 2048}", 2048, None),
        ("{workers: 2, memory_mb: 2049}", 2048, None),
        ("{workers: 9}", None, None),
    ],
)
def test_lint_of_memory(settings, room, start, load, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(machine, "read_machine_memory", lambda: room and room << 20)
    spec = load(f"sandbox={settings}")
    warnings = list_warnings(spec)
    assert len(warnings) == (start is not None)
    assert all(warning.startswith(start) for warning in warnings)
    # What is refused is not doubted as well, and a cluster is another machine.
    assert bool([*list_sandbox_warnings(spec)]) == bool(start and "workers" in start)
    monkeypatch.setenv("RAY_ADDRESS", "ray://cluster:10001")
    assert not [*list_sandbox_warnings(spec)]


FORMAT = "objectives.format={direction: maximize, reference: 0}"


@pytest.mark.parametrize(
    "overrides",
    [
        ["space.group_size=8"],
        ["space.group_size=[2, 4]", "space.normalization=grpo_no_std"],
        ["space.reward_weights={correctness: 1, format: 0, length: 0}", "space.normalization=grpo"],
        ["space.learning_rate=1e-4", "space.normalization=gdpo"],
        ["space.loss_type=[dapo, grpo]", "objectives.length=", FORMAT],
        ["space.epsilon=[0.1, 0.2]", "space.num_iterations=[1, 2]"],
        ["space.epsilon=[0.1, 0.2]", "training.mini_batch_size=32"],
        ["training.test_prompts=100"],
        ["space.beta={log: [1e-4, 0.04]}"],
    ],
)
def test_no_lint(overrides, load):
    assert list_warnings(load(*overrides)) == []


def test_lint_of_rewards_on_different_scales(load, monkeypatch):
    rewards = {"correctness": (-3, 3), "format": (0, 1), "length": (0, 1)}
    monkeypatch.setattr(code, "TASK", dataclasses.replace(code.TASK, rewards=rewards))
    fixed = "space.reward_weights={correctness: 1, format: 1, length: 1}"
    (warning,) = list_warnings(load(fixed))
    assert "spans" not in warning
    assert "correctness 6, format 1, length 1" in warning
    assert list_warnings(load()) == []
    assert list_warnings(load(fixed, "space.normalization=gdpo", "search.trials=2")) == []


@pytest.mark.parametrize(
    ("known", "span"), [((0, 3), "span different widths"), ((0, 1), "may span different widths")]
)
def test_lint_of_a_reward_whose_range_nobody_stated(load, monkeypatch, known, span):
    rewards = {**code.TASK.rewards, "correctness": known, "length": UNKNOWN_RANGE}
    monkeypatch.setattr(code, "TASK", dataclasses.replace(code.TASK, rewards=rewards))
    (warning,) = list_warnings(load("space.reward_weights={correctness: 1, format: 1, length: 1}"))
    assert f"fixed, while rewards {span}" in warning
    assert f"(correctness {known[1]}, format 1, length unknown)" in warning


def devices(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(
    ("files", "visible", "count"),
    [
        ([], None, 0),
        (["nvidiactl", "nvidia-uvm"], None, 0),
        (["nvidiactl", "nvidia0", "nvidia1"], None, 2),
        (["nvidia0", "nvidia1"], "1", 1),
        (["nvidia0", "nvidia1"], "", 0),
        (["nvidia0", "nvidia1"], "-1", 0),
        (["nvidia0", "nvidia1"], "0,-1,1", 1),
        (["nvidia0"], "0,1,2", 1),
        ([], "0", 0),
        (["nvidia0"], "GPU-8a1b", 1),
        (["kfd", "dri/renderD128", "dri/renderD129"], None, 2),
        (["dxg"], None, 1),
    ],
)
def test_visible_gpus(files, visible, count, tmp_path):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert count_visible_gpus(environment, devices(tmp_path, *files)) == count


def test_gpus_of_a_machine_without(load, tmp_path):
    spec = load("resources.gpus=0.5")
    with pytest.raises(
        ResourcesError, match=r"resources\.gpus = 0\.5: this machine has 0 GPUs"
    ) as e:
        check_resources(spec, {}, tmp_path)
    assert "--set resources.gpus=0" in str(e.value)
    assert e.value.exit_status == 2
    check_resources(spec, {"RAY_ADDRESS": "ray://cluster:10001"}, tmp_path)
    check_resources(spec, {}, devices(tmp_path, "nvidia0"))


def test_a_part_of_a_gpu_is_refused_clearly(load, tmp_path):
    # Source: vllm#41776: it reads as the whole GPU.
    visible = {"CUDA_VISIBLE_DEVICES": "MIG-5f2b"}
    with pytest.raises(ResourcesError, match=r"part of a GPU \(MIG\)(?s:.)*fix: turn MIG off"):
        check_resources(load("resources.gpus=1"), visible, devices(tmp_path, "nvidia0"))
    check_resources(load(), visible, tmp_path)


def test_more_gpus_than_there_are(load, tmp_path):
    asked = "resources={gpus: 1, workers: 2}"
    with pytest.raises(ResourcesError, match=r"this machine has \d+ and 1\n") as caught:
        check_resources(load(asked), {}, devices(tmp_path, "nvidia0"))
    assert "--set resources.workers=1" in str(caught.value)


def test_more_cpus_than_there_are(load, tmp_path):
    cpus = len(os.sched_getaffinity(0))
    with pytest.raises(ResourcesError, match=rf"this machine has {cpus} CPUs"):
        check_resources(load(f"resources.cpus={cpus + 1}"), {}, tmp_path)
    check_resources(load(f"resources.cpus={cpus}"), {}, tmp_path)


def test_code_that_may_use_more_memory_than_there_is(load, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "read_machine_memory", lambda: 1 << 30)
    spec = load("sandbox.memory_mb=1025")
    with pytest.raises(ResourcesError, match=r"memory_mb = 1025: this machine has 1024 MiB") as e:
        check_resources(spec, {}, tmp_path)
    assert "--set sandbox.memory_mb=512" in str(e.value)
    check_resources(spec, {"RAY_ADDRESS": "ray://cluster:10001"}, tmp_path)
    check_resources(load("sandbox.memory_mb=1024"), {}, tmp_path)
