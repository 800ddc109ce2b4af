"""The self-check of a trial's first batch: each fault that it must find, and what it leaves alone.

Each mend of `load_policy` and of the trainer is undone, and the trial must stop and name the part.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from gdpo_tune.core.errors import TrialFailure
from gdpo_tune.core.settings import ModelSettings, RolloutSettings
from gdpo_tune.core.trials import UNSHARED
from gdpo_tune.policies import load_policy as loading
from gdpo_tune.training import (
    fast_cpu,
    micro_batches,
    rollout,
    self_check,
    shared_prompts,
    train,
    trial,
)
from tests.support.training import (
    SETTINGS,
    build_trial_config,
    write_gpt2,
    write_policy,
)

pytestmark = pytest.mark.usefixtures("toy")

ONE_STEP = SETTINGS.replace(steps=1)


@pytest.fixture(scope="module")
def llama_policy(tmp_path_factory):
    return write_policy(tmp_path_factory.mktemp("llama"))


def run(policy, directory, **changes):
    """Train one step and return its metrics."""
    config = build_trial_config(policy, directory, settings=ONE_STEP)
    steps = []
    train(
        dataclasses.replace(config, **changes),
        resume=None,
        report=lambda step, _: steps.append(step),
    )
    return steps[0].metrics


def keep_own_decoding(model, tokenizer, temperature):
    return model.generation_config


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("min_p", 0.9),
        ("suppress_tokens", [20, 21]),
        ("min_new_tokens", 4),
        ("sequence_bias", [[[5], 8.0]]),
    ],
)
def test_it_finds_a_generation_config_that_changes_draws(
    llama_policy, tmp_path, monkeypatch, key, value
):
    # Source: trl#5783, verl#7270; the mend is `build_neutral_decoding`.
    policy = write_gpt2(tmp_path / "policy", {key: value, "do_sample": True})
    monkeypatch.setattr(loading, "build_neutral_decoding", keep_own_decoding)
    for module in (rollout, self_check):  # as of a policy that only Transformers can sample from
        monkeypatch.setattr(module, "keeps_simple_cache", lambda _: False)
    with pytest.raises(TrialFailure, match=r"the engine and a plain .* generation config"):
        run(policy, tmp_path / "trial")


def test_it_finds_dropout(llama_policy, tmp_path, monkeypatch):
    # Source: trl#3500, trl#3234; the mend is `turn_off_dropout`.
    policy = write_gpt2(tmp_path / "policy", attn_pdrop=0.1, resid_pdrop=0.1)
    monkeypatch.setattr(loading, "turn_off_dropout", lambda model: None)
    with pytest.raises(TrialFailure, match=r"the trainer and a plain forward pass .* dropout"):
        run(policy, tmp_path / "trial")


def test_it_finds_positions_that_count_padding(llama_policy, tmp_path, monkeypatch):
    # Source: trl#469, trl#6800; the mend is `needs_positions`.
    policy = write_gpt2(tmp_path / "policy")
    monkeypatch.setattr(micro_batches, "needs_positions", lambda model: False)
    padded = ModelSettings(shared_prompts="off")
    with pytest.raises(TrialFailure, match=r"the trainer and a plain forward pass .* positions"):
        run(policy, tmp_path / "trial", model=padded)


def test_it_finds_a_fast_sampler_that_computes_another_policy(llama_policy, tmp_path, monkeypatch):
    monkeypatch.setattr(fast_cpu, "_rotate", lambda heads, cos, sin: heads)
    with pytest.raises(TrialFailure, match="the engine and a plain forward pass"):
        run(llama_policy, tmp_path / "trial")


@pytest.mark.parametrize(
    ("engine", "model"),
    [
        ("auto", ModelSettings()),
        ("transformers", ModelSettings(lora_rank=2, dtype="bfloat16")),
    ],
)
def test_it_changes_no_result(llama_policy, tmp_path, monkeypatch, engine, model):
    checked = []
    own = trial.check_first_batch

    def spy(*arguments, **keywords):
        checked.append(arguments)
        own(*arguments, **keywords)

    settings = {"rollout": RolloutSettings(engine=engine), "model": model}
    monkeypatch.setattr(trial, "check_first_batch", spy)
    with_check = run(llama_policy, tmp_path / "with", **settings)
    monkeypatch.setattr(trial, "check_first_batch", lambda *_, **__: None)
    without = run(llama_policy, tmp_path / "without", **settings)
    steps = [{k: v for k, v in m.items() if "time" not in k} for m in (with_check, without)]
    assert len(checked) == 1
    assert steps[0] == steps[1]


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_a_policy_that_keeps_its_dropout_passes(llama_policy, tmp_path, lora_rank):
    policy = write_gpt2(tmp_path / "policy", attn_pdrop=0.1, resid_pdrop=0.1)
    model = ModelSettings(dropout=True, lora_rank=lora_rank)
    metrics = run(policy, tmp_path / "trial", model=model)
    assert metrics["train/loss"] == metrics["train/loss"]


def test_a_process_that_computes_nan_is_found_wherever_it_stands(
    llama_policy, tmp_path, monkeypatch
):
    # Source: IEEE 754: every comparison with NaN is false, so `max` may pass over it.
    others = [{"trainer": 0.0, "engine": gap} for gap in (float("nan"), 0.0)]
    processes = SimpleNamespace(gather=lambda own: [own, *others])
    monkeypatch.setattr(self_check, "distributed", processes)
    with pytest.raises(TrialFailure, match=r"the engine and a plain .* differ by nan"):
        run(llama_policy, tmp_path / "trial")


def test_a_vllm_that_samples_with_other_weights_is_found(llama_policy, tmp_path, monkeypatch):
    own = trial.check_first_batch

    def add_log_probs(trainer, batch, **keywords):
        # As TRL returns those of vLLM; NaN where it could not tell.
        own_values = torch.full(batch["completion_ids"].shape, -3.0)
        own_values[:, 0] = float("nan")
        own(trainer, {**batch, "sampling_per_token_logps": own_values}, **keywords)

    monkeypatch.setattr(trial, "check_first_batch", add_log_probs)
    with pytest.raises(TrialFailure, match=r"the engine and a plain .* processed_logprobs"):
        run(llama_policy, tmp_path / "trial")


def test_a_trainer_that_shares_prompts_wrongly_goes_on_with_padded_batches(tmp_path, monkeypatch):
    """As under an architecture whose attention asks for something that nobody knew of."""
    policy = write_gpt2(tmp_path / "policy")
    monkeypatch.setattr(shared_prompts, "_attend_to_last", forget_prompt)
    config = build_trial_config(policy, tmp_path / "trial", settings=ONE_STEP)
    outcome = train(config, resume=None, report=lambda *_: None)
    assert "its first batch differed by" in outcome.environment[UNSHARED]
    padded = dataclasses.replace(
        config, directory=tmp_path / "padded", model=ModelSettings(shared_prompts="off")
    )
    expected = train(padded, resume=None, report=lambda *_: None)
    assert UNSHARED not in expected.environment, "it was wanted"
    assert (outcome.validation, outcome.test) == (expected.validation, expected.test)


ATTEND_TO_LAST = shared_prompts._attend_to_last


def forget_prompt(query, key, value, *more):
    count = query.shape[2]
    return ATTEND_TO_LAST(query, key[:, :, -count:], value[:, :, -count:], *more)
