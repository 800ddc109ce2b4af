"""Held-out completions without an engine: in chunks that fit; through the engine where one runs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from gdpo_tune.core.settings import RolloutSettings
from gdpo_tune.training import rollout, train, trial, worker_cache
from gdpo_tune.training.decoding import Decoding
from gdpo_tune.training.rollout import generate, sample_in_chunks
from gdpo_tune.training.trial import build_trainer
from tests.support.training import build_trial_config, register_toy_task, write_policy

LONG = [[2] * 2048] * 512


def echo(prompts):
    return [list(prompt) for prompt in prompts]


def test_a_chunk_holds_a_number_of_tokens_whatever_the_batch():
    sizes = []

    def sample(prompts):
        sizes.append(len(prompts))
        return echo(prompts)

    assert sample_in_chunks(sample, LONG, 1024) == LONG
    assert max(sizes) * (2048 + 1024) <= rollout.TOKENS_AT_ONCE
    assert sum(sizes) == 512
    assert sample_in_chunks(sample, [[2] * 2**18] * 2, 1) == [[2] * 2**18] * 2
    assert sizes[-2:] == [1, 1]
    assert sample_in_chunks(sample, [], 8) == []


def test_a_chunk_that_does_not_fit_is_halved_and_order_stays():
    prompts, sizes = [[number] for number in range(50)], []

    def sample(part):
        sizes.append(len(part))
        if len(part) > 7:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return echo(part)

    assert sample_in_chunks(sample, prompts, 8) == prompts
    assert sizes[:4] == [50, 25, 12, 6]
    assert max(sizes[3:]) == 6, "later chunks start with the size that fitted"

    def never(part):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        sample_in_chunks(never, prompts, 8)


@pytest.fixture(scope="module")
def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=41, n_positions=64, n_embd=32, n_layer=1, n_head=2)
    )


def sample_from(model, rows=20):
    decoding = Decoding(max_new_tokens=8, temperature=1.0, end_tokens=(1,), pad_token=0)
    seen, inner = [], model.generate

    def watched(tokens, **keywords):
        seen.append(tuple(tokens.shape))
        return inner(tokens, **keywords)

    model.generate = watched
    try:
        prompts = [[2 + number % 30] * 4 for number in range(rows)]
        generator = torch.Generator().manual_seed(3)
        completions = generate(model, prompts, decoding, generator)
    finally:
        del model.generate
    return completions, seen, torch.rand(1, generator=generator).item()


def test_transformers_samples_as_many_at_once_as_fit(gpt2, monkeypatch):
    monkeypatch.setattr(rollout, "keeps_simple_cache", lambda _: False)
    whole, shapes, drawn = sample_from(gpt2)
    assert shapes == [(20, 4)], "all at once, as ever, where they fit"
    monkeypatch.setattr(rollout, "TOKENS_AT_ONCE", 8 * 12)
    parts, shapes, drawn_again = sample_from(gpt2)
    assert [rows for rows, _ in shapes] == [8, 8, 4]
    assert len(parts) == len(whole) == 20
    assert parts[:8] != parts[8:16]
    assert drawn_again == drawn, "the evaluation's generator moves as far as without chunks"


@pytest.fixture
def toy(monkeypatch, tmp_path):
    register_toy_task(monkeypatch)
    worker_cache.release_worker_cache()
    yield write_policy(tmp_path / "policy")
    worker_cache.release_worker_cache()


def test_the_fast_cpu_sampler_is_not_cut_into_chunks(toy, tmp_path, monkeypatch):
    config = dataclasses.replace(build_trial_config(toy, tmp_path / "t"), train=False)
    expected = train(config, resume=None, report=lambda *_: None)
    monkeypatch.setattr(rollout, "TOKENS_AT_ONCE", 1)
    assert train(config, resume=None, report=lambda *_: None).test == expected.test


def test_the_untrained_baseline_is_sampled_by_the_engine_of_a_training(toy, tmp_path, monkeypatch):
    built, prompts = [], []

    def build_watched(config, cache, *others):
        trainer, sampler = build_trainer(config, cache, *others)
        built.append((config, trainer.ref_model))

        def watched(model, batch, decoding, generator):
            assert model is trainer.policy
            prompts.extend(batch)
            return sampler(model, batch, decoding, generator)

        return trainer, watched

    monkeypatch.setattr(trial, "build_trainer", build_watched)
    config = build_trial_config(toy, tmp_path / "t", beta=0.1)
    config = dataclasses.replace(config, train=False)
    plain = train(config, resume=None, report=lambda *_: None)
    assert not built
    monkeypatch.setattr(trial, "uses_engine_in_process", lambda _: True)
    checked = []
    monkeypatch.setattr(trial, "check_following", lambda *_: checked.append(True))
    engine = train(config, resume=None, report=lambda *_: None)
    assert (engine.test, engine.validation) == (plain.test, plain.validation)
    assert checked == [True], "the engine shows once that it follows"
    ((used, reference),) = built
    assert used.params["beta"] == 0
    assert reference is None, "nothing is trained, so nothing is compared with the policy"
    assert len(prompts) == 2 * 6 * 2
    assert engine.checkpoint is None


@pytest.mark.parametrize(
    ("settings", "uses"),
    [
        (RolloutSettings(), True),
        (RolloutSettings(engine="transformers"), False),
        (RolloutSettings(engine="vllm", vllm_mode="server", vllm_server="http://h:1"), False),
    ],
)
def test_an_engine_in_this_process_is_told_from_a_server(tmp_path, monkeypatch, settings, uses):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(rollout, "find_vllm", lambda: rollout_vllm())
    config = build_trial_config("embedded", tmp_path)
    assert rollout.uses_engine_in_process(dataclasses.replace(config, rollout=settings)) is uses


def rollout_vllm():
    from gdpo_tune.core.engines import NEWEST, VLLM

    return VLLM(NEWEST, on_cpu=False)
