"""Trials of the toy task that differ in a field, a setting or a parameter."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager
from pathlib import Path

import pytest

from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.training import fast_cpu, micro_batches
from tests.support import training

FIELDS = {field.name for field in dataclasses.fields(TrialConfig)} - {"policy", "directory"}


def build_trial(policy, directory: Path, **changes) -> TrialConfig:
    """Build a config whose `changes` are fields of it, or parameters."""
    own = {name: changes.pop(name) for name in FIELDS & changes.keys()}
    return dataclasses.replace(training.build_trial_config(policy, directory, **changes), **own)


def run_metrics(config: TrialConfig, resume: Path | None = None):
    """Return step and metrics of the steps that a trial computes, and its outcome.

    A resumed trial first reports the measurement at its checkpoint again, without metrics.
    """
    reports, outcome = training.run(config, resume)
    return [(m.step, dict(m.metrics)) for m, _ in reports if m.metrics], outcome


def get_results(outcome):
    return outcome.validation, outcome.test


@contextmanager
def compute(way: str):
    """Let a small policy be computed `packed`, as it is, with `shared` prompts, or `padded`."""
    with pytest.MonkeyPatch.context() as patch:
        if way != "packed":
            patch.setattr(fast_cpu, "can_pack", lambda _: False)
        if way in ("padded", "TRL"):
            patch.setattr(micro_batches, "find_obstacle", lambda _: "a test")
        if way == "TRL":  # its own order, padding and division: one micro-batch is one mini-batch
            patch.setattr(micro_batches, "cut_padding", lambda batch: batch)
        yield
