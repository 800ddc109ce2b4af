"""A trial that runs out of memory fails, and its message names the settings to change."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import re
import threading

import psutil
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gdpo_tune.core.engines import NEWEST, VLLM
from gdpo_tune.core.errors import CrowdedGpuError, TrialFailure
from gdpo_tune.core.policy_shapes import PolicyShapes
from gdpo_tune.core.settings import ModelSettings, RolloutSettings
from gdpo_tune.policies.load_policy import load_policy, measure_policy
from gdpo_tune.training import distributed, memory, rollout, train, worker_cache
from gdpo_tune.training.memory import (
    MicroBatchLimit,
    choose_limit,
    estimate_memory,
    explain_out_of_memory,
    list_remedies,
)
from gdpo_tune.training.trainer import GDPOTrainer
from tests.support.training import build_trial_config, register_toy_task, write_policy

GIB = 2**30
CPU = "[enforce fail at alloc_cpu.cpp:119] . DefaultCPUAllocator: can't allocate memory: you tried"


@pytest.fixture
def config(tmp_path):
    return build_trial_config("embedded", tmp_path)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore"),
        RuntimeError(CPU),
        MemoryError(),
        ValueError("No available memory for the cache blocks. Try increasing"),
    ],
)
def test_out_of_memory_is_a_failure_that_names_settings(config, error):
    with pytest.raises(TrialFailure) as caught, explain_out_of_memory(config):
        raise error
    message = str(caught.value)
    start = "out of memory: lower training.completions_per_step (16), all of which are sampled at"
    assert message.startswith(start)
    assert "micro_batch_size" not in message, "those were halved down to a single completion"
    assert "training.max_completion_length (8)" in message
    assert "model.gradient_checkpointing: on" in message
    assert "\n" not in message
    assert caught.value.__cause__ is error


@pytest.fixture
def crowd(monkeypatch):
    """A stand-in for a GPU of 80 GiB; returns a setter of its free and the trial's own bytes."""

    def set_memory(free, own):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free * GIB, 80 * GIB))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: own * GIB)

    return set_memory


@pytest.mark.parametrize(
    ("share", "free", "own", "error"),
    [
        # A neighbour holds 59 GiB: more than its half.
        (0.5, 1, 20, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")),
        (0.5, 1, 3, ValueError("Free memory on device cuda:0 (1.0/80.0 GiB) on startup is less")),
        (0.5, 9, 3, ValueError("No available memory for the cache blocks. Try increasing")),
        (0.5, 9, 3, AssertionError("Error in memory profiling. Initial free memory 9 GiB")),
        (0.5, 0, 3, RuntimeError("CUDA error: out of memory")),
        (0.5, 0, 3, RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling")),
        # Another user's process, on a GPU that the trial has for itself.
        (1.0, 1, 20, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")),
    ],
)
def test_memory_that_others_hold_is_no_failure_of_the_trial(config, crowd, share, free, own, error):
    crowd(free, own)
    config = dataclasses.replace(config, gpu_share=share)
    expected = pytest.raises(CrowdedGpuError, match="trial's share of its GPU")
    with expected, explain_out_of_memory(config):
        raise error


@pytest.mark.parametrize(
    ("share", "free", "own", "tried"),
    [
        (0.5, 30, 38, "2.00 GiB"),
        (0.5, 30, 39, "600.00 MiB"),
        (0.5, 30, 39.49, "2.00 MiB"),  # torch takes a segment of 20 MiB for it
        (1.0, 1, 78, "4.00 GiB"),
    ],
)
def test_memory_above_the_trials_share_is_its_own_failure(config, crowd, share, free, own, tried):
    crowd(free, own)
    config = dataclasses.replace(config, gpu_share=share)
    with pytest.raises(TrialFailure, match="out of memory"), explain_out_of_memory(config):
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {tried}.")


def test_a_warm_up_of_vllm_above_the_trials_share_is_its_own_failure(config, crowd):
    crowd(30, 38)
    config = dataclasses.replace(config, gpu_share=0.5)
    inner = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    error = RuntimeError("CUDA out of memory occurred when warming up sampler")
    with pytest.raises(TrialFailure, match="out of memory"), explain_out_of_memory(config):
        raise error from inner


@pytest.mark.parametrize("error", [RuntimeError(CPU), MemoryError()])
def test_memory_of_the_machine_is_not_taken_for_that_of_a_gpu(config, crowd, error):
    crowd(1, 3)
    config = dataclasses.replace(config, gpu_share=0.5)
    with pytest.raises(TrialFailure, match="out of memory"), explain_out_of_memory(config):
        raise error


@pytest.mark.parametrize("error", [RuntimeError("shapes do not match"), ValueError("no")])
def test_another_error_passes(config, error):
    with pytest.raises(type(error), match=str(error)), explain_out_of_memory(config):
        raise error


@pytest.mark.parametrize(
    ("model", "third"),
    [
        (ModelSettings(), "model.gradient_checkpointing: on"),
        (ModelSettings(gradient_checkpointing="on"), "model.lora_rank: 16"),
        (ModelSettings(gradient_checkpointing="on", lora_rank=32), "lower model.lora_rank (32)"),
    ],
)
def test_the_last_setting_is_one_that_can_still_save_memory(config, model, third):
    assert third in list_remedies(dataclasses.replace(config, model=model))


@pytest.mark.parametrize(
    ("size", "first"),
    [
        ("auto", "set a smaller training.micro_batch_size (auto), or "),
        (4, "set a smaller training.micro_batch_size (4), or "),
        (1, "lower training.completions_per_step (16), all of which are sampled at once, or "),
    ],
)
def test_several_processes_keep_their_micro_batches(config, monkeypatch, size, first):
    monkeypatch.setattr(distributed, "count_processes", lambda: 2)
    training = config.training.replace(micro_batch_size=size)
    message = list_remedies(dataclasses.replace(config, training=training))
    assert message.startswith(first)
    assert message.count("completions_per_step") == 1


def test_with_vllm_its_share_is_named_and_not_the_batch_that_is_sampled(config, monkeypatch):
    monkeypatch.setattr("gdpo_tune.training.rollout.select_engine", lambda *_, **__: "vllm")
    settings = RolloutSettings(engine="vllm", vllm_memory_share=0.3)
    message = list_remedies(dataclasses.replace(config, rollout=settings))
    assert "vllm_memory_share (0.3)" in message
    assert "completions_per_step" not in message


def test_each_of_several_processes_has_an_engine(config, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(rollout, "find_vllm", lambda: VLLM(NEWEST, on_cpu=False))
    assert "vllm_memory_share" in list_remedies(config)
    monkeypatch.setattr(distributed, "count_processes", lambda: 2)
    assert "vllm_memory_share" in list_remedies(config)


def test_a_trial_that_runs_out_of_memory_fails_and_closes_its_cache(tmp_path, monkeypatch):
    register_toy_task(monkeypatch)
    policy = write_policy(tmp_path / "policy")

    def exhausted(self, *_, **__):
        raise RuntimeError(CPU)

    monkeypatch.setattr(GDPOTrainer, "compute_loss", exhausted)
    with pytest.raises(TrialFailure, match=r"out of memory: lower training\.completions_per_step"):
        train(build_trial_config(policy, tmp_path / "trial"), resume=None, report=lambda *_: None)
    assert worker_cache._cache is None


# Limits of micro-batches


def test_a_number_is_a_limit_of_completions(config):
    for size, expected in ((4, 4), (0, 16)):
        training = config.training.replace(micro_batch_size=size)
        limit = choose_limit(dataclasses.replace(config, training=training), load("embedded"))
        assert limit == MicroBatchLimit(expected)


def load(name):
    return load_policy(name)[0]


def test_on_a_CPU_a_fixed_amount_of_memory_limits_tokens(config, monkeypatch):
    model = load("embedded")
    assert choose_limit(config, model).size > config.training.completions_per_step * 64
    monkeypatch.setattr(memory, "CPU_ACTIVATIONS", 2**27)
    small = choose_limit(config, model)
    assert small.counts_tokens
    monkeypatch.setattr(memory, "CPU_ACTIVATIONS", 2**28)
    assert choose_limit(config, model).size == pytest.approx(2 * small.size, abs=1)
    monkeypatch.setattr(memory, "CPU_ACTIVATIONS", 1)
    longest = model.config.max_position_embeddings  # fewer than the data could fill
    assert choose_limit(config, model) == MicroBatchLimit(longest, counts_tokens=True)


def test_on_a_GPU_the_share_of_the_trial_limits_tokens(config, monkeypatch, crowd):
    crowd(80, 0)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setattr(memory, "MOST_TOKENS", 10**12)
    monkeypatch.setattr(rollout, "find_vllm", lambda: None)
    model = load("embedded")

    def choose(**changes):
        return choose_limit(dataclasses.replace(config, **changes), model).size

    whole, half = choose(), choose(gpu_share=0.5)
    assert whole / half == pytest.approx(2, rel=0.05)
    monkeypatch.setattr(rollout, "find_vllm", lambda: VLLM(NEWEST, on_cpu=False))
    beside_an_engine = choose(rollout=RolloutSettings(vllm_memory_share=0.5))
    assert beside_an_engine == pytest.approx(half, rel=0.05)
    monkeypatch.setattr(memory, "MOST_TOKENS", 2**16)
    assert choose() == 2**16


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "phi3", "opt", "gemma3"])
def test_the_size_of_other_architectures_is_known(config, family, tmp_path):
    """Phi-3 stores queries, keys and values as one tensor.

    Gemma 3 has a section without what is a default of its architecture, as on the Hub. The cache
    that the estimate states is what Transformers keeps of a token.
    """
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}
    if family in ("phi3", "gemma3"):
        sizes["num_key_value_heads"] = 2
    kind = AutoConfig.for_model(f"{family}_text" if family == "gemma3" else family, **sizes)
    kind.pad_token_id = kind.bos_token_id = kind.eos_token_id = 0
    model = AutoModelForCausalLM.from_config(kind)
    model.save_pretrained(tmp_path)
    if family == "gemma3":
        file = tmp_path / "config.json"
        kept = ("hidden_size", "intermediate_size", "num_hidden_layers")
        section = {key: json.loads(file.read_text())[key] for key in kept}
        file.write_text(json.dumps({"text_config": section}))
    layers = model(torch.tensor([[1]]), use_cache=True).past_key_values.layers
    kept = sum(layer.keys.numel() + layer.values.numel() for layer in layers)
    (inner,) = {
        max(each.shape) // (2 if name.endswith("gate_up_proj.weight") else 1)
        for name, each in model.named_parameters()
        if re.search(r"(c_fc|h_to_4h|gate_up_proj|gate_proj|fc1)\.weight$", name)
    }
    in_memory = estimate_memory(config, model).policy
    for shapes in (in_memory, measure_policy(str(tmp_path))):
        assert (shapes.layers, shapes.hidden_size, shapes.vocabulary) == (2, 64, 99)
        assert (shapes.kv_elements_per_token, shapes.intermediate_size) == (kept, inner)


def test_vllm_has_slots_for_experts_and_peft_leaves_them():
    """Of each expert vLLM holds factors of gate, up and down, of which Transformers has two stacks.

    Source: `FusedMoEWithLoRA.create_lora_weights` of vLLM 0.31, `Qwen3MoeExperts` of Transformers.
    """
    layer, hidden, inner, experts, rank = "model.layers.0.mlp.experts.", 64, 24, 4, 8
    embedding = {"model.embed_tokens.weight": (99, hidden)}
    stacked = {"gate_up_proj": (experts, 2 * inner, hidden), "down_proj": (experts, hidden, inner)}
    apart = {
        f"{number}.{half}_proj": (inner, hidden) for number in range(4) for half in ("gate", "up")
    }
    apart |= {f"{number}.down_proj": (hidden, inner) for number in range(4)}
    for tensors, end in ((stacked, ""), (apart, ".weight")):
        shapes = PolicyShapes(
            {**embedding, **{f"{layer}{name}{end}": shape for name, shape in tensors.items()}}
        )
        assert shapes.count_adapter_parameters(rank) == 0
        ends = 2 * rank * (99 + hidden)
        assert shapes.count_slot_parameters(rank) - ends == 3 * experts * rank * (inner + hidden)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc has it")
def test_what_a_thread_has_freed_goes_back_to_the_system():
    """Once a large block was freed, glibc takes smaller ones from heaps, and keeps these.

    Source: M_MMAP_THRESHOLD and malloc_trim in the manual pages mallopt(3) and malloc_trim(3).
    """
    process = psutil.Process()

    def work():
        del_me = torch.ones(7 << 20)
        del del_me
        blocks = [torch.ones(1 << 20) for _ in range(100)]
        kept.extend(torch.ones(1) for _ in range(100))
        del blocks
        kept.append(process.memory_info().rss)

    kept = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    memory.free_garbage()
    assert kept[-1] - process.memory_info().rss > 200 << 20
