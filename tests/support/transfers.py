"""Transfers of a stored candidate, and the messages of those that are refused."""

from __future__ import annotations

import re
import shlex

import pytest

from gdpo_tune.core.errors import UsageError
from gdpo_tune.ledger import Ledger
from gdpo_tune.results.retrain import build_request_from_sweep
from tests.support.tuning import build_outcome, load_code_spec

POLICY = "policy=Qwen/Qwen2.5-7B-Instruct"
NEEDED = {
    "space.learning_rate": "1e-6",
    "training.steps": "100",
    "training.completions_per_step": "512",
    "training.max_completion_length": "512",
    "training.length_limit": "200",
}
DATA = ("data.source=my.jsonl", "data.layout=mbpp")
GIVEN = [f"{key}={value}" for key, value in NEEDED.items()]
PARAMS = {
    "normalization": "grpo",
    "group_size": 8,
    "reward_weights.format": 0.5,
    "reward_weights.length": 0.25,
    "learning_rate": 1e-4,
}


def store_sweep(tmp_path, params=(), overrides=()):
    spec = load_code_spec(tmp_path, overrides)
    with Ledger.open(spec) as ledger:
        complete = spec.space.complete_baseline({**PARAMS, **dict(params)})
        ledger.start(complete, "search", "model", seed=70)
        ledger.complete(0, build_outcome(0.9, 0.8, 0.5))
    return spec


def transfer(spec, *overrides, recipe="", which="0", option="export"):
    """Return the request for a candidate of a sweep, without a need for its data or packages."""
    source = f"{spec.directory}:{which}"
    return build_request_from_sweep(source, overrides, None, option, to_run=False, recipe=recipe)


def refuse(spec, *overrides, **arguments):
    with pytest.raises(UsageError) as caught:
        transfer(spec, *overrides, **arguments)
    assert caught.value.exit_status == 2
    assert "fix: " in str(caught.value)
    return str(caught.value)


def list_missing(message):
    return set(re.findall(r"^    ((?:space|training|data)\.\w+) = ", message, re.MULTILINE))


def split_fix(message):
    (line,) = re.findall(r"fix: choose values, for example (--set .*)", message)
    words = shlex.split(line)
    assert words[::2] == ["--set"] * (len(words) // 2)
    return words[1::2]
