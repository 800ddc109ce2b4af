"""Engines that do not follow the policy are found in the trial; each fault was a public report."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from gdpo_tune.core import registry
from gdpo_tune.core.errors import EngineDiedError, TrialFailure
from gdpo_tune.core.settings import DataSettings, ModelSettings, RolloutSettings
from gdpo_tune.training import self_check, vllm_engine
from gdpo_tune.training.vllm_engine import ColocatedEngine
from tests.vllm.conftest import SHAPE, ShapeTask

pytestmark = pytest.mark.vllm

ADAPTERS = ModelSettings(lora_rank=4)


@pytest.mark.parametrize("settings", [ModelSettings(), ADAPTERS], ids=["every weight", "adapters"])
def test_the_check_changes_no_result(build_config, train_and_report, monkeypatch, settings):
    figures, own = [], self_check.measure_following

    def measure(*arguments):
        figures.append(own(*arguments))
        return figures[-1]

    results = []
    monkeypatch.setattr(self_check, "measure_following", measure)
    for check in (self_check.check_following, lambda *_: None):
        monkeypatch.setattr(self_check, "check_following", check)
        outcome, reports = train_and_report(build_config(model=settings))
        steps = [{k: v for k, v in m.metrics.items() if "time" not in k} for m in reports]
        results.append((steps, outcome.validation, outcome.test))
    assert len(figures) == 1
    assert results[0] == results[1]


def test_weights_that_never_arrive(build_config, train_and_report, monkeypatch):
    monkeypatch.setattr(ColocatedEngine, "_reload_weights", lambda self: None)
    with pytest.raises(TrialFailure, match="self-check of the engine: after a change"):
        train_and_report(build_config())


def rename_modules(monkeypatch, prefix, others):
    """Write adapters whose modules have another prefix than vLLM's."""
    from safetensors.torch import load_file, save_file

    plain = vllm_engine.write_adapter_to_memory

    @contextmanager
    def write_renamed(model):
        with plain(model) as directory:
            file = directory / "adapter_model.safetensors"
            weights = {n.replace(prefix, others): w for n, w in load_file(file).items()}
            save_file(weights, file, metadata={"format": "pt"})
            yield directory

    monkeypatch.setattr(vllm_engine, "write_adapter_to_memory", write_renamed)


def test_an_adapter_whose_modules_have_other_names(build_config, train_and_report, monkeypatch):
    rename_modules(monkeypatch, "model.model.layers", "model.language_model.model.layers")
    with pytest.raises(TrialFailure, match="under other names"):
        train_and_report(build_config(model=ADAPTERS))


def test_an_adapter_of_which_half_has_other_names(build_config, train_and_report, monkeypatch):
    rename_modules(monkeypatch, "mlp", "feed_forward")
    with pytest.raises(TrialFailure, match="self-check of the engine: after a change"):
        train_and_report(build_config(model=ADAPTERS))


@pytest.mark.parametrize("correction", ["sequence_mask", "off"])
def test_an_engine_of_nan(build_config, train_and_report, monkeypatch, correction):
    plain = ColocatedEngine._reload_weights
    syncs = []

    def poison(model):
        with torch.no_grad():
            model.model.norm.weight[0] = float("nan")

    def send_and_poison(self):
        plain(self)
        syncs.append(self._trainer.state.global_step)
        if syncs[-1]:  # after the first step, whose self-check has passed
            self._engine.llm.apply_model(poison)

    monkeypatch.setattr(ColocatedEngine, "_reload_weights", send_and_poison)
    settings = RolloutSettings(engine="vllm", importance_sampling=correction)
    with pytest.raises(EngineDiedError, match=r"engine are NaN or infinite at step 2"):
        train_and_report(build_config(rollout=settings))


@pytest.mark.parametrize("correction", ["sequence_mask", "off"])
def test_an_engine_that_gets_no_weights_any_more(
    build_config, train_and_report, monkeypatch, correction
):
    plain = ColocatedEngine._reload_weights

    def send_at_first(self):
        if self._trainer.state.global_step == 0:
            plain(self)

    monkeypatch.setattr(ColocatedEngine, "_reload_weights", send_at_first)
    config = build_config(
        steps=8,
        learning_rate=3e-3,
        rollout=RolloutSettings(engine="vllm", importance_sampling=correction),
    )
    with pytest.raises(EngineDiedError, match="no longer follows the policy"):
        train_and_report(config)


class LongTask(ShapeTask):
    """Prompts that fill a block of the cache, which has 128 tokens on a CPU."""

    def problems(self, split, count, seed):
        return [
            replace(problem, prompt="f" * 140 + problem.prompt)
            for problem in super().problems(split, count, seed)
        ]


LONG = replace(SHAPE, build=LongTask)


def test_a_cache_of_prompts_that_outlives_the_weights(build_config, train_and_report, monkeypatch):
    monkeypatch.setitem(registry.TASKS, "long", f"{__name__}:LONG")
    monkeypatch.setattr(vllm_engine, "forget_prompts", lambda llm: None)
    config = replace(build_config(data=DataSettings(max_prompt_length=200)), task="long")
    with pytest.raises(TrialFailure, match="self-check of the engine: after a change"):
        train_and_report(config)
