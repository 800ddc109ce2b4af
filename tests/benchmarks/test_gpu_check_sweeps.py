"""Sweeps, plans, policies and options of the command that checks a GPU."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import gpu_check
import gpu_check_rows
import gpu_check_steps
import gpu_check_sweeps
import harness
import pytest
from gpu_check_rows import APART
from gpu_check_sweeps import LONG_TASK, CheckPlan, Context, SweepFigures
from gpu_check_trials import TrainedTrial

from gdpo_tune.core.errors import ResourcesError
from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.policies.load_policy import load_policy, measure_policy
from gdpo_tune.spec import load_spec

# --- sweeps ---------------------------------------------------------------------------------------


def record(number: int, started: float, finished: float, role="search", state="complete"):
    times = {"started": started, "finished": finished}
    return TrialRecord(number, role, state, {}, 0, "baseline", reason="it died", **times)


def sweep(records, retries=("trial 1 is tried again",), killed=1) -> SweepFigures:
    at_once = gpu_check_sweeps.count_side_by_side(records)
    hourly = gpu_check_sweeps.compute_trials_per_hour(records)
    return SweepFigures(records, retries, 2, at_once, hourly, 100.0, killed)


PAIR = [record(0, 100, 160, "untrained"), record(1, 160, 700), record(2, 400, 1000)]


def test_trials_an_hour_are_those_that_trained_over_the_time_of_all():
    figures = sweep(PAIR)
    assert figures.trials_per_hour == pytest.approx(2 / 900 * 3600)
    assert figures.side_by_side == 2


def test_a_killed_sweep_needs_every_trial_and_a_retry():
    def judge_sweep(figures):
        return gpu_check_rows.judge_killed_sweep(figures, trials=2).result

    assert judge_sweep(sweep(PAIR)) == "held"
    assert judge_sweep(sweep(PAIR, retries=())) == "did not hold"
    assert judge_sweep(sweep(PAIR, killed=0)) == "did not hold"
    assert judge_sweep(sweep(PAIR[:2])) == "did not hold"
    failed = [*PAIR[:2], record(2, 400, 1000, state="failed")]
    assert judge_sweep(sweep(failed)) == "did not hold"


def test_shares_are_compared_with_one_at_a_time():
    row = gpu_check_rows.judge_packing("packing", 0.5, sweep(PAIR), 4.0, unit="the GPU")
    assert (row.check, row.result) == ("1/2 of the GPU", "held")
    assert row.figure == "2 at once, 8 trials an hour, 2.00 of one at a time"


def test_shards_need_every_trial():
    def judge_shards(records):
        return gpu_check_rows.judge_shards("shards", "two", sweep(records), trials=2).result

    assert (judge_shards(PAIR), judge_shards(PAIR[:2])) == ("held", "did not hold")


def plan_with(directory: Path, **changes) -> CheckPlan:
    return CheckPlan(small=False, policy="embedded", directory=directory, threads=1, **changes)


def run_step(name: str, plan: CheckPlan):
    return list(gpu_check_steps.STEPS[name](Context(plan, None)))  # type: ignore[arg-type]


def test_shards_are_not_run_on_one_gpu(tmp_path: Path):
    (row,) = run_step("shards", plan_with(tmp_path, devices=("0",)))
    assert (row.result, row.reason) == ("not run", "it needs two GPUs")


def test_shards_use_two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = []

    def run_sweep(file, step, processes, seconds, *, small, devices=()):
        seen.append((step, load_spec(file).resources.workers, list(devices)))
        return sweep(PAIR)

    monkeypatch.setattr(gpu_check_steps, "run_sweep_command", run_sweep)
    monkeypatch.setattr(gpu_check_steps, "find_refusal", lambda file, devices=(): "")
    (row,) = run_step("shards", plan_with(tmp_path, devices=("3", "5", "7")))
    assert row.result == "held"
    assert seen == [("shards", 2, ["3", "5"])]


class FakeProcesses:
    """Processes that return trials, which use less memory if their engine sleeps."""

    def __init__(self, reward: float, mib: float) -> None:
        self.reward, self.mib, self.used, self.seen = reward, mib, 0.0, []

    def call(self, step, function, config, *, seconds):
        self.seen.append((step, config.rollout.engine, config.rollout.sleep))
        asleep = config.rollout.sleep
        self.used = self.mib if asleep else 9000.0
        time.sleep(0.05)  # for the thread that reads
        self.used = 0.0
        assert config.model.lora_rank, "weights that a sync sends again show no loss"
        first = {"train/reward": 1.0, "train/completions/mean_length": 8.0, APART: 0.004}
        second = {**first, "train/reward": self.reward if asleep else 1.0}
        return TrainedTrial(metrics={1: first, 2: second})


@pytest.mark.parametrize(
    ("reward", "mib", "result"),
    [(1.0, 8000, "held"), (1.0, 9000, "did not hold"), (0.9, 8000, "did not hold")],
)
def test_an_engine_that_sleeps_saves_memory_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reward: float, mib: float, result: str
):
    processes = FakeProcesses(reward, mib)
    monkeypatch.setattr(gpu_check_steps, "measure_gpu_memory", lambda: processes.used)
    monkeypatch.setattr(harness, "EVERY", 0.005)
    plan = plan_with(tmp_path, vllm=True)
    (row,) = gpu_check_steps.check_sleep(Context(plan, processes))  # type: ignore[arg-type]
    assert processes.seen == [("sleep", "vllm", False), ("sleep", "vllm", True)]
    assert row.result == result
    assert (row.values["awake_mib"], row.values["asleep_mib"]) == (9000, mib)


def test_an_engine_sleeps_only_where_there_is_one(tmp_path: Path):
    (row,) = run_step("sleep", plan_with(tmp_path))
    assert (row.result, row.reason) == ("not run", "no vLLM")


def test_the_other_gpus_are_hidden(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_check, "count_visible_gpus", lambda environment: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    assert gpu_check.hide_other_gpus() == ("3", "5")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert gpu_check.hide_other_gpus() == ("0", "1")
    monkeypatch.setattr(gpu_check, "count_visible_gpus", lambda environment: 0)
    with pytest.raises(ResourcesError, match="0 GPUs"):
        gpu_check.hide_other_gpus()


@pytest.mark.parametrize(
    ("text", "status", "error"),
    [
        ("done\n", 0, ""),
        ("trial 1 failed\n", 1, ""),
        ("error: a server of Ray is gone\n  python\n", 1, "error: a server of Ray is gone"),
        ("", -9, "the sweep ended with status -9: see"),
    ],
)
def test_a_sweep_that_ended_early_says_why(tmp_path: Path, text: str, status: int, error: str):
    log = tmp_path / "sweep.log"
    log.write_text(text)
    assert gpu_check_sweeps.find_error(log, status).removesuffix(f" {log}") == error


def test_the_process_of_a_trial_is_killed_once_it_has_steps(tmp_path: Path):
    code = "import sys, time; print('up', flush=True); time.sleep(100)"
    trial = ["bash", "-c", f'exec -a {gpu_check_sweeps.TRIAL} {sys.executable} -c "{code}"']
    with subprocess.Popen(trial, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        steps = tmp_path / "trials" / "1" / "steps.jsonl"
        steps.parent.mkdir(parents=True)
        steps.write_text("{}\n")
        assert gpu_check_sweeps.kill_one_trial(os.getpid(), tmp_path) == 0
        steps.write_text("{}\n{}\n")
        assert gpu_check_sweeps.kill_one_trial(os.getpid(), tmp_path) == 1
        assert process.wait() == -9


# --- plans and policies ---------------------------------------------------------------------------


def test_every_share_trains_on_its_part_of_the_same_sweep(tmp_path: Path):
    plan = CheckPlan(small=False, policy="embedded", directory=tmp_path, threads=1)
    specs = {
        share: load_spec(
            gpu_check_sweeps.build_sweep(plan, f"share_{share:g}", share, trials, rank=16)
        )
        for share, trials in gpu_check_steps.SHARES.items()
    }
    assert {share: spec.resources.gpus for share, spec in specs.items()} == {
        share: share for share in (1.0, 0.5, 0.25)
    }
    assert specs[0.25].search.trials == 3  # the published setting is the fourth
    assert {spec.model.lora_rank for spec in specs.values()} == {16}


def test_the_bound_is_the_share_that_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plan = CheckPlan(small=False, policy="embedded", directory=tmp_path, threads=1)
    file = plan.write_space("memory", rollout={"engine": "transformers"})
    monkeypatch.setattr("gdpo_tune.spec.read_device_memory", lambda: 4 << 30)
    # Half a GiB is what CUDA takes; the policy itself is small.
    assert gpu_check_steps.find_refused_share(file) == pytest.approx(0.127, abs=0.005)
    assert gpu_check_sweeps.find_refusal(file) == ""


def test_changes_of_a_plan_reach_the_trial(tmp_path: Path):
    plan = CheckPlan(small=True, policy="embedded", directory=tmp_path, threads=1)
    config = plan.build_config(
        "one", task=LONG_TASK, params={"beta": 0.1}, training={"steps": 9}, gpu_share=0.5
    )
    assert (config.params["beta"], config.training.steps, config.gpu_share) == (0.1, 9, 0.5)
    assert config.directory == tmp_path / "one"


def test_a_policy_is_made_without_a_network(tmp_path: Path):
    from gpu_check_trials import write_policy

    parameters = write_policy(str(tmp_path), "tiny")
    size = measure_policy(str(tmp_path))
    assert size is not None
    assert parameters == size.parameters
    model, tokenizer = load_policy(str(tmp_path))
    assert model.config.vocab_size == 4096
    assert tokenizer.decode([4095])


def test_the_options_name_every_step():
    options = gpu_check.build_parser().parse_args(["--small", "--only", "sweep", "packing"])
    assert isinstance(options, argparse.Namespace)
    assert (options.only, options.minutes) == (["sweep", "packing"], 20)
