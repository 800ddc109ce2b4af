"""Rows of `gpu_check.py`: one a check, with its figure, its limit and what came of it.

Figures go in, rows come out. Nothing is measured here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

from paired_timing import LENGTH_TOLERANCE, Pair, find_peak

from gdpo_tune.core.trial_files import DIFFERENCE

if TYPE_CHECKING:
    from gpu_check_sweeps import SweepFigures
    from gpu_check_trials import (
        AdapterFigures,
        ResumedTrial,
        TrainedTrial,
    )

    from gdpo_tune.training.self_check import FollowingFigures


Result = Literal["held", "did not hold", "not run"]
HEADER = ("step", "check", "figure", "limit", "result")
WIDEST = 60
"""Characters of a column; longer texts are in the line of JSON."""


@dataclass(frozen=True)
class Row:
    """One check."""

    step: str
    check: str
    figure: str
    limit: str
    result: Result
    reason: str = ""
    """Why a check was not run or did not hold, for a person."""
    values: Mapping[str, object] = field(default_factory=dict)
    """Figures for a program."""
    stops: bool = False
    """True if the steps that follow make no sense where this check does not hold."""

    def describe_result(self) -> str:
        return f"{self.result} ({self.reason})" if self.reason else self.result


def judge(
    step: str, check: str, figure: str, limit: str, held: bool, *, stops: bool = False, **values
) -> Row:
    return Row(step, check, figure, limit, "held" if held else "did not hold", "", values, stops)


def skip(step: str, check: str, reason: str, limit: str = "") -> Row:
    return Row(step, check, "", limit, "not run", reason)


def fail(step: str, check: str, reason: str, *, stops: bool = False) -> Row:
    return Row(step, check, "", "runs to its end", "did not hold", reason, stops=stops)


def find_stop(rows: Sequence[Row]) -> Row | None:
    """Return the first row that stops the steps after it; None if nothing does."""
    return next((row for row in rows if row.stops and row.result == "did not hold"), None)


def compute_exit_status(rows: Sequence[Row]) -> int:
    """Return 0 if every check that was run held, else 1."""
    return int(any(row.result == "did not hold" for row in rows))


def format_table(rows: Sequence[Row]) -> str:
    """Format the rows as a table of text; long texts are cut, except results."""
    lines = [HEADER, *(_list_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    lines.insert(1, tuple("-" * width for width in widths))
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _list_cells(row: Row) -> tuple[str, ...]:
    texts = (row.step, row.check, row.figure, row.limit)
    return (*(_cut(text) for text in texts), row.describe_result())


def _cut(text: str) -> str:
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 3]}..."


def build_summary(rows: Sequence[Row], **about: object) -> dict[str, object]:
    """Build the figures for the line of JSON; `about` says what was checked."""
    results = [row.result for row in rows]
    return {
        "benchmark": "gpu_check",
        **about,
        "held": results.count("held"),
        "did_not_hold": results.count("did not hold"),
        "not_run": results.count("not run"),
        "rows": [
            {name: value for name, value in asdict(row).items() if value and name != "stops"}
            for row in rows
        ],
    }


GIB = 1024
"""MiB."""
SLACK, ACTIVATIONS = 0.25, 3 * GIB
"""A peak may exceed its bound by this share, and by these MiB of activations."""
MEMORY_LIMIT = f"bound <= peak <= bound + {SLACK:.0%} + {ACTIVATIONS / GIB:.0f} GiB"
RATIO = 1.05
"""Of a step of ours to one of TRL."""
SEEN = 0.2
"""Distance from 1 of what the engine sees of an update, by what the trainer sees."""
FURTHER = 1.25
"""Factor by which an adapter may increase the distance between engine and trainer."""
ROUNDING, MOVED = 0.05, 4
"""Nats a token between an engine and a trainer with the same weights; factor without a sync."""
FOLLOWS_LIMIT = f"synced at most {ROUNDING} nats a token, missed {MOVED} times as much"
RESUME_LIMIT = "next steps follow; equal bits are promised on a CPU alone"
STATES_LIMIT = "one for each GPU"
NO_FAILURE = "no trial fails"
REUSED = 0.5
ENGINE_CHECK = "first step, engine cold and kept"
ENGINE_LIMIT = f"the second takes at most {REUSED:g} of the first"
SLEEP_CHECK = "engine asleep during a step"
WOKEN = 0.05
"""Relative difference of the second step: a first update is rounded differently from run to run on
a GPU, so that a few completions draw another token."""
SLEEP_LIMIT = f"a lower peak, the same first step, the second within {WOKEN:g}"
SAMPLED = ("train/reward", "train/completions/mean_length")
"""Metrics that do not change unless the engine samples something else."""
APART = f"train/{DIFFERENCE}"


def judge_memory(bound: float, peak: float) -> Row:
    held = bound <= peak <= bound * (1 + SLACK) + ACTIVATIONS
    figure = f"bound {bound / GIB:.1f} GiB, peak {peak / GIB:.1f} GiB"
    values = {"bound_mib": round(bound), "peak_mib": round(peak)}
    return judge("memory", "bound against peak", figure, MEMORY_LIMIT, held, **values)


def judge_adapters(figures: AdapterFigures) -> list[Row]:
    """Judge what the engine sees of an adapter, and whether the base stayed as it was."""
    step, what = "adapters", "syncs" if figures.seen is not None else "steps"
    base = judge(
        step,
        f"base after {figures.syncs} {what}",
        "bit-equal" if figures.base_equal else "changed",
        "bit-equal",
        figures.base_equal,
    )
    share, distance = "update in engine by trainer", "engine against trainer"
    if figures.seen is None or figures.error is None:
        reason = "no vLLM: the trainer's own weights sample"
        return [skip(step, share, reason), skip(step, distance, reason), base]
    values = {"seen": round(figures.seen, 4), "standard_error": round(figures.error, 4)}
    with_adapter, without = figures.distance or 0.0, figures.distance_without or 0.0
    return [
        judge(
            step,
            share,
            f"{figures.seen:.3f} (standard error {figures.error:.3f})",
            f"{1 - SEEN:g} to {1 + SEEN:g}",
            abs(figures.seen - 1) <= SEEN,
            **values,
        ),
        judge(
            step,
            distance,
            f"{with_adapter:.5f} nats a token, {without:.5f} without an adapter",
            f"at most {FURTHER:g} times",
            with_adapter <= FURTHER * without,
            distance=with_adapter,
            distance_without=without,
        ),
        base,
    ]


def judge_following(figures: FollowingFigures) -> Row:
    """Judge whether the engine has the trainer's weights after a sync, and only then."""
    values = {name: round(value, 5) for name, value in vars(figures).items()}
    figure = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in values.items())
    apart = max(figures.synced, figures.changed, figures.cached, figures.restored)
    held = apart <= ROUNDING and figures.missed >= MOVED * apart
    return judge("follows", "engine against trainer", figure, FOLLOWS_LIMIT, held, **values)


def judge_bitwise_resume(resumed: ResumedTrial) -> Row:
    """Judge a trial on a CPU that continued from its checkpoint."""
    figure = f"steps {name_steps(resumed.steps)} equal"
    if resumed.unequal:
        figure = f"{len(resumed.unequal)} differ: {resumed.unequal[0]}"
    held = bool(resumed.steps) and not resumed.unequal
    return judge("resume", "on a CPU", figure, "every bit equal", held)


def judge_device_resume(resumed: ResumedTrial) -> list[Row]:
    """Judge a trial on a GPU that continued from its checkpoint, and its generator states."""
    step = "resume"
    figure = f"steps {name_steps(resumed.steps)}, losses differ by {resumed.largest_difference:.2g}"
    states = f"{resumed.random_states} in a checkpoint, {resumed.devices} GPUs"
    return [
        judge(
            step,
            "on the GPU",
            figure,
            RESUME_LIMIT,
            bool(resumed.steps),
            largest_difference=resumed.largest_difference,
            unequal=len(resumed.unequal),
        ),
        judge(
            step,
            "generator states",
            states,
            STATES_LIMIT,
            resumed.random_states == resumed.devices,
        ),
    ]


def judge_engine(cold: float, reused: float, *, small: bool) -> Row:
    """Judge the seconds to the first step of a trial, and of the next one in its process."""
    ratio = reused / cold
    figure = f"{cold:.1f} s, then {reused:.1f} s: ratio {ratio:.2f}"
    if small:
        return skip("adapters", ENGINE_CHECK, f"no GPU; on this CPU {figure}", ENGINE_LIMIT)
    values = {"cold_seconds": round(cold, 2), "reused_seconds": round(reused, 2)}
    return judge("adapters", ENGINE_CHECK, figure, ENGINE_LIMIT, ratio <= REUSED, **values)


def judge_sleep(
    awake: TrainedTrial, asleep: TrainedTrial, peak_awake: float, peak_asleep: float
) -> Row:
    """Judge a trial whose engine sleeps against the same trial with one awake; peaks in MiB.

    The first step is sampled before the first sleep. What an engine has lost while it slept shows
    in the second one: in what it samples, and in how far it is from the trainer.
    """
    first, second = ((awake.metrics[step], asleep.metrics[step]) for step in (1, 2))
    unequal = [f"{name} of step 1" for name in SAMPLED if first[0][name] != first[1][name]]
    unequal += [
        f"{name} of step 2"
        for name in SAMPLED
        if not math.isclose(second[0][name], second[1][name], rel_tol=WOKEN, abs_tol=WOKEN / 10)
    ]
    if not second[1][APART] <= min(ROUNDING, MOVED * second[0][APART]):  # nor is NaN rounding
        unequal.append(f"{APART} of step 2")
    figure = f"peak {peak_asleep / GIB:.1f} GiB, {peak_awake / GIB:.1f} GiB awake"
    figure += f"; {unequal[0]} differs" if unequal else ""
    values = {
        "awake_apart": second[0][APART],
        "asleep_apart": second[1][APART],
        "awake_mib": round(peak_awake),
        "asleep_mib": round(peak_asleep),
        "awake_seconds": round(awake.seconds, 1),
        "asleep_seconds": round(asleep.seconds, 1),
    }
    held = not unequal and peak_asleep < peak_awake
    return judge("sleep", SLEEP_CHECK, figure, SLEEP_LIMIT, held, **values)


def judge_evaluation(trial: TrainedTrial, rows: int, limit: float | None) -> Row:
    """Judge a held-out evaluation of long prompts; `limit` is in bytes, None on a CPU."""
    figure = f"2 x {rows} completions in {trial.seconds:.0f} s"
    text, held = "every metric has a value", bool(trial.test)
    if limit is not None:
        figure += f", peak {trial.peak_bytes / 2**30:.1f} GiB"
        text, held = f"at most {limit / 2**30:.1f} GiB", held and trial.peak_bytes <= limit
    values = {"peak_mib": trial.peak_bytes >> 20, "seconds": round(trial.seconds, 1)}
    return judge("evaluation", "untrained policy", figure, text, held, **values)


def judge_step(pair: Pair, *, small: bool) -> list[Row]:
    """Judge a step of ours against one of TRL; on a CPU only that both sample the same."""
    figures = pair.build_figures("seconds")
    peaks = {"ours_peak_mib": find_peak(pair.ours), "trl_peak_mib": find_peak(pair.plain)}
    figures |= peaks
    lengths = f"{figures['ours_mean_length']} and {figures['trl_mean_length']} tokens"
    limit = f"at most {LENGTH_TOLERANCE:.0%} apart"
    held = pair.compute_length_gap() <= LENGTH_TOLERANCE
    equal = judge("step", "completions of ours and TRL", lengths, limit, held)
    seconds = f"{figures['ours_seconds']} s, TRL {figures['trl_seconds']} s"
    figure, limit = f"ratio {figures['ratio']} ({seconds})", f"ratio at most {RATIO}"
    if small:
        reason = f"no GPU; on this CPU {figure}"
        return [skip("step", "time of ours against TRL", reason, limit), equal]
    fast = judge(
        "step", "time of ours against TRL", figure, limit, figures["ratio"] <= RATIO, **figures
    )
    return [fast, equal]


def judge_killed_sweep(figures: SweepFigures, trials: int) -> Row:
    failures = figures.list_failures()
    done = sum(r.state == "complete" and r.role != "untrained" for r in figures.records)
    figure = f"{done} complete, {len(figures.retries)} tried again"
    if failures:
        figure = f"{figure}; {failures[0]}"
    held = not failures and done == trials and bool(figures.killed) and bool(figures.retries)
    limit = f"{trials} complete, the killed one tried again"
    return judge("sweep", "one process killed", figure, limit, held, retries=list(figures.retries))


def judge_packing(
    step: str, share: float, figures: SweepFigures, alone: float | None, *, unit: str
) -> Row:
    """Judge a sweep whose trials share a device; `alone` is trials an hour, one at a time."""
    failures = figures.list_failures()
    figure = f"{figures.side_by_side} at once, {figures.trials_per_hour:.0f} trials an hour"
    if alone is not None:
        figure += f", {figures.trials_per_hour / alone:.2f} of one at a time"
    held = not failures and figures.side_by_side == figures.slots
    if failures:
        figure = failures[0]
    values = {
        "trials_per_hour": round(figures.trials_per_hour, 1),
        "peak_mib": round(figures.peak_mib),
        "side_by_side": figures.side_by_side,
    }
    check, limit = f"{name_share(share)} of {unit}", f"{figures.slots} at once, {NO_FAILURE}"
    return judge(step, check, figure, limit, held, **values)


def judge_shards(step: str, check: str, figures: SweepFigures, trials: int) -> Row:
    """Judge a sweep whose trials have several processes, each on its own GPU."""
    failures = figures.list_failures()
    done = sum(r.state == "complete" and r.role != "untrained" for r in figures.records)
    figure = failures[0] if failures else f"{done} complete"
    held = not failures and done == trials
    return judge(step, check, figure, f"{trials} complete", held)


def name_share(share: float) -> str:
    return str(Fraction(share).limit_denominator(8))


def name_steps(steps: Sequence[int]) -> str:
    return f"{min(steps)} to {max(steps)}" if steps else "none"
