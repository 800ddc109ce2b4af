"""Parts of the GPU check that measure steps and memory, without a GPU and without training."""

from __future__ import annotations

import argparse
import os
from itertools import count
from pathlib import Path
from threading import Event

import harness
import paired_timing
import pytest
from gpu_check import build_integer_type, exit_on_error
from harness import measure_memory
from paired_timing import Block, Pair, Plan, Side, Stopwatch, alternate

from gdpo_tune.core.errors import ResourcesError
from gdpo_tune.core.settings import ModelSettings


def block(seconds: float, length: float = 10.0) -> Block:
    return Block(seconds, [length, length])


# --- two trainers in turns ------------------------------------------------------------------------


def test_steps_of_the_warm_up_do_not_count():
    ticks = iter([5.0, 7.0, 8.0, 12.0])
    watch = Stopwatch(2, lambda: next(ticks), warm_up=2)
    for step in range(1, watch.last + 1):
        watch.end_step(step, mean_length=10.0 * step)
    assert watch.last == 4
    assert watch.build_block() == Block((12.0 - 7.0) / 2, [30.0, 40.0])


def test_a_block_that_ended_early_has_no_figures():
    watch = Stopwatch(2, lambda: 0.0)
    watch.end_step(1, 1.0)
    watch.end_step(2, 1.0)
    with pytest.raises(ValueError, match="1 of 2 steps were timed"):
        watch.build_block()


def test_both_sides_take_turns_with_equal_seeds():
    calls = []

    def run(ours: bool, seed: int) -> Block:
        calls.append((ours, seed))
        return block(1.0)

    alternate(run, blocks=3, most=9)
    assert calls == [(False, 0), (True, 0), (True, 1), (False, 1), (False, 2), (True, 2)]


@pytest.mark.parametrize(("longer", "blocks"), [(1.01, 2), (1.03, 5)])
def test_turns_end_once_completions_are_equally_long(longer: float, blocks: int):
    pair = alternate(lambda ours, seed: block(1.0, 10 * longer if ours else 10.0), 2, 5)
    assert len(pair.ours.blocks) == len(pair.plain.blocks) == blocks
    assert pair.compute_length_gap() == pytest.approx(longer - 1)


def test_the_ratio_is_the_median_over_pairs_of_blocks():
    ours = Side([block(2.0), block(3.0), block(8.0)])
    pair = Pair(ours, Side([block(4.0), block(3.0), block(2.0)]))
    figures = pair.build_figures("seconds")
    assert [figures[f"ratio{end}"] for end in ("_low", "", "_high")] == [0.5, 1.0, 4.0]
    assert (figures["ours_seconds"], figures["trl_seconds"]) == (3.0, 3.0)
    assert figures["blocks"] == 3


def test_the_peak_is_that_of_the_largest_block():
    blocks = [Block(1.0, [1.0], peak_mib=mib) for mib in (10.2, 30.7, 20.0)]
    assert paired_timing.find_peak(Side(blocks)) == 31
    assert paired_timing.find_peak(Side([block(1.0)])) is None


def test_a_block_is_as_long_as_its_plan(tmp_path: Path):
    plan = Plan("embedded", "transformers", 6, 4, 32, 3, 2, 1, ModelSettings(dtype="bfloat16"))
    config = plan.build_config(7, tmp_path)
    assert (config.policy, config.seed, config.rollout.engine) == ("embedded", 7, "transformers")
    assert config.params["group_size"] == 4
    assert config.training.completions_per_step == 24
    assert config.training.max_completion_length == 32
    assert config.training.steps == 3 + 2 + 1  # the warm-up, and one that is never reached


# --- options and refusals -------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["1", "-3", "2.5", "two"])
def test_a_number_that_cannot_be_is_refused(text: str):
    with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is no whole number from 2 on"):
        build_integer_type(2)(text)
    assert build_integer_type(2)("2") == 2


def test_a_refusal_is_a_line_and_a_status(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end, exit_on_error():
        raise ResourcesError("no room")
    assert end.value.code == 2
    assert capsys.readouterr().err == "error: no room\n"


# --- memory ---------------------------------------------------------------------------------------


def test_a_peak_is_the_highest_reading(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(harness, "EVERY", 0.001)
    readings, all_taken = [3.0, 9.0, 4.0, 4.0], Event()

    def read() -> float:
        if len(readings) == 1:
            all_taken.set()
            return readings[0]
        return readings.pop(0)

    with harness.Peak(read) as memory:
        all_taken.wait()
    assert memory.highest == 9.0


def test_a_reading_that_fails_is_heard_of(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(harness, "EVERY", 0.001)
    failed, calls = Event(), count()

    def read() -> float:
        if next(calls) == 0:
            return 1.0
        failed.set()
        raise OSError("no answer")

    with pytest.raises(OSError, match="no answer"), harness.Peak(read):
        failed.wait()


def test_the_gpu_that_may_be_used_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\necho "$@" >> "$0.asked"\necho 1234\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert harness.measure_gpu_memory() == 1234.0
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert harness.query_gpu("name") == "1234"
    first, second = Path(f"{tool}.asked").read_text().splitlines()
    assert first.split() == ["--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=3"]
    assert second.split() == ["--query-gpu=name", "--format=csv,noheader,nounits"]


def test_memory_below_this_process_counts_its_own():
    own = measure_memory(os.getpid())["rss"]
    assert harness.measure_process_memory() >= own / 2 > 0
