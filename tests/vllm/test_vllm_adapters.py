"""LoRA in bfloat16 with vLLM on a CPU: the engine gets the adapter, and no weight is written.

A sync that merges the adapter into weights in bfloat16 rounds away three quarters of an update of
this size, and leaves other weights behind.
"""

from __future__ import annotations

import statistics

import pytest
import torch

from gdpo_tune.core.settings import ModelSettings

pytestmark = pytest.mark.vllm

RATE = 3e-6
SMALL = 25 * RATE
"""Size of the numbers of an adapter after 25 steps at that learning rate."""
SYNCS = 100
PLAIN, ADAPTERS = ModelSettings(dtype="bfloat16"), ModelSettings(dtype="bfloat16", lora_rank=32)


def read_adapters(model):
    """Return the halves A and B of the first adapter of each projection, which runs in vLLM."""
    return {
        name: [
            (a[0, 0].float(), b[0, 0].float())
            for a, b in zip(layer.lora_a_stacked, layer.lora_b_stacked, strict=True)
        ]
        for name, layer in model.named_modules()
        if name.endswith(("qkv_proj", "o_proj", "gate_up_proj", "down_proj"))
        and hasattr(layer, "lora_a_stacked")
    }


def test_the_engine_sees_every_small_update_and_the_base_stays_bit_equal(build_config):
    from gdpo_tune.training.trial import build_trainer
    from gdpo_tune.training.worker_cache import open_worker_cache

    config = build_config(model=ADAPTERS, learning_rate=RATE)
    with open_worker_cache(config) as cache:
        trainer, _ = build_trainer(config, cache)
        base = {n: w for n, w in trainer.model.named_parameters() if not w.requires_grad}
        before = {name: weight.detach().clone() for name, weight in base.items()}
        assert {weight.dtype for weight in base.values()} == {torch.bfloat16}
        changes = dict[str, torch.Tensor]()
        for seed in range(SYNCS):
            torch.manual_seed(seed)
            for name, weight in trainer.model.named_parameters():
                if ".lora_B." in name:
                    torch.nn.init.normal_(weight, std=SMALL)
            trainer.vllm_generation.sync_weights()
        for name, module in trainer.model.named_modules():
            if hasattr(module, "get_delta_weight"):
                changes[name] = module.get_delta_weight("default").detach().float()
        drifted = [name for name, weight in base.items() if not torch.equal(weight, before[name])]
        engine = trainer.vllm_generation.llm.engine
        (seen,) = engine.run(engine.llm.apply_model, read_adapters)
    print(f"  weights that differ after {SYNCS} syncs: {len(drifted)} of {len(base)}")
    assert not drifted
    prefix, parts = "base_model.model.", {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
    parts["gate_up_proj"] = ("gate_proj", "up_proj")
    compared = list[float]()
    for name, halves in seen.items():
        block, _, last = name.rpartition(".")
        for own, (a, b) in zip(parts.get(last, (last,)), halves, strict=True):
            ours = changes[f"{prefix}{block}.{own}"]
            theirs = (b @ a)[: ours.shape[0]]  # vLLM multiplies B by the scale as it loads
            compared.append(float((theirs - ours).norm() / ours.norm()))
    print(f"  of {len(compared)} updates the engine misses at most {max(compared):.2%}")
    assert len(compared) == len(changes)
    assert max(compared) < 0.01


def test_log_probabilities_agree_as_without_an_adapter(build_config, train_and_report):
    figures = {}
    for label, settings in (("every weight", PLAIN), ("adapters", ADAPTERS)):
        config = build_config(
            model=settings, learning_rate=RATE, steps=4, evaluate_every=4, completions_per_step=64
        )
        outcome, reports = train_and_report(config)
        assert outcome.test
        apart = [m.metrics["train/sampling/sampling_logp_difference/mean"] for m in reports]
        ratio = [m.metrics["train/sampling/importance_sampling_ratio/mean"] for m in reports]
        figures[label] = statistics.mean(apart)
        print(f"  {label:12} mean |log p(vLLM) - log p(trainer)| = {figures[label]:.5f}")
        assert all(abs(one - 1) < 0.1 for one in ratio)
    assert figures["adapters"] < 1.25 * figures["every weight"]
