"""A trial that runs out of memory fails, and its message names the settings to change."""

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
from gdpo_tune.training import distributed, memory, rollout
from gdpo_tune.training.memory import MicroBatchLimit, explain_out_of_memory, list_remedies
from tests.support.trials import build_trial

GIB = 2**30
CPU = RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried")
NO_CACHE = ValueError("No available memory for the cache blocks. Try increasing")


def lack(size="2.00 GiB", more=""):
    return torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size}.{more}")


@pytest.fixture
def config(tmp_path):
    return build_trial("embedded", tmp_path)


@pytest.fixture(scope="module")
def embedded():
    return load_policy("embedded")[0]


@pytest.mark.parametrize("error", [lack(more="\nmore"), CPU, MemoryError(), NO_CACHE])
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


WARM_UP = RuntimeError("CUDA out of memory occurred when warming up sampler")
WARM_UP.__cause__ = lack()
OTHERS = CrowdedGpuError, "trial's share of its GPU"
OWN = TrialFailure, "out of memory"


@pytest.mark.parametrize(
    ("share", "free", "own", "error", "expected"),
    [
        # A neighbour holds 59 GiB: more than its half.
        (0.5, 1, 20, lack(), OTHERS),
        (0.5, 1, 3, ValueError("Free memory on device cuda:0 (1.0/80.0 GiB) on startup"), OTHERS),
        (0.5, 9, 3, NO_CACHE, OTHERS),
        (0.5, 9, 3, AssertionError("Error in memory profiling. Initial free memory 9 GiB"), OTHERS),
        (0.5, 0, 3, RuntimeError("CUDA error: out of memory"), OTHERS),
        (0.5, 0, 3, RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), OTHERS),
        # Another user's process, on a GPU that the trial has for itself.
        (1.0, 1, 20, lack(), OTHERS),
        # Above the trial's share, of vLLM too, or memory of the machine.
        (0.5, 30, 38, lack(), OWN),
        (0.5, 30, 39, lack("600.00 MiB"), OWN),
        (0.5, 30, 39.49, lack("2.00 MiB"), OWN),  # torch takes a segment of 20 MiB for it
        (1.0, 1, 78, lack("4.00 GiB"), OWN),
        (0.5, 30, 38, WARM_UP, OWN),
        (0.5, 1, 3, CPU, OWN),
        (0.5, 1, 3, MemoryError(), OWN),
    ],
)
def test_memory_that_others_hold_is_no_failure_of_the_trial(
    config, crowd, share, free, own, error, expected
):
    crowd(free, own)
    config = dataclasses.replace(config, gpu_share=share)
    kind, message = expected
    with pytest.raises(kind, match=message), explain_out_of_memory(config):
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


@pytest.mark.parametrize("processes", [1, 2])  # each has an engine
def test_with_vllm_its_share_is_named_and_not_the_batch_that_is_sampled(
    config, monkeypatch, processes
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(rollout, "find_vllm", lambda: VLLM(NEWEST, on_cpu=False))
    monkeypatch.setattr(distributed, "count_processes", lambda: processes)
    settings = RolloutSettings(vllm_memory_share=0.3)
    message = list_remedies(dataclasses.replace(config, rollout=settings))
    assert "vllm_memory_share (0.3)" in message
    assert "completions_per_step" not in message


@pytest.fixture
def choose(config, embedded):
    """Return the limit of micro-batches of a trial."""

    def choose(**changes):
        return memory.choose_limit(dataclasses.replace(config, **changes), embedded)

    return choose


@pytest.mark.parametrize(("size", "expected"), [(4, 4), (0, 16)])
def test_a_number_is_a_limit_of_completions(config, choose, size, expected):
    training = config.training.replace(micro_batch_size=size)
    assert choose(training=training) == MicroBatchLimit(expected)


def test_on_a_CPU_a_fixed_amount_of_memory_limits_tokens(config, choose, embedded, monkeypatch):
    assert choose().size > config.training.completions_per_step * 64
    monkeypatch.setattr(memory, "CPU_ACTIVATIONS", 2**27)
    small = choose()
    assert small.counts_tokens
    monkeypatch.setattr(memory, "CPU_ACTIVATIONS", 2**28)
    assert choose().size == pytest.approx(2 * small.size, abs=1)
    monkeypatch.setattr(memory, "CPU_ACTIVATIONS", 1)
    longest = embedded.config.max_position_embeddings  # fewer than the data could fill
    assert choose() == MicroBatchLimit(longest, counts_tokens=True)


def test_on_a_GPU_the_share_of_the_trial_limits_tokens(choose, monkeypatch, crowd):
    crowd(80, 0)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setattr(memory, "MOST_TOKENS", 10**12)
    monkeypatch.setattr(rollout, "find_vllm", lambda: None)
    whole, half = choose().size, choose(gpu_share=0.5).size
    assert whole / half == pytest.approx(2, rel=0.05)
    monkeypatch.setattr(rollout, "find_vllm", lambda: VLLM(NEWEST, on_cpu=False))
    beside_an_engine = choose(rollout=RolloutSettings(vllm_memory_share=0.5)).size
    assert beside_an_engine == pytest.approx(half, rel=0.05)
    monkeypatch.setattr(memory, "MOST_TOKENS", 2**16)
    assert choose().size == 2**16


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
    in_memory = memory.estimate_memory(config, model).policy
    for shapes in (in_memory, measure_policy(str(tmp_path))):
        assert (shapes.layers, shapes.hidden_size, shapes.vocabulary) == (2, 64, 99)
        assert (shapes.kv_elements_per_token, shapes.intermediate_size) == (kept, inner)


def test_vllm_has_slots_for_experts_and_peft_leaves_them():
    """Of each expert vLLM holds factors of gate, up and down, of which Transformers has two stacks.

    Source: `FusedMoEWithLoRA.create_lora_weights` of vLLM 0.31, `Qwen3MoeExperts` of Transformers.
    """
    layer, hidden, inner, experts, rank = "model.layers.0.mlp.experts.", 64, 24, 4, 8
    stacked = {"gate_up_proj": (experts, 2 * inner, hidden), "down_proj": (experts, hidden, inner)}
    one = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    apart = {f"{i}.{name}.weight": shape for i in range(experts) for name, shape in one.items()}
    for tensors in (stacked, apart):
        shapes = {f"{layer}{name}": shape for name, shape in tensors.items()}
        shapes = PolicyShapes({"model.embed_tokens.weight": (99, hidden), **shapes})
        assert shapes.count_adapter_parameters(rank) == 0
        ends = 2 * rank * (99 + hidden)
        assert shapes.count_slot_parameters(rank) - ends == 3 * experts * rank * (inner + hidden)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc has it")
def test_what_a_thread_has_freed_goes_back_to_the_system():
    """Once a large block was freed, glibc takes smaller ones from heaps, and keeps these.

    Source: M_MMAP_THRESHOLD and malloc_trim in the manual pages mallopt(3) and malloc_trim(3).
    """
    process, kept = psutil.Process(), []

    def work():
        del_me = torch.ones(7 << 20)
        del del_me
        blocks = [torch.ones(1 << 20) for _ in range(100)]
        kept.extend(torch.ones(1) for _ in range(100))
        del blocks
        kept.append(process.memory_info().rss)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    memory.free_garbage()
    assert kept[-1] - process.memory_info().rss > 200 << 20
