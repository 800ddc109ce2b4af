"""Sweeps of real policies: their file, their commands in processes of their own, their checks."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gdpo_tune.core.trials import UNSHARED, TrialRecord
from gdpo_tune.results.open_sweep import Sweep, find_sweep
from tests.support.killed_sweeps import build_environment, read_steps_written, start_program
from tests.support.paths import ROOT

PROGRAMS = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
OFFLINE = {"PATH": PROGRAMS, "HF_HUB_OFFLINE": "1"}
"""Variables by which commands find programs beside Python, and ask no host for files."""
STORE = "sqlite:///mlflow.db"
QUESTIONS = {
    "+": "Ann has {a} pens and gets {b} more. How many pens does Ann have?",
    "-": "Tom has {a} cards and gives {b} away. How many cards does Tom have left?",
    "*": "A box holds {a} apples. How many apples are in {b} boxes?",
}
SPACE = """
name: {name}
task: word_task.py:WordTask
policy: {policy}
model: {{lora_rank: {rank}}}
rollout: {{engine: {engine}}}
data: {{max_prompt_length: 128}}
objectives:
  vowels: {{direction: maximize, reference: 0}}
  mean_length: {{direction: minimize, reference: 100}}
space:
  group_size: 4
  learning_rate: {learning_rate}
  reward_weights: {{right: 1, vowels: {{log: [0.1, 2]}}}}
training:
  {{steps: {steps}, evaluate_every: {steps}, checkpoint_every: 1, completions_per_step: 8,
   max_completion_length: 16, length_limit: 12, train_prompts: 24, validation_prompts: 8,
   test_prompts: 8, samples_per_prompt: 1}}
search:
  {{trials: {trials}, scheduler: {{type: fifo}}, replicates: {{max_runs: 0}},
   merges: {{budget: {merges}}}, checkpoints: {{budget: 0}}}}
keep: all
resources: {{cpus: {cpus}}}
tracking: {{uri: "{store}"}}
"""


def write_problems(file: Path) -> None:
    """Write problems of one step in GSM8K's columns, with the notes in which it calculates."""
    rows: list[dict[str, str]] = []
    for a in range(20, 30):
        for b in range(2, 6):
            for sign, question in QUESTIONS.items():
                result = {"+": a + b, "-": a - b, "*": a * b}[sign]
                note = f"It is {a} {sign} {b} = <<{a}{sign}{b}={result}>>{result}."
                answer = f"{note}\n#### {result}"
                rows.append({"question": question.format(a=a, b=b), "answer": answer})
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@dataclass(frozen=True)
class RealSweep:
    """A sweep of a policy, started in a directory that has the task and its problems."""

    workplace: Path
    name: str
    policy: Path
    trials: int = 2
    steps: int = 2
    rank: int = 8
    engine: str = "transformers"
    merges: int = 0
    cpus: int = 1

    @property
    def directory(self) -> Path:
        return self.workplace / "runs" / self.name

    def run(self) -> Sweep:
        """Run the sweep to its end and check what it recorded."""
        with self.start() as process:
            assert process.wait() == 0, self.read_log()
        return self.check_end()

    @contextmanager
    def start(self) -> Generator[subprocess.Popen[bytes], None, None]:
        """Start the command in a process group of its own; kill it at the end if it still runs."""
        file = self.workplace / f"{self.name}.yaml"
        rate = 1e-3 if self.rank else 1e-4
        file.write_text(SPACE.format(**vars(self), learning_rate=rate, store=STORE))
        command, log = ["-m", "gdpo_tune.sweep", file.name], f"{self.name}.log"
        with start_program(command, self.workplace, log, **OFFLINE) as process:
            yield process

    def read_log(self) -> str:
        return (self.workplace / f"{self.name}.log").read_text(errors="replace")

    def read_steps(self, trial: int) -> list[int]:
        """Return the steps that a trial has written, with repetitions."""
        return read_steps_written(self.directory / "trials" / str(trial))

    def check_end(self) -> Sweep:
        """Check that every training ended once and moved its policy, and that there is a front."""
        sweep = find_sweep(str(self.directory))
        trainings = [record for record in sweep.records if record.is_training]
        assert sum(record.role == "search" for record in trainings) == self.trials
        for record in trainings:
            assert (record.state, record.reason) == ("complete", "")
            self.check_training(record)
        assert sweep.front.members
        return sweep

    def check_training(self, record: TrialRecord) -> None:
        assert not record.is_unchanged
        assert UNSHARED not in record.environment, record.environment[UNSHARED]
        assert self.read_steps(record.number) == list(range(1, self.steps + 1))
        text = (self.directory / "trials" / str(record.number) / "steps.jsonl").read_text()
        rows: list[dict[str, Any]] = [json.loads(line)["metrics"] for line in text.splitlines()]
        assert all(math.isfinite(value) for row in rows for value in row.values())
        assert all(row["train/grad_norm"] > 0 for row in rows)
        for estimates in (record.validation, record.test):
            assert {"right", "vowels", "mean_length"} <= estimates.keys()
            assert all(math.isfinite(estimate.mean) for estimate in estimates.values())
        assert record.checkpoint is not None
        assert record.checkpoint.name == f"checkpoint-{self.steps}"


def run_program(*words: str | Path, cwd: Path = ROOT, program: str = sys.executable) -> str:
    """Run a program to its end and return what it printed."""
    command = [program, *map(str, words)]
    done = subprocess.run(
        command,
        cwd=cwd,
        env=build_environment(**OFFLINE),
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done.stdout


class Sampled(NamedTuple):
    """What a policy says, and what tells it apart from others; see `greedy_tokens`."""

    tokens: list[list[int]]
    logits: list[float]


def sample_in_process(way: str, *names: str | Path, cwd: Path) -> list[Sampled]:
    """Sample greedily from policies that a process of its own loads."""
    printed = run_program("-m", "tests.real.greedy_tokens", way, *names, cwd=cwd)
    return [Sampled(*each) for each in json.loads(printed.splitlines()[-1])]
