"""Memory of trials in one process or several, in closed forms of a policy's shapes."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from gdpo_tune.core.engines import VLLM
from gdpo_tune.core.gpu_memory import GIB
from gdpo_tune.core.policy_shapes import PolicyShapes, find_known_size
from gdpo_tune.core.settings import ModelSettings
from gdpo_tune.core.text import format_bytes
from gdpo_tune.spec import gpu, gpu_reference, load_spec
from gdpo_tune.spec.dry_run import render_dry_run
from gdpo_tune.spec.gpu import list_gpu_remedies, measure_trial
from tests.support.paths import ROOT

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
    return spec.model_copy(update={"model": ModelSettings(lora_rank=rank)})  # peft may be missing


def measure(spec, policy=SIZE, **changes):
    return replace(measure_trial(spec, policy), **changes)


def test_a_file_says_how_its_memory_is_spread(load):
    spec = load("resources={workers: 4, cpus: 1, gpus: 1}")
    memory = measure(spec)
    assert (memory.workers, memory.shards, memory.moment_bytes) == (4, 4, 8)
    assert measure(load("resources={workers: 4, sharding: none}")).shards == 1
    training = spec.training.replace(optimizer="adamw_8bit")
    small = spec.model_copy(update={"training": training})  # torchao may be missing
    assert measure(small) == replace(memory, moment_bytes=2)
    assert small.compute_identity() != spec.compute_identity()


def test_numbers_outside_of_layers_are_those_of_embedding_and_head():
    assert SIZE.parameters_outside_layers == EMBEDDING
    assert PolicyShapes({"all": (7, 3)}).parameters_outside_layers == 21


def test_shards_divide_what_lasts_and_a_step_gathers_layers(load):
    spec = load("space.beta=0.1")
    whole, part = (measure(spec, workers=4, shards=shards) for shards in (1, 4))
    assert whole.weights == 12 * NUMBERS
    assert part.weights == 3 * NUMBERS
    assert (whole.gradients, part.gradients) == (2 * 4 * NUMBERS, NUMBERS)
    assert (whole.reference, part.reference) == (4 * NUMBERS, NUMBERS)
    assert whole.compute_copies == 2 * NUMBERS
    # Weights in bfloat16; of layers gradients too, and their sums in 32 bits.
    assert part.compute_copies == 2 * (EMBEDDING + 2 * LAYER) + (2 + 4) * 2 * LAYER
    # In the end both of the embedding, and as it is the head, a second gradient of it.
    assert part.last_gradients == (2 + 2 + 4) * EMBEDDING + 2 * EMBEDDING
    assert whole.last_gradients == 2 * 4 * EMBEDDING
    assert part.full_policy == 0
    # Between layers, and six times in one, hidden states have 16 bits instead of 32.
    saved = 2 * (LAYERS + 6) * WIDTH * part.positions
    assert whole.activations - part.activations == saved > 0


def test_transformers_samples_with_all_of_a_divided_policy(load):
    spec = load("rollout.engine=transformers", "training.micro_batch_size=1")
    two, many = (measure(spec, workers=count, shards=count) for count in (2, 64))
    assert two.full_policy == GIB // 2 + 6 * NUMBERS + 2 * NUMBERS
    assert many.full_policy == GIB // 2 + 4 * NUMBERS  # the untrained policy, in each process
    large = measure(spec, find_known_size("Qwen/Qwen2.5-7B"), workers=64, shards=64)
    step = max(large.compute_copies, large.last_gradients)
    assert large.least == large.full_policy > large.at_rest + large.gradients + step
    assert measure(spec, workers=2, shards=1).full_policy == 0


def test_shards_of_adapters_gather_the_frozen_weights_alone(load):
    spec = add_adapters(load())
    adapters = 8 * LAYERS * 2 * WIDTH
    part = measure(spec, workers=4, shards=4)
    assert part.weights == (2 * NUMBERS + 12 * adapters) // 4
    assert part.gradients == adapters
    assert part.compute_copies == 2 * (EMBEDDING + 2 * LAYER)


def test_workers_share_the_completions_of_a_step(load):
    spec = load("training.completions_per_step=64", "training.micro_batch_size=0")
    one, four = (measure(spec, workers=count, shards=1) for count in (1, 4))
    assert one.activations == 4 * four.activations
    assert one.engine.workspace - four.engine.workspace == 16 * VOCABULARY * 48
    assert one.engine.weights == four.engine.weights


def test_a_micro_batch_has_each_prompt_once_unless_it_is_padded(load):
    step = ("training.completions_per_step=64", "space.group_size=[4, 8]")
    prompt, tokens = load().data.max_prompt_length, load().training.max_completion_length

    def count(*overrides):
        return measure(load(*step, *overrides)).positions

    size = "training.micro_batch_size="
    assert count() == count(size + "8") == prompt + 8 * tokens, "of the largest group"
    assert count(size + "12") == 2 * prompt + 12 * tokens
    assert count(size + "0") == count(size + "99") == 8 * prompt + 64 * tokens
    # Of a mini-batch, which is drawn at random, a prompt may have a single completion.
    assert count("training.mini_batch_size=16") == 8 * (prompt + tokens)
    assert count("model.shared_prompts=off") == 8 * (prompt + tokens)


def test_the_room_of_a_trainer_is_what_its_engine_leaves(load):
    memory = measure(load("resources.gpus=1"))
    assert memory.get_trainer_room(100) == 100 * (1 - memory.engine_share)
    asleep = replace(memory, sleeps=True)
    assert asleep.get_trainer_room(10**12) == 10**12 - asleep.engine.workspace
    assert replace(memory, engine_share=0.0).get_trainer_room(100) == 100


def test_copies_are_gone_when_the_head_has_its_gradient_unless_autograd_keeps_them(load):
    spec = load("training.micro_batch_size=1", "rollout.engine=transformers")
    kept = measure(spec, recomputes=False)
    memory = measure(spec)
    at_rest = memory.at_rest + memory.gradients
    assert memory.compute_copies < memory.head
    assert memory.total == at_rest + memory.head + memory.activations
    assert kept.total == at_rest + kept.head + kept.activations + kept.compute_copies


def test_moments_of_8_bits_take_2_bytes(load):
    usual, small = (measure(load(), moment_bytes=count) for count in (8, 2))
    assert usual.weights - small.weights == 6 * NUMBERS


def test_an_engine_that_sleeps_leaves_a_step_all_but_its_workspace(load):
    awake, asleep = load("resources.gpus=1"), load("resources.gpus=1", "rollout.sleep=true")
    trainer, engine = measure(asleep), measure(asleep).engine
    share = asleep.rollout.vllm_memory_share
    step, sampling = trainer.total + engine.workspace, trainer.at_rest / (1 - share)
    room = int(max(step, sampling, engine.least / share)) + 2
    assert trainer.fits(room)
    assert not trainer.fits(room - 4)
    assert not measure(awake).fits(room)
    assert trainer.least_room == pytest.approx(
        max(trainer.least + engine.workspace, sampling, engine.least / share)
    )


def test_a_policy_that_fits_beside_a_sleeping_engine_gets_that_advice(load):
    size = find_known_size("Qwen/Qwen2.5-1.5B")
    spec = load("resources.gpus=1", "space.beta=0", "model.dtype=bfloat16")
    memory = measure(spec, size)
    device = next(n * GIB for n in range(200, 10, -1) if n * GIB < memory.least_room)
    assert any("rollout.sleep=true" in one for one in list_gpu_remedies(spec, memory, device))
    assert not any("rollout.sleep=true" in one for one in list_gpu_remedies(spec, memory, 8 * GIB))


@pytest.mark.parametrize(
    ("policy", "rank", "device", "gpus"),
    [
        ("Qwen/Qwen2.5-7B", 0, "A100 or H100, 80 GB", 8),
        ("Qwen/Qwen2.5-14B", 32, "A100 or H100, 80 GB", 1),
        ("Qwen/Qwen3-0.6B", 0, "A10, 24 GB", 1),
    ],
)
def test_policies_that_the_page_promises_fit(policy, rank, device, gpus):
    base = load_spec(ROOT / "search_spaces" / "math_qwen.yaml", to_run=False)
    spec = base.replace(model=base.model.replace(lora_rank=rank))
    size, memory = find_known_size(policy), gpu_reference.DEVICES[device]
    spread = measure(spec, size, workers=gpus, shards=gpus)
    for moments in (8, 2):
        assert gpu_reference.find_share(replace(spread, moment_bytes=moments), memory)
    assert not gpu_reference.find_share(spread, memory // 8)


def test_the_cell_of_a_table_says_what_8_bit_moments_save(load, monkeypatch):
    memory = measure(load(), find_known_size("Qwen/Qwen2.5-1.5B"))
    needed = {8: 4, 2: 4}

    def find_share(asked, device):
        return needed[asked.moment_bytes] and asked.shards >= needed[asked.moment_bytes]

    monkeypatch.setattr(gpu_reference, "find_share", find_share)
    assert gpu_reference.count_gpus(memory, GIB) == "4"
    needed[2] = 2
    assert gpu_reference.count_gpus(memory, GIB) == "4, or 2 (8 bits)"
    needed[8] = 0
    assert gpu_reference.count_gpus(memory, GIB) == "2 (8 bits)"
    needed[2] = 0
    assert gpu_reference.count_gpus(memory, GIB) == "none"


def read_memory_line(spec):
    text = render_dry_run(spec, SIZE)
    return next(line for line in text.splitlines() if line.startswith("# GPU memory"))


def test_a_dry_run_says_for_how_many_gpus_memory_is_computed(load):
    on_gpu = "resources.gpus=1"
    assert re.search(r"[\d.]+ [MG]B to train, computed, and", read_memory_line(load(on_gpu)))
    several = load(on_gpu, "resources.workers=2", "rollout.engine=transformers")
    assert "to train on each of 2 GPUs, with " in read_memory_line(several)


def test_a_dry_run_adds_what_a_sleeping_engine_keeps_to_a_step(load):
    spec = load("resources.gpus=1", "rollout.sleep=true")
    trainer, engine = measure(spec), measure(spec).engine
    step, kept, at_rest, least = map(
        format_bytes,
        (trainer.total + engine.workspace, engine.workspace, trainer.at_rest, engine.least),
    )
    assert read_memory_line(spec).startswith(
        f"# GPU memory: {step} to train, computed, {kept} of it for vLLM asleep; "
        f"while it samples, {at_rest}, and {least} for vLLM"
    )
