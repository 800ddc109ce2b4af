"""The limits of the check of a GPU, and what it reads of sweeps, without a GPU or a training."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import count
from pathlib import Path
from threading import Event

import pytest
import torch

from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.spec import load_spec
from gdpo_tune.training.self_check import FollowingFigures
from tests.gpu import limits, sweeps
from tests.gpu.plan import LONG_TASK, Plan
from tests.gpu.trials import TrainedTrial, count_device_states, fit_ratio


@pytest.mark.parametrize(("peak", "held"), [(9, False), (12, True), (20, False)])
def test_a_peak_lies_between_its_bound_and_the_slack(peak: int, held: bool):
    assert limits.is_within(10 * limits.GIB, peak * limits.GIB) == held


def test_what_the_engine_sees_of_an_update_is_a_ratio_without_noise():
    def draw(seed: int):
        return torch.randn(20_000, generator=torch.Generator().manual_seed(seed))

    update = draw(0)
    engine, trainer = 0.24 * update + 5 * draw(1), 0.8 * update + 5 * draw(2)
    ratio, error = fit_ratio(engine, trainer, update)
    assert abs(ratio - 0.3) < 3 * error
    assert 0.03 < error < 0.06
    with pytest.raises(ValueError, match="nothing to compare"):
        fit_ratio(engine, trainer, torch.zeros(20_000))


@pytest.mark.parametrize(
    ("figures", "held"),
    [
        ((0.004, 0.005, 0.004, 0.004, 0.3), True),
        ((0.004, 0.004, 0.004, 0.004, 0.004), False),  # nothing has changed
        ((0.004, 0.3, 0.3, 0.3, 0.004), False),  # a sync that does nothing
        ((0.004, 0.005, 0.3, 0.004, 0.3), False),  # cached prompts of other weights
        ((0.3, 0.004, 0.004, 0.004, 0.3), False),  # other weights from the start
    ],
)
def test_an_engine_follows_where_syncs_and_only_syncs_bring_it_close(figures, held: bool):
    assert limits.follows(FollowingFigures(*figures)) == held


@pytest.mark.parametrize(
    ("first", "second", "lost"),
    [
        (0.5, (0.6, 90.0, 0.004), []),
        (0.5, (0.61, 91.0, 0.005), []),  # a few completions drew another token
        (0.5 + 1e-6, (0.6, 90.0, 0.004), ["train/reward of step 1"]),
        (0.5, (0.4, 90.0, 0.004), ["train/reward of step 2"]),
        (0.5, (0.6, 30.0, 0.004), ["train/completions/mean_length of step 2"]),
        (0.5, (0.6, 90.0, 0.3), [f"{limits.APART} of step 2"]),
        (0.5, (0.6, 90.0, float("nan")), [f"{limits.APART} of step 2"]),
    ],
)
def test_what_sleep_has_lost_shows_in_the_second_step(first: float, second, lost: list[str]):
    def build(reward: float, values) -> TrainedTrial:
        steps = {1: (reward, 100.0, 0.004), 2: values}
        names = (*limits.SAMPLED, limits.APART)
        return TrainedTrial(
            {step: dict(zip(names, row, strict=True)) for step, row in steps.items()}
        )

    awake = build(0.5, (0.6, 90.0, 0.004))
    assert limits.list_losses_of_sleep(awake, build(first, second)) == lost


@pytest.mark.parametrize(
    ("cuda", "number"), [(None, 0), (torch.zeros(4), 1), ([torch.zeros(4)] * 3, 3)]
)
def test_generator_states_of_a_checkpoint_are_counted(tmp_path: Path, cuda, number: int):
    states = {} if cuda is None else {"cuda": cuda}
    torch.save({"cpu": torch.zeros(4), **states}, tmp_path / "rng_state.pth")
    assert count_device_states(tmp_path) == number


# --- sweeps ---------------------------------------------------------------------------------------


def record(number: int, started: float, finished: float, role="search", state="complete"):
    times = {"started": started, "finished": finished}
    return TrialRecord(number, role, state, {}, 0, "baseline", reason="it died", **times)


PAIR = [record(0, 100, 160, "untrained"), record(1, 160, 700), record(2, 400, 1000)]
RETRIED = ("trial 1 is tried again",)


def test_trials_an_hour_are_those_that_trained_over_the_time_of_all():
    figures = sweeps.SweepFigures(PAIR)
    assert figures.trials_per_hour == pytest.approx(2 / 900 * 3600)
    assert figures.side_by_side == 2


@pytest.mark.parametrize(
    ("records", "retries", "killed", "problem"),
    [
        (PAIR, RETRIED, 1, ""),
        (PAIR, (), 1, "1 killed, 0 tried again"),
        (PAIR, RETRIED, 0, "0 killed, 1 tried again"),
        (PAIR[:2], RETRIED, 1, "1 of 2 complete"),
        (
            [*PAIR[:2], record(2, 400, 1000, state="failed")],
            RETRIED,
            1,
            "trial 2 failed: it died",
        ),
    ],
)
def test_a_killed_sweep_needs_every_trial_and_a_retry(records, retries, killed: int, problem: str):
    figures = sweeps.SweepFigures(records, retries, 2, killed)
    assert limits.find_problem(figures, 2, killed=True) == problem


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
    assert sweeps.find_error(log, status).removesuffix(f" {log}") == error


def test_the_process_of_a_trial_is_killed_once_it_has_steps(tmp_path: Path):
    code = "import sys, time; print('up', flush=True); time.sleep(100)"
    trial = ["bash", "-c", f'exec -a {sweeps.TRIAL} {sys.executable} -c "{code}"']
    with subprocess.Popen(trial, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        steps = tmp_path / "trials" / "1" / "steps.jsonl"
        steps.parent.mkdir(parents=True)
        steps.write_text("{}\n")
        assert sweeps.kill_one_trial(os.getpid(), tmp_path) == 0
        steps.write_text("{}\n{}\n")
        assert sweeps.kill_one_trial(os.getpid(), tmp_path) == 1
        assert process.wait() == -9


def build_plan(directory: Path) -> Plan:
    return Plan(False, "embedded", "", directory, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("share", "trials"), [(1.0, 2), (0.25, 4)])
def test_every_share_trains_on_its_part_of_the_same_sweep(tmp_path: Path, share, trials: int):
    spec = load_spec(build_plan(tmp_path).write_sweep("share", share, trials, rank=16))
    assert (spec.resources.gpus, spec.model.lora_rank) == (share, 16)
    assert spec.search.trials == trials - 1  # the published setting is one more


def test_the_bound_is_the_share_that_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = build_plan(tmp_path).write_space("memory", rollout={"engine": "transformers"})
    monkeypatch.setattr("gdpo_tune.spec.read_device_memory", lambda: 4 << 30)
    # Half a GiB is what CUDA takes; the policy itself is small.
    assert sweeps.find_refused_share(file) == pytest.approx(0.127, abs=0.005)
    assert sweeps.find_refusal(file) == ""


def test_changes_of_a_plan_reach_the_trial(tmp_path: Path):
    config = build_plan(tmp_path).build_config(
        "one", task=LONG_TASK, params={"beta": 0.1}, training={"steps": 9}, gpu_share=0.5
    )
    assert (config.params["beta"], config.training.steps, config.gpu_share) == (0.1, 9, 0.5)
    assert config.directory == tmp_path / "one"


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
def test_a_peak_is_the_highest_reading_and_a_reading_that_fails_is_heard_of(
    monkeypatch: pytest.MonkeyPatch, fails: bool
):
    monkeypatch.setattr(sweeps, "EVERY", 0.001)
    taken, calls = Event(), count()

    def read() -> float:
        reading = [3.0, 9.0, 4.0][min(next(calls), 2)]
        if reading == 4.0:
            taken.set()
            if fails:
                raise OSError("no answer")
        return reading

    peak = sweeps.Peak(read)
    if fails:
        with pytest.raises(OSError, match="no answer"), peak:
            taken.wait()
    else:
        with peak:
            taken.wait()
    assert peak.highest == 9.0


def test_the_gpu_that_may_be_used_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\necho "$@" >> "$0.asked"\necho 1234\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert sweeps.measure_gpu_memory() == 1234.0
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert sweeps.query_gpu("name") == "1234"
    first, second = Path(f"{tool}.asked").read_text().splitlines()
    assert first.split() == ["--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=3"]
    assert second.split() == ["--query-gpu=name", "--format=csv,noheader,nounits"]
