"""Files of a trial's directory: steps, completions and checkpoints.

`steps.jsonl` has the measurements, a line each, only ever appended to:
`{"step": 3, "metrics": {"train/loss": ...}, "cost": {"completions": ...}, "time": ...}`; `time` is
Unix time in seconds, which older files lack. A trial that resumes from a checkpoint repeats steps
that an interrupted attempt had written: a line supersedes every earlier line of the same or a later
step. A line that a crash cut short is skipped.

`completions.jsonl` has a few held-out completions for a person to read:
`{"prompt": ..., "completion": ..., "metrics": {"correctness": 1.0, ...}}`. Every trial of a sweep
keeps completions of the same prompts, which are drawn at random. The file is small on purpose: it
has `MOST_COMPLETIONS` lines, and long texts are cut.

A checkpoint is whole once its marker exists and every file that the marker lists has its size. The
marker is written last and deleted first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.files import write_atomically
from gdpo_tune.core.text import join_turns
from gdpo_tune.core.trials import Cost, Measurement, parse_step

TRIALS = "trials"
"""Directory in that of a sweep, with one directory for each trial, named by its number."""
STEPS_FILE = "steps.jsonl"
TRAINER_STATE_FILE = "trainer_state.json"
"""File of a checkpoint with the state of TRL's trainer."""
REWARDS = "rewards/"
"""Prefix of the step metrics of each reward, as TRL names them."""
ZERO_STD = "frac_reward_zero_std"
"""Share of zero-variance groups, as TRL names it."""
NO_ADVANTAGE = "frac_advantage_zero"
"""Share of the completions that teach nothing, because their advantage is exactly 0."""
CLIPPED = "completions/clipped_ratio"
"""Share of the completions that were cut at `training.max_completion_length`, as TRL names it."""
DIFFERENCE = "sampling/sampling_logp_difference/mean"
"""Mean absolute difference of sampling and training log-probabilities, as TRL names it."""
KEPT = (
    *("loss", "grad_norm", "learning_rate", "entropy", "kl", "clip_ratio/region_mean"),
    *("reward", "reward_std", ZERO_STD, NO_ADVANTAGE, "completions/mean_length", CLIPPED),
    *("tools/call_frequency", "tools/failure_frequency"),
    "sampling/importance_sampling_ratio/mean",
    DIFFERENCE,
    "sampling/sampling_logp_difference/max",
)
"""Step metrics of TRL that are kept, besides those of each reward.

`frac_advantage_zero` is ours. `kl` exists where beta is above 0. Lengths are in tokens. With vLLM,
the ratio is a mean over completions, those beyond TRL's bound counted as 0, and differences are in
nats per token between engine and trainer."""
MOST_CUT = 0.5
"""Above this share of cut completions, the cut is named as the cause of equal rewards."""
MOST_POINTS = 60
"""Points of one trial's curve that are passed on, at most. Otherwise a thousand trials of thousands
of steps fill a tracking database with tens of gigabytes."""


def is_kept(step: int, last: int) -> bool:
    """Return whether point `step` of 1..`last` is passed on beyond the trial's own file.

    Of up to `MOST_POINTS` points every one is, of more at least half of `MOST_POINTS`, evenly
    spread, and always the last. All code that thins a curve uses this rule, so no curve is thinned
    twice, and a trial that resumes keeps the same points.
    """
    return step >= last or step % -(-last // MOST_POINTS) == 0


def teaches_nothing(step: Measurement) -> bool:
    """Return whether every advantage of a step was 0."""
    return step.metrics.get(f"train/{NO_ADVANTAGE}") == 1


def append_step(directory: Path, measurement: Measurement) -> None:
    """Append one measurement to the trial's file, which is created if missing."""
    metrics, cost = dict(measurement.metrics), asdict(measurement.cost)
    row: dict[str, Any] = {"step": measurement.step, "metrics": metrics, "cost": cost}
    if measurement.time is not None:
        row["time"] = measurement.time
    line = json.dumps(row, allow_nan=False)
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / STEPS_FILE).open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
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
        """Return what `read_steps` does."""
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
            for measurement in map(_parse_line, content.splitlines()):
                if measurement is not None:
                    while self._steps and self._steps[-1].step >= measurement.step:
                        self._steps.pop()
                    self._steps.append(measurement)
            # A line without its end is read again: more of it may follow.
            self._offset += content.rfind(b"\n") + 1
        return list(self._steps)


def _parse_line(line: bytes) -> Measurement | None:
    try:
        record: dict[str, Any] = json.loads(line)
        cost, time = Cost(**record["cost"]), record.get("time")
        return Measurement(record["step"], dict(record["metrics"]), cost, time=time and float(time))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def may_differ(path: Path, size: int | None) -> bool:
    """Return whether a file may differ from a copy that has `size` bytes; None: there is no copy.

    Files of equal size count as equal: those of a checkpoint are written once, steps are appended,
    and other completions have other lengths.
    """
    return not path.is_file() or path.stat().st_size != size


COMPLETIONS_FILE = "completions.jsonl"
MOST_COMPLETIONS = 24
"""Completions that are kept."""
LONGEST_TEXT = 1500
"""Characters of a text that are kept; of a prompt the last ones, where the question is."""
CUT = "\N{HORIZONTAL ELLIPSIS}"


@dataclass(frozen=True)
class Completion:
    """A completion with its prompt and its metrics."""

    prompt: str
    completion: str
    metrics: Mapping[str, float | None]
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Extra columns that reward functions logged."""


def shorten_completion(
    prompt: str | Sequence[Mapping[str, Any]],
    completion: str | Sequence[Mapping[str, Any]],
    metrics: Mapping[str, float | None],
    columns: Mapping[str, Any] | None = None,
) -> Completion:
    """Build a completion whose texts, of messages with their roles, are cut to `LONGEST_TEXT`."""
    prompt, completion = join_turns(prompt), join_turns(completion)
    if len(prompt) > LONGEST_TEXT:
        prompt = CUT + prompt[-LONGEST_TEXT:]
    if len(completion) > LONGEST_TEXT:
        completion = completion[:LONGEST_TEXT] + CUT
    cut = {k: v[:LONGEST_TEXT] if isinstance(v, str) else v for k, v in (columns or {}).items()}
    return Completion(prompt, completion, dict(metrics), cut)


def write_completions(directory: Path, completions: Sequence[Completion]) -> None:
    """Replace a trial's file; its directory is created if missing."""
    directory.mkdir(parents=True, exist_ok=True)
    rows = [{k: v for k, v in asdict(one).items() if k != "columns" or v} for one in completions]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    write_atomically(directory / COMPLETIONS_FILE, "".join(f"{line}\n" for line in lines))


def read_completions(directory: Path) -> list[Completion]:
    """Return the completions of a trial; none without a file.

    Raises:
        UsageError: a line of the file holds no completion.
    """
    path = directory / COMPLETIONS_FILE
    if not path.exists():
        return []
    result: list[Completion] = []
    # Bytes are split: a text may hold line breaks that are none in a file, such as U+2028.
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            result.append(Completion(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise UsageError(
                f"{path}:{number}: this line holds no completion ({error})\n"
                "    fix: move the file away; a report then shows those of the other trials"
            ) from None
    return result


MARKER = "complete.json"
NEWEST_KEPT = 2
"""Complete checkpoints that a running trial keeps, on its disk and in a store."""
ADAPTER = "adapter"
"""Directory of the adapter beside the files of a whole policy."""
ADAPTER_CONFIG = "adapter_config.json"
"""File that every directory of an adapter holds."""


def find_adapter(policy: Path) -> Path | None:
    """Return the directory of a policy's adapter, its own or that in it; None without one."""
    places = (policy, policy / ADAPTER)
    return next((place for place in places if (place / ADAPTER_CONFIG).is_file()), None)


def find_checkpoint_name(path: str) -> str | None:
    """Return the name of the checkpoint that a file belongs to; None if it belongs to none."""
    return next((part for part in path.split("/")[:-1] if parse_step(part) is not None), None)


def is_marker(path: str) -> bool:
    """Return whether a file marks a checkpoint as whole."""
    return path.endswith(f"/{MARKER}") and find_checkpoint_name(path) is not None


def sort_checkpoints(paths: Iterable[str]) -> list[str]:
    """Return the names of the checkpoints among a trial's files, the one of most steps first."""
    names = {name for path in paths if (name := find_checkpoint_name(path)) is not None}
    return sorted(names, key=lambda name: parse_step(name) or 0, reverse=True)


def iterate_whole_checkpoints(
    sizes: Mapping[str, int], read: Callable[[str], bytes | None]
) -> Iterator[str]:
    """Yield the names of a trial's whole checkpoints, the one of most steps first.

    `sizes` are bytes by path in the trial's directory; `read` returns a file's content, or None.
    """
    for name in sort_checkpoints(sizes):
        marker = read(f"{name}/{MARKER}") if f"{name}/{MARKER}" in sizes else None
        try:
            files: Mapping[str, Mapping[str, int]] = json.loads(marker or b"")["files"]
        except (ValueError, KeyError, TypeError):
            continue  # no marker, or a torn one
        if all(sizes.get(f"{name}/{file}") == about["size"] for file, about in files.items()):
            yield name
