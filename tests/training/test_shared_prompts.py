"""Each prompt once: the same numbers as the padded batch, for many architectures."""

import re
import sys
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from gdpo_tune.core.settings import ModelSettings
from gdpo_tune.training import micro_batches, shared_prompts
from gdpo_tune.training.decoding import Decoding
from gdpo_tune.training.lora import build_adapter_config
from gdpo_tune.training.rollout import sample_from_cache
from gdpo_tune.training.shared_prompts import compute_group_log_probs, find_obstacle
from gdpo_tune.training.trainer import GDPOTrainer
from tests.support.training import build_plain_trainer, write_gpt2

SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = {"sliding_window": 8}
"""Shorter than a prompt, and shorter than a prompt with its completion."""
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
OTHERS = "llama qwen2 qwen3 gemma3_text phi3 olmo2 smollm3 glm4 cohere starcoder2 gpt_neox"
KINDS: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in OTHERS.split()},
    **{f"{kind} window": WINDOW for kind in ("mistral", "gemma3_text", "cohere2")},
    "mistral": {"sliding_window": None},
    "qwen2 window": {**WINDOW, "use_sliding_window": True, "max_window_layers": 0},
    "granite": {"logits_scaling": 3.0},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, **NO_DROPOUT},
}
QUICK = ("llama", "qwen3", "mistral window", "gemma3_text window", "qwen3_moe", "gpt2")
PROMPTS, COMPLETIONS = (13, 20), (5, 14, 9, 1)


def build_model(kind: str, **changes: Any) -> Any:
    """Build a random model of a kind, with TRL's head."""
    name, _, _ = kind.partition(" ")
    settings = {**SIZES, **KINDS.get(kind, {}), **changes}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **settings)).float()
    add_fused_lm_head(model, temperature=0.8, outputs=("log_probs", "entropy"))
    return model.train()


def draw_batch() -> tuple[torch.Tensor, torch.Tensor, int]:
    """Draw padded completions of two prompts, and the width of the completions."""
    generator = torch.Generator().manual_seed(1)
    left, right = max(PROMPTS), max(COMPLETIONS)
    rows = []
    for count in PROMPTS:
        prompt = torch.randint(3, 99, (count,), generator=generator)
        for length in COMPLETIONS:
            row = torch.zeros(left + right, dtype=torch.long)
            row[left - count : left] = prompt
            row[left : left + length] = torch.randint(3, 99, (length,), generator=generator)
            rows.append(row)
    ids = torch.stack(rows)
    return ids, (ids != 0).long(), right


def compute_padded(model: Any, ids: torch.Tensor, mask: torch.Tensor, width: int) -> Any:
    """Compute as TRL does, with positions that begin at the first token of a prompt."""
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :-width] = -100
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    output = model(**inputs, labels=labels, fused_lm_head=True)
    return output.log_probs[:, -width:], output.entropy[:, -width:]


def measure(model: Any, function: Any) -> list[torch.Tensor]:
    """Compute log-probabilities, entropies, and the gradients of a loss that weighs both."""
    model.zero_grad()
    log_probs, entropies = function(model, *draw_batch())[:2]
    weights = torch.linspace(-1, 1, log_probs.numel()).view_as(log_probs)
    (weights * (log_probs + 0.1 * entropies)).sum().backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return [log_probs.detach(), entropies.detach(), torch.cat(gradients)]


def assert_equal(model: Any) -> None:
    expected = measure(model, compute_padded)
    for _ in range(2):  # a model may be enabled for several trials
        shared_prompts.enable(model.get_base_model() if hasattr(model, "peft_config") else model)
    found = measure(model, compute_group_log_probs)
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs.norm() > 1e-3
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
    again = measure(model, compute_padded)
    assert all(map(torch.equal, again, expected)), "nothing else has changed"


@pytest.mark.parametrize(
    "kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in KINDS]
)
def test_shared_prompts_give_the_numbers_of_the_padded_batch(kind):
    model = build_model(kind)
    assert find_obstacle(model) == ""
    assert_equal(model)


@pytest.mark.parametrize("kind", ["llama", "mistral window", "gpt2"])
def test_a_kernel_for_texts_of_different_lengths_gives_them_too(kind, monkeypatch):
    model = build_model(kind)
    monkeypatch.setattr(shared_prompts, "_has_kernel", lambda *_: True)
    monkeypatch.setattr(shared_prompts, "varlen_attn", attend_to_texts)
    assert_equal(model)


def attend_to_texts(query, key, value, starts, key_starts, most, most_keys, **options):
    """Compute what torch documents of `varlen_attn`, whose kernels are those of GPUs."""
    counts, key_counts = starts.diff().tolist(), key_starts.diff().tolist()
    assert (most, most_keys) == (max(counts), max(key_counts))
    left, right = options["window_size"]
    found = []
    for asked, keys, values in zip(
        query.split(counts), key.split(key_counts), value.split(key_counts), strict=True
    ):
        # The last token of a text asks last: https://github.com/Dao-AILab/flash-attention
        place = torch.arange(len(asked))[:, None] + len(keys) - len(asked)
        other = torch.arange(len(keys))[None]
        mask = (other <= place + right) & ((left < 0) | (other >= place - left))
        texts = (each.transpose(0, 1)[None] for each in (asked, keys, values))
        more = {"attn_mask": mask, "scale": options["scale"], "enable_gqa": True}
        found.append(scaled_dot_product_attention(*texts, **more)[0].transpose(0, 1))
    return torch.cat(found)


@pytest.mark.parametrize("kind", ["llama", "qwen2 window", "gpt2"])
def test_a_chosen_attention_computes_all_but_shared_prompts(kind, monkeypatch):
    """Layers that a backward pass computes again have the attention of their forward pass."""
    model = build_model(kind, attn_implementation="eager")
    module = sys.modules[type(model).__module__]
    calls, plain = [], module.eager_attention_forward

    def count(*arguments, **keywords):
        calls.append(1)
        return plain(*arguments, **keywords)

    monkeypatch.setattr(module, "eager_attention_forward", count)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert find_obstacle(model) == ""
    assert_equal(model)
    layers = model.config.num_hidden_layers
    assert len(calls) == 2 * 2 * layers, "two padded batches, each layer twice"
    prompts = [[5, 6, 7], [8, 9]]
    decoding = Decoding(6, None, (2,), 0)
    del calls[:]
    found = sample_from_cache(model.eval(), prompts, decoding)
    assert len(calls) == layers, "prompts are read by it, completions are not"
    assert sample_from_cache(build_model(kind).eval(), prompts, decoding) == found
    assert "eager" not in model.config.to_json_string()


def test_a_window_is_seen():
    """Without it the numbers differ, so the comparison above can fail."""
    wide, narrow = (build_model("mistral", sliding_window=size) for size in (None, 8))
    narrow.load_state_dict(wide.state_dict())
    found = []
    for model in (wide, narrow):
        shared_prompts.enable(model)
        found.append(compute_group_log_probs(model, *draw_batch())[0])
    assert (found[0] - found[1]).abs().max() > 0.01


@pytest.mark.parametrize("adapter", [False, True])
def test_recomputation_and_adapters_change_nothing(adapter):
    model = build_model("llama")
    if adapter:
        peft = pytest.importorskip("peft")
        settings = build_adapter_config(model, ModelSettings(lora_rank=2), "")
        model = peft.get_peft_model(model, settings)
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1)
        model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_equal(model)


def test_a_row_has_each_prompt_once_and_no_padding():
    ids, mask, width = draw_batch()
    row = shared_prompts.build_row(ids, mask, width)
    assert len(row.tokens) == sum(PROMPTS) + 2 * sum(COMPLETIONS)
    assert len(row.groups) == 2
    assert len(row.targets) == 2 * sum(COMPLETIONS)
    flat = ids[:, -width:].reshape(-1)
    assert torch.equal(flat[row.slots], row.targets)


def test_an_empty_completion_is_0():
    ids, mask, width = draw_batch()
    ids[0, -width:] = mask[0, -width:] = 0
    model = build_model("llama")
    shared_prompts.enable(model)
    log_probs, _, _ = compute_group_log_probs(model, ids, mask, width)
    assert not log_probs[0].any()
    assert torch.isfinite(log_probs).all()


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("gemma2", {}, "soft cap|attention is eager"),  # from Transformers 5.24 on
        ("gpt_oss", {"num_local_experts": 4}, "eager"),
        ("bloom", {"n_head": 4, "n_layer": 2}, "cannot be replaced"),
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv", "full_attention"]}, "conv"),
    ],
)
def test_what_the_attention_does_not_compute_is_refused(kind, changes, reason):
    config = AutoConfig.for_model(kind, **SIZES, **changes)
    assert re.search(reason, find_obstacle(AutoModelForCausalLM.from_config(config)))


@pytest.fixture
def build_trainer(tmp_path):
    policy = write_gpt2(tmp_path / "policy")

    def build(**changes):
        own = {"cls": GDPOTrainer, "normalization": "gdpo"}
        return build_plain_trainer(policy, tmp_path, **own, **changes)

    return build


def test_a_policy_that_cannot_share_is_padded_or_refused(build_trainer, monkeypatch):
    assert build_trainer().unshared == ""
    monkeypatch.setattr(micro_batches, "find_obstacle", lambda model: "it is recurrent")
    assert build_trainer().unshared == "it is recurrent"


def test_attention_that_nobody_knew_of_is_padded(build_trainer, monkeypatch):
    def refuse(*_):
        raise shared_prompts.UnknownAttentionError("its attention has sinks")

    monkeypatch.setattr(shared_prompts, "_attend_to_last", refuse)
    ids, mask, width = draw_batch()
    ids = torch.where(mask.bool(), ids % 20 + 3, 0)
    trainer, padded = build_trainer(), build_trainer(shared_prompts="off")
    found, expected = (
        each._compute_log_probs(each.model, ids, mask, width)[0] for each in (trainer, padded)
    )
    assert trainer.unshared == "its attention has sinks"
    present = mask[:, -width:].bool()
    torch.testing.assert_close(found[present], expected[present])
