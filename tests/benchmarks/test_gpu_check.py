"""Parts of the command that checks a GPU: rows, deadlines, the order of steps, and limits."""

from __future__ import annotations

import json
from pathlib import Path

import gpu_check
import gpu_check_rows
import gpu_check_steps
import gpu_check_sweeps
import pytest
import torch
from gpu_check_rows import (
    Row,
    build_summary,
    compute_exit_status,
    fail,
    find_stop,
    format_table,
    judge,
    judge_adapters,
    judge_memory,
    judge_step,
    skip,
)
from gpu_check_sweeps import OutOfTimeError, Processes, StepError
from gpu_check_trials import (
    AdapterFigures,
    ResumedTrial,
    TrainedTrial,
    count_device_states,
    fit_ratio,
)
from packaging.requirements import Requirement
from paired_timing import Block, Pair, Side
from step import CountingWatch

from gdpo_tune.core.errors import ResourcesError
from gdpo_tune.training.self_check import FollowingFigures

HELD = judge("device", "driver", "H", "answers", True, stops=True)
STOPS = judge("device", "kernel", "7.0", "runs", False, stops=True)
FAILS = judge("step", "time", "2", "1", False)
SKIPPED = skip("packing", "1/4", "no GPU")


# --- rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "status"), [([], 0), ([HELD, SKIPPED], 0), ([HELD, FAILS], 1), ([STOPS], 1)]
)
def test_only_a_check_that_was_run_can_fail(rows, status: int):
    assert compute_exit_status(rows) == status


def test_only_some_checks_stop_the_rest():
    assert find_stop([HELD, FAILS, SKIPPED]) is None
    assert find_stop([HELD, FAILS, STOPS]) is STOPS


def test_the_table_has_a_row_a_check_with_its_reason():
    lines = format_table(
        [HELD, FAILS, SKIPPED, fail("memory", "peak", "out of memory")]
    ).splitlines()
    assert lines[0].split() == ["step", "check", "figure", "limit", "result"]
    assert [line.split("  ")[-1] for line in lines[2:]] == [
        "held",
        "did not hold",
        "not run (no GPU)",
        "did not hold (out of memory)",
    ]


def test_the_line_of_json_counts_results():
    line = json.loads(json.dumps(build_summary([HELD, FAILS, SKIPPED], device="cpu")))
    assert [line[key] for key in ("held", "did_not_hold", "not_run")] == [1, 1, 1]
    assert line["rows"][2] == {
        "step": "packing",
        "check": "1/4",
        "result": "not run",
        "reason": "no GPU",
    }


# --- processes and their deadlines ----------------------------------------------------------------


def test_a_step_that_dies_hangs_or_raises_ends_alone(tmp_path: Path):
    processes = Processes(tmp_path, 60)
    assert processes.call("fine", "math:gcd", 12, 18, seconds=30) == 6
    with pytest.raises(StepError, match=r"^ValueError: math domain error$"):
        processes.call("raises", "math:sqrt", -1.0, seconds=30)
    assert "Traceback" in processes.find_log("raises").read_text()
    with pytest.raises(StepError, match="status 3"):
        processes.call("dies", "os:_exit", 3, seconds=30)
    with pytest.raises(StepError, match="SIGABRT"):
        processes.call("aborts", "os:abort", seconds=30)
    with pytest.raises(StepError, match="no end after 6 s") as late:
        processes.call("hangs", "time:sleep", 100, seconds=6)
    assert "in _serve" in processes.find_log("hangs").read_text(), "its stacks are in the log"
    assert not isinstance(late.value, OutOfTimeError)


def test_the_time_of_the_whole_check_counts_apart(tmp_path: Path):
    processes = Processes(tmp_path, 1)
    with pytest.raises(OutOfTimeError):
        processes.call("hangs", "time:sleep", 100, seconds=30)
    assert processes.read_remaining() <= 0


# --- the order of steps ---------------------------------------------------------------------------


class Clock:
    """Processes with so many seconds left."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def read_remaining(self) -> float:
        return self.seconds


def run_fake_steps(monkeypatch: pytest.MonkeyPatch, seconds: float, **steps):
    monkeypatch.setattr(gpu_check, "STEPS", steps)
    context = gpu_check_sweeps.Context(None, Clock(seconds))  # type: ignore[arg-type]
    written: list[list[Row]] = []
    rows = gpu_check.run_steps(context, list(steps), lambda rows: written.append(list(rows)))
    assert len(written) == len(steps), "a check that is killed leaves the steps before"
    assert written[-1] == rows
    return [(row.step, row.describe_result()) for row in rows]


def raise_error(error: Exception):
    def step(context):
        raise error

    return step


def test_an_unusable_device_ends_the_check_early(monkeypatch: pytest.MonkeyPatch):
    rows = run_fake_steps(monkeypatch, 9, device=lambda _: [HELD, STOPS], memory=raise_error)
    assert rows[-1] == ("memory", "not run (device: kernel did not hold)")


def test_a_step_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch):
    steps = {"step": raise_error(StepError("killed\nmore")), "packing": lambda _: [SKIPPED]}
    assert run_fake_steps(monkeypatch, 9, **steps) == [
        ("step", "did not hold (killed)"),
        ("packing", "not run (no GPU)"),
    ]


def test_a_step_that_fails_keeps_the_rows_that_it_gave(monkeypatch: pytest.MonkeyPatch):
    def give_one_and_fail(context):
        yield HELD
        raise StepError("killed")

    assert run_fake_steps(monkeypatch, 9, shards=give_one_and_fail) == [
        ("device", "held"),
        ("shards", "did not hold (killed)"),
    ]


def test_what_does_not_fit_into_the_time_is_not_run(monkeypatch: pytest.MonkeyPatch):
    late = {"step": raise_error(OutOfTimeError("over"))}
    assert run_fake_steps(monkeypatch, 9, **late) == [("step", "not run (over)")]
    assert run_fake_steps(monkeypatch, 0, **late)[0][1].startswith("not run (the time")


def test_an_error_for_the_user_keeps_its_fix_and_no_step_loses_the_rows_of_others(
    monkeypatch: pytest.MonkeyPatch,
):
    steps = {
        "memory": raise_error(ResourcesError("too large\n    fix: a larger GPU")),
        "step": raise_error(FileNotFoundError(2, "no nvidia-smi\nmore")),
        "device": raise_error(ValueError("broken")),
        "packing": lambda _: [SKIPPED],
    }
    assert run_fake_steps(monkeypatch, 9, **steps) == [
        ("memory", "did not hold (too large; fix: a larger GPU)"),
        ("step", "did not hold (FileNotFoundError: [Errno 2] no nvidia-smi)"),
        ("device", "did not hold (ValueError: broken)"),
        ("packing", "not run (device: all did not hold)"),
    ]


# --- the device -----------------------------------------------------------------------------------


def test_versions_are_those_that_the_project_is_tested_with():
    ranges = gpu_check_steps.read_ranges()
    assert set(ranges) == {"torch", "trl", "transformers", "vllm"}
    assert ranges["trl"].specifier.contains("1.16.0")


@pytest.mark.parametrize(
    ("version", "result"),
    [("2.12.1+cu130", "held"), ("2.14.0", "did not hold"), (None, "not run")],
)
def test_a_version_outside_of_its_range_does_not_hold(monkeypatch, version, result):
    monkeypatch.setattr(gpu_check_steps, "find_version", lambda name: version)
    row = gpu_check_steps.check_version("torch", Requirement("torch>=2.11,<2.14"))
    assert row.result == result


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_torch_without_cuda_ends_the_check():
    row = gpu_check_steps.check_kernel()
    assert (row.result, row.stops) == ("did not hold", True)


def test_a_gpu_without_a_compiler_does_not_hold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_check_steps.check_compiler(small=True).result == "not run"
    row = gpu_check_steps.check_compiler(small=False)
    assert (row.result, row.stops) == ("did not hold", True)
    broken = tmp_path / "gcc"
    broken.write_text("#!/bin/sh\necho no header >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    row = gpu_check_steps.check_compiler(small=False)
    assert row.result == "did not hold"
    assert "no header" in row.figure


# --- limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("peak", "held"), [(9_000, False), (12_000, True), (20_000, False)])
def test_a_peak_has_to_lie_between_its_bound_and_the_slack(peak: float, held: bool):
    assert (judge_memory(10_000, peak).result == "held") == held


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
    ("figures", "results"),
    [
        (AdapterFigures(True, 100, 0.98, 0.02, 0.011, 0.01), ["held"] * 3),
        (AdapterFigures(False, 100, 0.24, 0.02, 0.02, 0.01), ["did not hold"] * 3),
        (AdapterFigures(True, 2), ["not run", "not run", "held"]),
    ],
)
def test_adapters_are_judged_by_the_engine_and_the_base(figures, results):
    assert [row.result for row in judge_adapters(figures)] == results


@pytest.mark.parametrize(
    ("figures", "result"),
    [
        ((0.004, 0.005, 0.004, 0.004, 0.3), "held"),
        ((0.004, 0.004, 0.004, 0.004, 0.004), "did not hold"),  # nothing has changed
        ((0.004, 0.3, 0.3, 0.3, 0.004), "did not hold"),  # a sync that does nothing
        ((0.004, 0.005, 0.3, 0.004, 0.3), "did not hold"),  # cached prompts of other weights
        ((0.3, 0.004, 0.004, 0.004, 0.3), "did not hold"),  # other weights from the start
    ],
)
def test_an_engine_follows_where_syncs_and_only_syncs_bring_it_close(figures, result: str):
    assert gpu_check_rows.judge_following(FollowingFigures(*figures)).result == result


@pytest.mark.parametrize(
    ("reused", "small", "result"),
    [(20.0, False, "held"), (21.0, False, "did not hold"), (1.0, True, "not run")],
)
def test_a_kept_engine_halves_the_start(reused: float, small: bool, result: str):
    row = gpu_check_rows.judge_engine(40.0, reused, small=small)
    assert row.result == result
    assert f"40.0 s, then {reused:.1f} s" in row.figure + row.reason


def test_tokens_of_a_step_are_counted_where_a_policy_reads_them():
    watch = CountingWatch(2)
    read, ids = torch.nn.Embedding(4, 2), torch.zeros(2, 5, dtype=torch.long)
    with torch.nn.modules.module.register_module_forward_pre_hook(watch.note_read):
        for step in (1, 2, 3):  # the first one warms up
            torch.nn.Linear(2, 2)(read(ids if step == 1 else ids[:, :step]))
            watch.end_step(step, 8.0)
    assert watch.tokens.build_block().seconds == (4 + 6) / 2


@pytest.mark.parametrize(("small", "result"), [(False, "did not hold"), (True, "not run")])
def test_times_count_on_a_gpu_alone(small: bool, result: str):
    pair = Pair(Side([Block(1.2, [10.0])]), Side([Block(1.0, [10.0])]))
    time_row, lengths = judge_step(pair, small=small)
    assert (time_row.result, lengths.result) == (result, "held")
    assert "ratio 1.2" in time_row.figure + time_row.reason


def test_equal_bits_are_required_on_the_cpu_alone():
    resumed = ResumedTrial([3, 4], ["step 3 train/loss"], 1e-4, 1, 1)
    row = gpu_check_rows.judge_bitwise_resume(resumed)
    assert (row.result, row.figure) == ("did not hold", "1 differ: step 3 train/loss")
    on_gpu, states = gpu_check_rows.judge_device_resume(resumed)
    assert (on_gpu.result, states.result) == ("held", "held")
    several = ResumedTrial([3, 4], [], 0.0, 1, 8)
    assert gpu_check_rows.judge_device_resume(several)[1].result == "did not hold"


@pytest.mark.parametrize(
    ("cuda", "count"), [({}, 0), ({"cuda": torch.zeros(4)}, 1), ({"cuda": [torch.zeros(4)] * 3}, 3)]
)
def test_generator_states_of_a_checkpoint_are_counted(tmp_path: Path, cuda, count: int):
    torch.save({"cpu": torch.zeros(4), **cuda}, tmp_path / "rng_state.pth")
    assert count_device_states(tmp_path) == count


def build_steps(reward: float, length: float, apart: float) -> TrainedTrial:
    """Return a trial with these figures in its second step, and usual ones in its first."""
    names = (*gpu_check_rows.SAMPLED, gpu_check_rows.APART)
    steps = {1: (0.5, 100.0, 0.004), 2: (reward, length, apart)}
    return TrainedTrial({step: dict(zip(names, row, strict=True)) for step, row in steps.items()})


@pytest.mark.parametrize(
    ("second", "peak", "figure"),
    [
        ((0.6, 90.0, 0.004), 8_000, ""),
        ((0.61, 91.0, 0.005), 8_000, ""),  # a few completions drew another token
        ((0.6, 90.0, 0.004), 9_000, "peak 8.8 GiB"),  # no memory was given back
        ((0.4, 90.0, 0.004), 8_000, "train/reward of step 2 differs"),
        ((0.6, 30.0, 0.004), 8_000, "mean_length of step 2 differs"),
        ((0.6, 90.0, 0.3), 8_000, "logp_difference/mean of step 2 differs"),
        ((0.6, 90.0, float("nan")), 8_000, "logp_difference/mean of step 2 differs"),
    ],
)
def test_what_sleep_has_lost_shows_in_the_second_step(second, peak: float, figure: str):
    awake = build_steps(0.6, 90.0, 0.004)
    row = gpu_check_rows.judge_sleep(awake, build_steps(*second), 9_000, peak)
    assert row.result == ("did not hold" if figure else "held")
    assert figure in row.figure


def test_the_first_step_of_a_trial_that_sleeps_is_equal_to_the_bit():
    awake, asleep = build_steps(0.6, 90.0, 0.004), build_steps(0.6, 90.0, 0.004)
    asleep.metrics[1]["train/reward"] += 1e-6
    row = gpu_check_rows.judge_sleep(awake, asleep, 9_000, 8_000)
    assert row.result == "did not hold"
    assert "train/reward of step 1 differs" in row.figure


def test_an_evaluation_has_to_fit():
    trial = TrainedTrial(test={"correctness": 0.5}, peak_bytes=9 << 30)
    assert gpu_check_rows.judge_evaluation(trial, 512, 10 << 30).result == "held"
    assert gpu_check_rows.judge_evaluation(trial, 512, 8 << 30).result == "did not hold"
