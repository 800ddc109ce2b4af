"""Fixtures of trained policies, and of the toy task that trains them."""

import gc
from pathlib import Path

import pytest
import torch

from gdpo_tune.core.settings import ModelSettings
from gdpo_tune.core.trial_config import TrainedPart
from gdpo_tune.policies.load_policy import load_policy
from gdpo_tune.training import worker_cache
from gdpo_tune.training.engine import PROCESS_ENGINE
from tests.support.gradients import ROWS, run_two_steps
from tests.support.merging import PLAIN, QUICK
from tests.support.training import ToyTask, register_toy_task, run, write_policy
from tests.support.trials import build_trial, compute


@pytest.fixture
def toy(monkeypatch):
    """Register the toy task; no cache passes from test to test."""
    register_toy_task(monkeypatch)
    worker_cache.release_worker_cache()
    ToyTask.opened = ToyTask.closed = 0
    yield
    worker_cache.release_worker_cache()


@pytest.fixture
def thawed(monkeypatch):
    """Calls of `gc.unfreeze`, which does nothing, since it would slow down later collections."""
    calls: list[bool] = []
    monkeypatch.setattr(gc, "unfreeze", lambda: calls.append(True))
    return calls


@pytest.fixture
def closed_engine(thawed):
    """Close the engine of this process after the test."""
    yield
    PROCESS_ENGINE.close()


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return write_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def loaded_model(policy):
    """A model of the policy that no test changes."""
    return load_policy(policy)[0]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Several threads would wait for each other longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
        if model.lora_rank:
            pytest.importorskip("peft")
        if key not in directories:
            directories[key] = tmp_path_factory.mktemp("trained") / "t"
            own = {"seed": seed, "training": QUICK, "model": model, "keep_at": (1,)}
            run(build_trial(policy, directories[key], **own))
        return directories[key]

    return train_once


@pytest.fixture(scope="module")
def parts(trained):
    """Return parts by seed and weight; the weight of one alone is 1."""

    def build(shares: dict[int, float], model: ModelSettings = PLAIN, step: int = 2):
        return tuple(
            TrainedPart(trained(seed, model) / f"checkpoint-{step}", share)
            for seed, share in shares.items()
        )

    return build


@pytest.fixture(scope="module")
def whole(policy, tmp_path_factory):
    """Run the step at once, or in mini-batches, each setting only the first time."""
    results = {}

    def run_once(way, size=ROWS, **changes):
        key = (way, size, *changes.items())
        if key not in results:
            directory = tmp_path_factory.mktemp("whole")
            with compute(way):
                results[key] = run_two_steps(policy, directory, size, size, **changes)
        return results[key]

    return run_once
