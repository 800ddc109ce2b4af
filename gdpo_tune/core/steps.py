"""`steps.jsonl`: the measurements of one trial, a line each, only ever appended to.

A line is `{"step": 3, "metrics": {"train/loss": ...}, "cost": {"completions": ...}}`. A trial that
resumes from a checkpoint repeats steps that an interrupted attempt had written: a line
supersedes every earlier line of the same or a later step. A line that a crash cut short is skipped.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gdpo_tune.core.trials import Cost, Measurement

STEPS_FILE = "steps.jsonl"
REWARDS = "rewards/"
"""Prefix of the step metrics of each reward, as TRL names them."""
ZERO_STD = "frac_reward_zero_std"
"""Share of the groups whose rewards are all equal, as TRL names it."""
NO_ADVANTAGE = "frac_advantage_zero"
"""Share of the completions that teach nothing, because their advantage is exactly 0."""
CLIPPED = "completions/clipped_ratio"
"""Share of the completions that were cut at `training.max_completion_length`, as TRL names it."""
KEPT = (
    *("loss", "grad_norm", "learning_rate", "entropy", "kl", "clip_ratio/region_mean"),
    *("reward", "reward_std", ZERO_STD, NO_ADVANTAGE, "completions/mean_length", CLIPPED),
    "sampling/importance_sampling_ratio/mean",
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max",
)
"""Step metrics of TRL that are kept, besides those of each reward.

`frac_advantage_zero` is ours. `kl` exists where beta is above 0. Lengths are in tokens. With vLLM,
the ratio is a mean over completions, those beyond TRL's bound counted as 0, and differences are in
nats per token between engine and trainer."""
MOST_CUT = 0.5
"""Above this share of cut completions, the cut is named as the cause of equal rewards."""
EARLIER_NAMES = {
    "train/reward/": f"train/{REWARDS}",
    "/dead_groups": "/frac_reward_zero_std",
    "train/mean_length": "train/completions/mean_length",
}
"""Parts of names that files of earlier versions hold -> the names now."""
MOST_POINTS = 60
"""Points of one trial's curve that are passed on, at most. Otherwise a thousand trials of thousands
of steps fill a tracking database with tens of gigabytes."""


def is_kept(step: int, last: int) -> bool:
    """Return whether point `step` of 1..`last` is passed on beyond the trial's own file.

    Of up to `MOST_POINTS` points every one is, of more at least half of `MOST_POINTS`, evenly
    spread, and always the last. All code that thins a curve uses this rule, so a curve that
    passes it twice is not thinned twice. The rule does not depend on time, so a trial that
    resumes keeps the same points.
    """
    return step >= last or step % -(-last // MOST_POINTS) == 0


def teaches_nothing(step: Measurement) -> bool:
    """Return whether every advantage of a step was 0."""
    return step.metrics.get(f"train/{NO_ADVANTAGE}") == 1


def append_step(directory: Path, measurement: Measurement) -> None:
    """Append one measurement to the trial's file, which is created if missing."""
    line = json.dumps(
        {
            "step": measurement.step,
            "metrics": dict(measurement.metrics),
            "cost": asdict(measurement.cost),
        },
        allow_nan=False,
    )
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / STEPS_FILE).open("ab+") as file:
        if file.tell() and not _ends_line(file):
            line = "\n" + line
        file.write((line + "\n").encode())


def read_steps(directory: Path) -> list[Measurement]:
    """Return the measurements that no later line supersedes, by step; [] without a file."""
    return StepsReader(directory).read()


class StepsReader:
    """Reader of one trial's file that reads only what was appended since the last call."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / STEPS_FILE
        self._offset = 0
        self._steps: list[Measurement] = []

    def read(self) -> list[Measurement]:
        """Return the measurements that no later line supersedes, by step; [] without a file."""
        try:
            size = self._path.stat().st_size
        except OSError:
            size = 0
        if size < self._offset:  # another attempt has written a new file
            self._offset, self._steps = 0, []
        if size > self._offset:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                content = file.read()
            for line in content.splitlines():
                self._add(line)
            # A line without its end is read again: more of it may follow.
            self._offset += content.rfind(b"\n") + 1
        return list(self._steps)

    def _add(self, line: bytes) -> None:
        measurement = _parse_line(line)
        if measurement is None:
            return
        while self._steps and self._steps[-1].step >= measurement.step:
            self._steps.pop()
        self._steps.append(measurement)


def _ends_line(file: Any) -> bool:
    file.seek(-1, 2)
    return file.read(1) == b"\n"


def _parse_line(line: bytes) -> Measurement | None:
    try:
        record: dict[str, Any] = json.loads(line)
        metrics = {_update_name(name): value for name, value in record["metrics"].items()}
        return Measurement(record["step"], metrics, Cost(**record["cost"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _update_name(name: str) -> str:
    for earlier, now in EARLIER_NAMES.items():
        name = name.replace(earlier, now)
    return name
