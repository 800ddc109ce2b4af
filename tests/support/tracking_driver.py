"""A sweep without training, for tracking: `python tracking_driver.py FOLDER URI PAUSE TIMEOUT`.

Four trials of forty steps go through the sink as tuning would send them. What is finished is kept
in a file, as the ledger would, so that the same command goes on after a kill. PAUSE seconds pass
before each step, each started trial prints a line, and what is left at the end has TIMEOUT seconds.
"""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

from gdpo_tune.core.events import (
    SweepFinished,
    SweepStarted,
    TrialFinished,
    TrialProgress,
    TrialStarted,
)
from gdpo_tune.core.trials import Cost, Estimate, Measurement, TrialRecord
from gdpo_tune.spec import load_spec
from gdpo_tune.tracking import MlflowSink, check_server

SPACE = """
name: tiny
task: code
objectives:
  correctness: {direction: maximize, reference: 0}
  length: {direction: maximize, reference: 0}
space: {learning_rate: {log: [1.0e-5, 1.0e-3]}}
training: {steps: 40, evaluate_every: 20}
tracking: {experiment: nightly}
"""
TRIALS = 4
STEPS = 40


def spec_of(folder, uri):
    path = folder / "tiny.yaml"
    path.write_text(SPACE)
    return load_spec(path, [f"storage={folder / 'runs'}", f"tracking.uri={uri}"])


def record(number, started, finished=None):
    done = {}
    if finished is not None:
        test = {"correctness": number / 10, "length": 1 - number / 10}
        estimates = {name: Estimate(mean, 0.01) for name, mean in test.items()}
        done = {"test": estimates, "validation": estimates, "feasible": True, "finished": finished}
    return TrialRecord(
        number=number,
        role="search",
        state="running" if finished is None else "complete",
        params={"normalization": "gdpo", "learning_rate": 1e-4 * (number + 1)},
        seed=number,
        proposer="model",
        started=started,
        cost=Cost(64 * STEPS, 10.0, 9.0),
        **done,
    )


class Times:
    """When each trial started and ended: the little that a ledger need know here."""

    def __init__(self, path):
        self._path = path
        self.known = json.loads(path.read_text()) if path.exists() else []

    def records(self):
        return tuple(record(number, *times) for number, times in enumerate(self.known))

    def start(self, number):
        if number == len(self.known):
            self.known.append([time.time()])
            self._path.write_text(json.dumps(self.known))
        return record(number, self.known[number][0])

    def finish(self, number):
        self.known[number].append(time.time())
        self._path.write_text(json.dumps(self.known))
        return record(number, *self.known[number])


def main(folder, uri, pause=0.0, timeout=120.0):
    """Run the sweep, or what is left of it; return the sink's closing words."""
    spec = spec_of(folder, uri)
    times = Times(folder / "times.json")
    check_server(spec)
    sink = MlflowSink(spec)
    sink(SweepStarted(times.records(), TRIALS))
    for number in range(TRIALS):
        if len(times.known) > number and len(times.known[number]) == 2:
            continue
        sink(TrialStarted(times.start(number)))
        print(f"trial {number}", flush=True)
        for step in range(1, STEPS + 1):
            time.sleep(pause)
            metrics = {"train/loss": 1 / step, "train/reward": number + step}
            if step % 20 == 0:
                metrics["validation/correctness"] = step / 100
            cost = Cost(64 * step, step / 4, step / 5)
            sink(TrialProgress(number, Measurement(step, metrics, cost)))
        # Its checkpoint is gone by the end, as one beside the front would be.
        sink(TrialFinished(replace(times.finish(number), checkpoint=folder / "checkpoint")))
    sink(SweepFinished(times.records(), interrupted=False))
    (spec.directory / "report.html").write_text("<html><body>a report</body></html>")
    sink.log_pictures()
    return sink.close(timeout)


if __name__ == "__main__":
    print(main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), float(sys.argv[4])))
