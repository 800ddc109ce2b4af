"""vLLM as the engine on a CPU: `make vllm` makes the environment and runs this.

The build of vLLM for CPUs computes with a copy of the weights as a GPU's does; so whether the copy
is renewed shows in the log-probabilities of one text under both networks.
"""

from __future__ import annotations

import math
import string
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gdpo_tune.core import registry
from gdpo_tune.core.parameters import PARAMETERS
from gdpo_tune.core.registry import TaskInfo
from gdpo_tune.core.settings import DataSettings, ModelSettings, RolloutSettings, TrainingSettings
from gdpo_tune.core.trials import TrialConfig
from gdpo_tune.policies.load_policy import load_policy
from gdpo_tune.tasks.base import Problem, Scores

# vLLM and its dependencies raise warnings of their own.
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

TRAINING = TrainingSettings(
    steps=2,
    completions_per_step=16,
    max_completion_length=24,
    length_limit=12,
    train_prompts=16,
    validation_prompts=8,
    test_prompts=8,
    evaluate_every=2,
    checkpoint_every=2,
)
PROMPT = "Write f(x): k is 17, plus 9\n"


class ShapeTask:
    """Rewards of the text alone, so that no sandbox is needed."""

    rewards = ("digits", "length")
    metrics = ("digits", "length")
    instructions = ""

    def __init__(self, settings, sandbox=None, data=None):
        self.limit = settings.length_limit

    def problems(self, split, count, seed):
        return [
            Problem(
                prompt=f"Write f(x): {split[0]} is {i}, plus {string.digits[i % 10]}\n", family="x"
            )
            for i in range(count)
        ]

    def score(self, problems, completions, lengths):
        digits = [sum(c.isdigit() for c in text) / 10 for text in completions]
        short = [float(length <= self.limit) for length in lengths]
        values = {"digits": digits, "length": short}
        return Scores(rewards=values, metrics=values)

    def environment(self):
        return {}

    def close(self):
        pass


RANGES = {"digits": (0.0, 2.4), "length": (0.0, 1.0)}
SHAPE = TaskInfo(ShapeTask, RANGES, {}, {}, "embedded", length_reward="length")


@pytest.fixture(autouse=True)
def shown(capfd):
    """Show the figures; vLLM also needs a standard output with a descriptor."""
    with capfd.disabled():
        print()
        yield


@pytest.fixture
def config(monkeypatch, tmp_path):
    """A configuration of the embedded policy whose completions vLLM samples."""
    monkeypatch.setitem(registry.TASKS, "shape", f"{__name__}:SHAPE")
    params = {name: info.default for name, info in PARAMETERS.items()}
    params |= {"reward_weights.digits": 1.0, "reward_weights.length": 1.0}
    params |= {"learning_rate": 1e-3, "group_size": 4}
    return TrialConfig(
        "shape",
        "embedded",
        0,
        params,
        TRAINING,
        Path(tmp_path),
        data=DataSettings(max_prompt_length=64),
        rollout=RolloutSettings(engine="vllm"),
    )


def compute_log_probabilities(model, prompt, completion):
    """Compute the log-probabilities of a completion's tokens by Transformers, [length]."""
    with torch.no_grad():
        tokens = torch.tensor([prompt + completion])
        logits = model(tokens).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]


def test_the_engine_follows_the_weights_only_through_the_sync(config):
    from accelerate import Accelerator
    from trl import GRPOConfig
    from trl.generation import vllm_generation as trl_vllm
    from vllm import SamplingParams

    from gdpo_tune.training import vllm_engine

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

    vllm_engine.ColocatedEngine(Trainer())
    prompt = tokenizer(PROMPT)["input_ids"]

    def difference():
        """Largest difference of log p over 4 samples of 24 tokens, in nats."""
        generation.llm.reset_prefix_cache()
        settings = [
            SamplingParams(temperature=1.0, seed=seed, max_tokens=24, logprobs=0, ignore_eos=True)
            for seed in range(4)
        ]
        inputs = [{"prompt_token_ids": prompt}] * 4
        worst = 0.0
        for output in generation.llm.generate(inputs, settings, use_tqdm=False):
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
def test_a_trial_samples_with_vllm_from_start_to_end(config, settings):
    from gdpo_tune.training import train, worker_cache

    reports = []
    try:
        config = replace(config, model=settings)
        outcome = train(config, resume=None, report=lambda m, _: reports.append(m))
    finally:
        worker_cache.release_worker_cache()
    for measurement in reports:
        mismatch = {n: x for n, x in measurement.metrics.items() if n.startswith("train/rollout/")}
        print(f"  step {measurement.step}:", ", ".join(f"{n} {x:.7f}" for n, x in mismatch.items()))
    print("  test:", ", ".join(f"{name} {one.mean:.4f}" for name, one in outcome.test.items()))
    assert [m.step for m in reports] == [1, 2]
    for measurement in reports:
        assert all(math.isfinite(value) for value in measurement.metrics.values())
        assert measurement.metrics["train/rollout/importance_ratio"] == pytest.approx(1, abs=1e-3)
        assert 0 < measurement.metrics["train/rollout/logp_difference_max"] < 1e-4
    for estimates in (outcome.validation, outcome.test):
        assert set(estimates) == {"digits", "length"}
        assert all(math.isfinite(one.mean) for one in estimates.values())
