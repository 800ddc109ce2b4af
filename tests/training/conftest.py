"""Fixtures of trained policies, and of the toy task that trains them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from gdpo_tune.core.settings import ModelSettings
from gdpo_tune.core.trial_config import TrainedPart
from gdpo_tune.policies.load_policy import load_policy
from gdpo_tune.training import train, worker_cache
from tests.support.merging import PLAIN, QUICK
from tests.support.training import ToyTask, build_trial_config, register_toy_task, write_policy


@pytest.fixture
def toy(monkeypatch):
    """Register the toy task; no cache passes from test to test."""
    register_toy_task(monkeypatch)
    worker_cache.release_worker_cache()
    ToyTask.opened = ToyTask.closed = 0
    yield
    worker_cache.release_worker_cache()


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return write_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def other_policy(policy, tmp_path_factory):
    """A policy of the same architecture and tokenizer."""
    directory = tmp_path_factory.mktemp("other")
    model, tokenizer = load_policy(policy)
    with torch.no_grad():
        model.model.norm.weight += 0.1
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def trained(policy, tmp_path_factory):
    """Return the directory of a trial that trained the policy; each is trained once."""
    directories = {}

    def train_once(seed: int, model: ModelSettings = PLAIN, policy: str = policy) -> Path:
        key = seed, model, policy
        if key not in directories:
            directories[key] = tmp_path_factory.mktemp("trained") / "t"
            config = build_trial_config(policy, directories[key], seed=seed, settings=QUICK)
            config = dataclasses.replace(config, model=model, keep_at=(1,))
            train(config, resume=None, report=lambda *_: None)
        return directories[key]

    return train_once


@pytest.fixture
def parts(trained):
    """Return parts by seed and weight; the weight of one alone is 1."""

    def build(shares: dict[int, float], model: ModelSettings = PLAIN, step: int = 2):
        return tuple(
            TrainedPart(trained(seed, model) / f"checkpoint-{step}", share)
            for seed, share in shares.items()
        )

    return build
