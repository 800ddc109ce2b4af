"""Two trainers in turns: what of their steps counts, and for how long they take turns."""

from __future__ import annotations

from pathlib import Path

import pytest
from paired_timing import Block, Pair, Plan, Stopwatch, alternate

from gdpo_tune.core.settings import ModelSettings


def block(seconds: float, length: float = 10.0) -> Block:
    return Block(seconds, [length, length])


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


@pytest.mark.parametrize(("longer", "blocks"), [(1.01, 3), (1.03, 5)])
def test_turns_have_equal_seeds_and_end_once_completions_are_equally_long(longer, blocks: int):
    calls = []

    def run(ours: bool, seed: int) -> Block:
        calls.append((ours, seed))
        return block(1.0, 10 * longer if ours else 10.0)

    pair = alternate(run, 3, 5)
    assert calls[:6] == [(False, 0), (True, 0), (True, 1), (False, 1), (False, 2), (True, 2)]
    assert len(pair.ours) == len(pair.plain) == blocks
    assert pair.compute_length_gap() == pytest.approx(longer - 1)


def test_the_ratio_is_the_median_over_pairs_of_blocks():
    pair = Pair([block(2.0), block(3.0), block(8.0)], [block(4.0), block(3.0), block(2.0)])
    figures = pair.build_figures("seconds")
    assert [figures[f"ratio{end}"] for end in ("_low", "", "_high")] == [0.5, 1.0, 4.0]
    assert (figures["ours_seconds"], figures["trl_seconds"]) == (3.0, 3.0)
    assert figures["blocks"] == 3


def test_a_block_is_as_long_as_its_plan(tmp_path: Path):
    plan = Plan("embedded", "transformers", 6, 4, 32, 3, 2, 1, ModelSettings(dtype="bfloat16"))
    config = plan.build_config(7, tmp_path)
    assert (config.policy, config.seed, config.rollout.engine) == ("embedded", 7, "transformers")
    assert config.params["group_size"] == 4
    assert config.training.completions_per_step == 24
    assert config.training.max_completion_length == 32
    assert config.training.steps == 3 + 2 + 1  # the warm-up, and one that is never reached
