"""The estimate of a trial's memory, in closed forms of a policy's shapes, and its dry run."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from gdpo_tune.core.engines import VLLM
from gdpo_tune.core.errors import ResourcesError
from gdpo_tune.core.gpu_memory import GIB, LOGITS_BYTES
from gdpo_tune.core.policy_shapes import PolicyShapes, find_known_size
from gdpo_tune.core.text import format_bytes
from gdpo_tune.spec import gpu
from gdpo_tune.spec.dry_run import render_dry_run
from gdpo_tune.spec.gpu import check_gpu_share, measure_trial, read_device_memory

WIDTH, VOCABULARY, LAYERS = 64, 1000, 4
LAYER, EMBEDDING = WIDTH * WIDTH, WIDTH * VOCABULARY
SIZE = PolicyShapes(
    {
        "model.embed_tokens.weight": (VOCABULARY, WIDTH),
        **{f"model.layers.{i}.mlp.gate_proj.weight": (WIDTH, WIDTH) for i in range(LAYERS)},
    },
    {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": WIDTH},
)
NUMBERS = EMBEDDING + LAYERS * LAYER


@pytest.fixture(autouse=True)
def with_vllm(monkeypatch):
    monkeypatch.setattr(gpu, "find_vllm", lambda: VLLM("0.31.0", on_cpu=False))


def add_adapters(spec, rank=8):
    return spec.replace(model=spec.model.replace(lora_rank=rank))  # peft may be missing


def divide(spec, workers, sharding="full"):
    changes = {"workers": workers, "sharding": sharding, "gpus": 1.0}
    return spec.replace(resources=spec.resources.replace(**changes))


def measure(spec, policy=SIZE):
    return measure_trial(spec, policy)


def test_moments_of_8_bits_take_2_bytes(load):
    spec = load()
    small = spec.replace(training=spec.training.replace(optimizer="adamw_8bit"))
    assert measure(spec).weights - measure(small).weights == 6 * NUMBERS
    assert small.compute_identity() != spec.compute_identity()


def test_numbers_outside_of_layers_are_those_of_embedding_and_head():
    assert SIZE.parameters_outside_layers == EMBEDDING
    assert PolicyShapes({"all": (7, 3)}).parameters_outside_layers == 21


def test_shards_divide_what_lasts_and_a_step_gathers_layers(load):
    spec = load("space.beta=0.1")
    whole, part = (measure(divide(spec, 4, kind)) for kind in ("none", "full"))
    assert (whole.weights, part.weights) == (12 * NUMBERS, 3 * NUMBERS)
    assert (whole.gradients, part.gradients) == (2 * 4 * NUMBERS, NUMBERS)
    assert (whole.reference, part.reference) == (4 * NUMBERS, NUMBERS)
    assert whole.copies == 2 * NUMBERS
    # Weights in bfloat16; of layers gradients too, and their sums in 32 bits.
    assert part.copies == 2 * (EMBEDDING + 2 * LAYER) + (2 + 4) * 2 * LAYER
    assert part.total == part.least + 2 * EMBEDDING + LOGITS_BYTES + part.activations


def test_transformers_samples_with_all_of_a_divided_policy(load):
    size = find_known_size("Qwen/Qwen2.5-7B")
    spec = divide(load("rollout.engine=transformers"), 64)
    memory = measure(spec, size)
    assert memory.least == memory.at_rest + 2 * size.parameters
    with_engine = measure(divide(load("rollout.engine=vllm"), 64), size)
    assert with_engine.least == memory.at_rest + memory.gradients + memory.copies < memory.least


def test_shards_of_adapters_gather_the_frozen_weights_alone(load):
    adapters = 8 * LAYERS * 2 * WIDTH
    part = measure(divide(add_adapters(load("space.beta=0.1")), 4))
    assert part.weights == (2 * NUMBERS + 12 * adapters) // 4
    assert part.gradients == adapters
    assert part.copies == 2 * (EMBEDDING + 2 * LAYER)
    assert part.reference == 0


def test_workers_share_the_completions_of_a_step(load):
    spec = load("training.completions_per_step=64", "training.micro_batch_size=0")
    one, four = (measure(divide(spec, count, "none")) for count in (1, 4))
    assert one.activations == 4 * four.activations
    assert one.engine.workspace - four.engine.workspace == 16 * VOCABULARY * 48
    assert one.engine.weights == four.engine.weights


def test_a_micro_batch_has_each_prompt_once_unless_it_is_padded(load):
    step = ("training.completions_per_step=64", "space.group_size=[4, 8]")

    def count(*overrides):
        return measure(load(*step, *overrides)).micro_batch

    size = "training.micro_batch_size="
    assert count() == count(size + "8") == (1, 8), "of the largest group"
    assert count(size + "12") == (2, 12)
    assert count(size + "0") == count(size + "99") == (8, 64)
    # Of a mini-batch, which is drawn at random, a prompt may have a single completion.
    assert count("training.mini_batch_size=16") == count("model.shared_prompts=off") == (8, 8)


def test_recomputation_keeps_a_hidden_state_for_each_layer(load):
    spec = load()
    layer = 2 * (5 * WIDTH + 12 * WIDTH) + 6 * 4 * WIDTH
    assert measure(spec).position_bytes == LAYERS * 4 * WIDTH + layer
    kept = replace(measure(spec), recomputes=False)
    assert kept.position_bytes == LAYERS * (2 * 13 * WIDTH + 16 * WIDTH) + layer


def test_an_engine_that_sleeps_leaves_a_step_all_but_its_workspace(load):
    awake = measure(load("resources.gpus=1"))
    asleep = measure(load("resources.gpus=1", "rollout.sleep=true"))
    share, engine = asleep.config.rollout.vllm_memory_share, asleep.engine
    assert awake.get_trainer_room(100) == 100 * (1 - share)
    assert asleep.get_trainer_room(10**12) == 10**12 - engine.workspace
    assert replace(awake, has_engine=False).get_trainer_room(100) == 100
    assert awake.least_room == max(awake.least / (1 - share), engine.least / share)
    step, sampling = asleep.least + engine.workspace, asleep.at_rest / (1 - share)
    assert asleep.least_room == max(step, sampling, engine.least / share)


MORE = "a GPU with more memory"
RANK = "train adapters: --set model.lora_rank=16"
SLEEP = "let vLLM sleep during a step: --set rollout.sleep=true"
SHARE = "divide it otherwise: --set rollout.vllm_memory_share="
WORKERS = "divide the policy: --set resources.workers={}, each with a GPU"
ALONE = "rollout.engine=transformers"


@pytest.mark.parametrize(
    ("overrides", "size", "gibibytes", "remedies"),
    [
        (["gpus: 1", "space.beta=0"], 1.5, 47,
         [MORE, f"{SHARE}0.13", SLEEP, RANK, WORKERS.format(2)]),
        (["gpus: 1", "space.beta=0"], 1.5, 8, [MORE]),
        (["gpus: 1", "space.beta=0.1"], 7, 80, [MORE, RANK, WORKERS.format(4)]),
        (["gpus: 0.5", "space.beta=0.1"], 1.5, 80,
         ["--set resources.gpus=0.74", f"{SHARE}0.11", RANK]),
        (["gpus: 1", "space.beta=0.1", ALONE], 1.5, 30,
         [MORE, "do without the reference policy: --set space.beta=0", RANK, WORKERS.format(2)]),
        (["gpus: 1, workers: 2", ALONE], 7, 40, [MORE, RANK, WORKERS.format(4)]),
        (["gpus: 1, sharding: none", ALONE], 7, 40, [MORE, RANK]),
        (["gpus: 1", "rollout.vllm_memory_share=0.9"], 1.5, 80,
         [MORE, f"{SHARE}0.13", RANK, WORKERS.format(4)]),
    ],
)  # fmt: skip
def test_a_refusal_proposes_what_suffices(load, overrides, size, gibibytes, remedies):
    resources, *others = overrides
    policy = find_known_size(f"Qwen/Qwen2.5-{size}B")
    spec = load(f"resources={{{resources}}}", *others)
    with pytest.raises(ResourcesError) as caught:
        check_gpu_share(spec, policy, gibibytes * GIB)
    problem, _, fix = str(caught.value).partition("\n    fix: ")
    assert fix == ", or ".join(remedies)
    memory = measure(spec, policy)
    states = format_bytes(memory.weights + memory.gradients)
    assert f"({states} for weights, gradients and moments, " in problem
    assert (
        f"takes at least {math.ceil(100 * memory.least_room / gibibytes / GIB) / 100:g} of"
        in problem
    )


def test_what_a_failing_tool_prints_is_not_read(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 81920, Disabled\nexit 9\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert read_device_memory() is None


def read_memory_line(spec, size=SIZE):
    text = render_dry_run(spec, size)
    return next((line for line in text.splitlines() if line.startswith("# GPU memory")), None)


def test_a_dry_run_states_the_memory_of_a_trial_with_a_gpu(load):
    assert read_memory_line(load()) is None
    on_gpu = "resources.gpus=1"
    assert "until the policy is on this machine" in read_memory_line(load(on_gpu), None)
    alone = read_memory_line(load(on_gpu, "rollout.engine=transformers"))
    parts = r"[\d.]+ [MG]B of weights, gradients, moments and reference, [\d.]+ [kMG]B of activ"
    assert re.search(rf"memory: about [\d.]+ [MG]B to train: {parts}ations$", alone)
    several = load(on_gpu, "resources.workers=2", "rollout.engine=transformers")
    assert "to train on each of 2 GPUs, with 1/2 of the policy" in read_memory_line(several)


def test_a_dry_run_says_what_a_sleeping_engine_keeps(load):
    spec = load("resources.gpus=1", "rollout.sleep=true")
    least, kept = map(format_bytes, (measure(spec).engine.least, measure(spec).engine.workspace))
    shown = f"; at least {least} for vLLM, of which {kept} stay while it sleeps"
    assert read_memory_line(spec).endswith(shown)
