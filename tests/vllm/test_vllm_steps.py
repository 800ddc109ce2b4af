"""Steps that vLLM samples and that are computed in parts, with a KL to the untrained policy."""

from __future__ import annotations

import math

import pytest

from gdpo_tune.core.settings import ModelSettings, RolloutSettings

pytestmark = pytest.mark.vllm

WHOLE, MICRO = {}, {"micro_batch_size": 4}
MINI = {"mini_batch_size": 8, "micro_batch_size": 4}
SAMPLED = ("rewards/digits/mean", "completions/mean_length")


@pytest.mark.parametrize(
    "model", [ModelSettings(), ModelSettings(lora_rank=4)], ids=["every weight", "adapters"]
)
@pytest.mark.parametrize("parts", [MICRO, MINI], ids=["micro-batches", "mini-batches"])
def test_a_step_in_parts_trains_as_a_whole_one_with_a_kl(
    build_config, train_and_report, parts, model
):
    """The first step samples the same completions, so its metrics agree up to rounding.

    With mini-batches what is computed after its first update does not.
    """
    first, later = [], []
    for sizes in (WHOLE, parts):
        config = build_config(beta=0.04, model=model, **sizes)
        _, reports = train_and_report(config)
        assert [m.step for m in reports] == [1, 2]
        first.append(reports[0].metrics)
        later.append(reports[1].metrics)
    for name in SAMPLED if parts is MINI else (*SAMPLED, "loss", "grad_norm", "kl"):
        whole, split = (metrics[f"train/{name}"] for metrics in first)
        print(f"  {name:20} {whole:.7f} at once, {split:.7f} in parts")
        assert split == pytest.approx(whole, rel=1e-3, abs=1e-5)
    for metrics in later:  # the policy has moved away from its reference
        assert metrics["train/kl"] > 0
        assert math.isfinite(metrics["train/loss"])
        assert metrics["train/sampling/importance_sampling_ratio/mean"] == pytest.approx(
            1, abs=1e-3
        )


@pytest.mark.parametrize("mode", ["sequence_truncate", "token_mask", "token_truncate", "off"])
def test_each_correction_trains(build_config, train_and_report, mode):
    rollout = RolloutSettings(engine="vllm", importance_sampling=mode)
    _, reports = train_and_report(build_config(rollout=rollout, steps=1))
    assert math.isfinite(reports[0].metrics["train/loss"])
    assert ("train/sampling/importance_sampling_ratio/mean" in reports[0].metrics) is (
        mode != "off"
    )
