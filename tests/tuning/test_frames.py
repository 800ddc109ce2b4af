"""How far it is from the command to a step of the optimizer, in functions of this package."""

import sys
from contextlib import contextmanager
from types import SimpleNamespace

import torch

from gdpo_tune.core.object_store import SPEC
from gdpo_tune.tuning import attempts, runner
from gdpo_tune.tuning.nodes import Nodes
from gdpo_tune.tuning.ray import attempt as adapter
from gdpo_tune.tuning.ray import cluster, tune
from tests.support.training import build_trial_config, register_toy_task, write_policy
from tests.support.tuning import load_code_spec

COMMAND = ["<module> of gdpo_tune.sweep", "run_command", "main", "_run_here"]
MOST = 12


def list_frames():
    """Return the functions of the package that are being called, the innermost first."""
    names: list[str] = []
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("gdpo_tune."):
            names.append(f"{frame.f_globals['__name__']}.{frame.f_code.co_qualname}")
        frame = frame.f_back
    return names


def test_few_functions_lie_between_the_command_and_a_step(tmp_path, monkeypatch):
    frames: list[str] = []

    @contextmanager
    def open_cluster(*_):
        row = {"NodeID": "a", "Alive": True, "NodeManagerHostname": "h", "Resources": {"CPU": 1.0}}
        yield cluster.Cluster(Nodes(lambda: [row]), lambda: None, lambda: True)

    def fit():
        frames.extend(list_frames())
        raise KeyboardInterrupt

    monkeypatch.setattr(cluster, "open_cluster", open_cluster)
    monkeypatch.setattr(tune, "build_tuner", lambda *_: SimpleNamespace(fit=fit))
    assert runner.run_sweep(load_code_spec(tmp_path, [])).exit_status
    assert len(frames) == 3, frames

    step = torch.optim.AdamW.step

    def note(*arguments, **keywords):
        if len(frames) == 3:
            frames.extend(list_frames())
        return step(*arguments, **keywords)

    register_toy_task(monkeypatch)
    monkeypatch.setattr(torch.optim.AdamW, "step", note)
    monkeypatch.setattr(adapter, "describe_place", lambda: attempts.TrialPlaced("process", "node"))
    monkeypatch.setattr(adapter.tune, "report", lambda _: None)
    monkeypatch.setattr(adapter, "_trials_served", 0)
    (tmp_path / SPEC).touch()
    trial = build_trial_config(write_policy(tmp_path / "policy"), tmp_path / "trials" / "0")
    trial.directory.mkdir(parents=True)
    attempt = attempts.AttemptConfig(
        trial, attempts.RunSettings("gdpo_tune.training:train", tmp_path / SPEC)
    )
    result = adapter.run_trial(attempts.wrap_for_ray(attempt))
    assert isinstance(attempts.unwrap_message(result), attempts.Finished)
    assert len(frames) > 3
    assert len(COMMAND) + len(frames) <= MOST, [*COMMAND, *frames]
