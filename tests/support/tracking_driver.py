"""A sweep without training: `python tracking_driver.py DIRECTORY URI PAUSE TIMEOUT`.

Four trials of forty steps go through the sink as tuning would send them. Start and end of each are
kept in a file, as in a ledger, so the same command continues after a kill. PAUSE seconds pass
before each step, each started trial prints a line, and closing takes at most TIMEOUT seconds.
"""

import hashlib
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
from gdpo_tune.core.trial_files import append_step
from gdpo_tune.core.trials import Cost, Estimate, Measurement, TrialRecord
from gdpo_tune.tracking.mlflow_sink import MlflowTracker
from gdpo_tune.tracking.server import check_server
from tests.support.tracking import make_tiny_spec

TRIALS = 4
STEPS = 40


def make_record(number, started, finished=None, *, sweep):
    done = {}
    if finished is not None:
        test = {"correctness": number / 10, "length": 1 - number / 10}
        estimates = {name: Estimate(mean, 0.01) for name, mean in test.items()}
        done = {"test": estimates, "validation": estimates, "feasible": True, "finished": finished}
    return TrialRecord(
        number=number,
        role="search",
        directory=sweep / "trials" / str(number),
        state="running" if finished is None else "complete",
        params={"normalization": "gdpo", "learning_rate": 1e-4 * (number + 1)},
        seed=number,
        proposer="model",
        started=started,
        cost=Cost(64 * STEPS, 10.0, 9.0),
        **done,
    )


class Times:
    """Start and end of each trial, in place of a ledger."""

    def __init__(self, path):
        self._path = path
        self.times = json.loads(path.read_text()) if path.exists() else []
        self.sweep_id = hashlib.sha256(str(path).encode()).hexdigest()[:8]

    def make_records(self):
        return tuple(
            make_record(number, *times, sweep=self._path.parent)
            for number, times in enumerate(self.times)
        )

    def start(self, number):
        if number == len(self.times):
            self.times.append([time.time()])
            self._path.write_text(json.dumps(self.times))
        return make_record(number, self.times[number][0], sweep=self._path.parent)

    def finish(self, number):
        self.times[number].append(time.time())
        self._path.write_text(json.dumps(self.times))
        return make_record(number, *self.times[number], sweep=self._path.parent)


def main(directory, uri, pause=0.0, timeout=120.0):
    """Run the rest of the sweep; return the warning of the sink."""
    spec = make_tiny_spec(directory, f"tracking.uri={uri}")
    times = Times(directory / "times.json")
    check_server(spec)
    sink = MlflowTracker(spec)
    sink(SweepStarted(times.make_records(), sweep_id=times.sweep_id))
    for number in range(TRIALS):
        if len(times.times) > number and len(times.times[number]) == 2:
            continue
        sink(TrialStarted(times.start(number)))
        print(f"trial {number}", flush=True)
        for step in range(1, STEPS + 1):
            time.sleep(pause)
            metrics = {"train/loss": 1 / step, "train/reward": number + step}
            if step % 20 == 0:
                metrics["validation/correctness"] = step / 100
            measurement = Measurement(step, metrics, Cost(64 * step, step / 4, step / 5))
            append_step(directory / "trials" / str(number), measurement)  # as the trial does
            sink(TrialProgress(number, measurement))
        # Its checkpoint is deleted by then, like that of a trial that is not on the front.
        sink(TrialFinished(replace(times.finish(number), checkpoint=directory / "checkpoint")))
    sink(SweepFinished(times.make_records(), interrupted=False))
    spec.directory.mkdir(parents=True, exist_ok=True)
    (spec.directory / "report.html").write_text("<html><body>a report</body></html>")
    sink.log_figures()
    return sink.close(timeout)


if __name__ == "__main__":
    print(main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), float(sys.argv[4])))
