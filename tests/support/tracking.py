"""A small spec and records as a ledger holds them, for the tests of tracking."""

from gdpo_tune.core.trials import Cost, Estimate, Measurement, TrialRecord
from gdpo_tune.spec import load_spec

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


def make_tiny_spec(directory, *overrides):
    path = directory / "tiny.yaml"
    path.write_text(SPACE)
    uri = f"sqlite:///{directory / 'mlflow.db'}"
    return load_spec(path, [f"storage={directory / 'runs'}", f"tracking.uri={uri}", *overrides])


def make_running_trial(number, **more):
    params = {"learning_rate": 1e-4 * (number + 1), "normalization": "gdpo", "group_size": 8}
    fields = {"params": params, "role": "search", "state": "running", "seed": number}
    fields |= {"proposer": "model", "started": 1000.0 + number}
    return TrialRecord(number=number, **fields | more)


def make_complete_trial(number, correctness, length, **more):
    test = {
        "correctness": Estimate(correctness, 0.01),
        "length": Estimate(length, 0.02),
        "mean_length": Estimate(20.0, 0.5),
    }
    validation = {name: Estimate(e.mean - 0.1, e.se) for name, e in test.items()}
    done = {"state": "complete", "test": test, "validation": validation, "feasible": True}
    done |= {"finished": 2000.0 + number, "cost": Cost(2560, 12.5, 11.0)}
    return make_running_trial(number, **done | more)


def make_measurement(step, **metrics):
    values = {"train/loss": 1 / step, "train/reward": float(step), **metrics}
    if step % 20 == 0:
        values["validation/correctness"] = step / 100
    cost = Cost(64 * step, 0.5 * step, 0.4 * step)
    return Measurement(step, values, cost, time=1000.0 + step)
