"""vLLM as the engine on a CPU: `make vllm` makes the environment and runs this.

The build of vLLM for CPUs computes with a copy of the weights as a GPU's does; so whether the copy
is renewed shows in the log-probabilities of one text under both networks.
"""

from __future__ import annotations

import math

import pytest
import torch

from gdpo_tune.core.settings import ModelSettings
from gdpo_tune.core.trials import RUNNER
from gdpo_tune.policies.load_policy import load_policy
from gdpo_tune.training import engine

# vLLM and its dependencies raise warnings of their own.
pytestmark = pytest.mark.vllm

PROMPT = "Write f(x): k is 17, plus 9\n"


def compute_log_probabilities(model, prompt, completion):
    """Compute the log-probabilities of a completion's tokens by Transformers, [length]."""
    with torch.no_grad():
        tokens = torch.tensor([prompt + completion])
        logits = model(tokens).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]


def test_the_engine_follows_the_weights_only_through_the_sync(build_config):
    from accelerate import Accelerator
    from trl import GRPOConfig
    from trl.generation import vllm_generation as trl_vllm
    from vllm import SamplingParams

    from gdpo_tune.training import vllm_engine
    from gdpo_tune.training.engine import SampleRequest

    config = build_config()
    model, tokenizer = load_policy("embedded")
    model.eval()
    arguments = GRPOConfig(
        output_dir=str(config.directory),
        use_cpu=True,
        bf16=False,
        **vllm_engine.build_engine_arguments(config, model),
    )
    with vllm_engine.prepare_engine(config, model, arguments):
        generation = trl_vllm.VLLMGeneration(
            model=model,
            accelerator=Accelerator(cpu=True),
            processing_class=tokenizer,
            mode="colocate",
            max_model_length=arguments.vllm_max_model_length,
            gpu_memory_utilization=arguments.vllm_gpu_memory_utilization,
            max_num_seqs=16,
        )

    class Trainer:
        vllm_generation = generation
        judges_early = False

    vllm_engine.ColocatedEngine(Trainer())
    prompt = tokenizer(PROMPT)["input_ids"]

    def difference():
        """Largest difference of log p over 4 samples of 24 tokens, in nats."""
        generation.llm.reset_prefix_cache()
        settings = [
            SamplingParams(temperature=1.0, seed=seed, max_tokens=24, logprobs=0, ignore_eos=True)
            for seed in range(4)
        ]
        requests = [SampleRequest(prompt, one) for one in settings]
        worst = 0.0
        for output in generation.llm.engine.generate(requests):
            drawn = output.outputs[0]
            tokens = list(drawn.token_ids)
            theirs = torch.tensor([next(iter(one.values())).logprob for one in drawn.logprobs])
            ours = compute_log_probabilities(model, prompt, tokens)
            worst = max(worst, float((ours - theirs).abs().max()))
        return worst

    figures = [("at the start", difference())]
    for seed in range(3):
        torch.manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight) * (0.05 if weight.ndim > 1 else 0.1))
        figures.append((f"perturbed {seed}, without the sync", difference()))
        generation.sync_weights()
        figures.append((f"perturbed {seed}, after the sync", difference()))
    for when, apart in figures:
        print(f"  {when:30} max |log p(vLLM) - log p(Transformers)| = {apart:.7f}")
    assert all(apart > 0.5 for when, apart in figures if "without" in when)
    assert all(apart < 1e-4 for when, apart in figures if "without" not in when)


@pytest.mark.parametrize(
    "settings", [ModelSettings(), ModelSettings(lora_rank=4)], ids=["every weight", "adapters"]
)
def test_a_trial_samples_with_vllm_from_start_to_end(
    build_config, train_and_report, settings, monkeypatch
):
    runners, name_runner = [], engine._name_runner

    def look_at_class(worker):
        runners.append(type(worker.model_runner).__module__)
        return name_runner(worker)

    monkeypatch.setattr(engine, "_name_runner", look_at_class)
    outcome, reports = train_and_report(build_config(model=settings))
    for measurement in reports:
        mismatch = {n: x for n, x in measurement.metrics.items() if n.startswith("train/sampling/")}
        print(f"  step {measurement.step}:", ", ".join(f"{n} {x:.7f}" for n, x in mismatch.items()))
    print("  test:", ", ".join(f"{name} {one.mean:.4f}" for name, one in outcome.test.items()))
    assert [m.step for m in reports] == [1, 2]
    # Source: the imports of `CPUWorker.init_device` of vLLM 0.31.
    modules = {"V1": "vllm.v1.worker.cpu_model_runner", "V2": "vllm.v1.worker.cpu.model_runner"}
    assert runners == [modules[outcome.environment[RUNNER]]]
    for measurement in reports:
        assert all(math.isfinite(value) for value in measurement.metrics.values())
        assert measurement.metrics[
            "train/sampling/importance_sampling_ratio/mean"
        ] == pytest.approx(1, abs=1e-3)
        assert 0 < measurement.metrics["train/sampling/sampling_logp_difference/max"] < 1e-4
    for estimates in (outcome.validation, outcome.test):
        assert set(estimates) == {"digits", "length"}
        assert all(math.isfinite(one.mean) for one in estimates.values())
