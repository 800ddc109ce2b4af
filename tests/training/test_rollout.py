"""The samplers against Transformers' `generate`, and the packed pass against TRL's."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from gdpo_tune.policies.load_policy import load_policy
from gdpo_tune.training import fast_cpu, rollout
from gdpo_tune.training.decoding import Decoding
from gdpo_tune.training.fast_cpu import is_small_llama
from gdpo_tune.training.rollout import generate, sample_for_trainer
from gdpo_tune.training.trainer import GDPOTrainer
from tests.support.training import build_plain_trainer, score_constantly

ENDS = (1, 7)
PAD = 0


def tiny_llama(**changes) -> LlamaForCausalLM:
    settings = {
        "vocab_size": 41,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "pad_token_id": PAD,
        "eos_token_id": 1,
        **changes,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**settings)).eval()


def random_prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 12, (count,), generator=generator).tolist()
    return [torch.randint(2, 41, (n,), generator=generator).tolist() for n in lengths]


def reference(model, prompts, tokens: int = 24) -> list[list[int]]:
    """Generate one row at a time, without padding or batching."""
    rows = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=tokens,
            eos_token_id=list(ENDS),
            pad_token_id=PAD,
        )
        rows.append(output[0, len(prompt) :].tolist())
    return rows


def sample(model, prompts, tokens, temperature, generator=None):
    """Sample with the fast CPU sampler."""
    assert is_small_llama(model)
    return generate(model, prompts, Decoding(tokens, temperature, ENDS, PAD), generator)


ROPE = {"rope_type": "llama3", "rope_theta": 1000.0, "factor": 8.0, "low_freq_factor": 1.0}
LONG = {**ROPE, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


KINDS = {
    "qwen3": {},
    "gemma3_text": {"sliding_window": 4},
    "mistral": {"sliding_window": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gpt_neox": {},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_of_distinct_prompts_gives_what_each_row_alone_gives(kind):
    """Greedy, for windows shorter than prompts too; Transformers is the judge."""
    sizes = {"vocab_size": 41, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    sizes |= {"pad_token_id": PAD, "eos_token_id": 1, "initializer_range": 0.3}
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **sizes, **KINDS[kind])
    model = AutoModelForCausalLM.from_config(config).float().eval()
    prompts = [prompt for prompt in random_prompts(4) for _ in range(3)]
    found = generate(model, prompts, Decoding(16, None, ENDS, PAD), seeded(0))
    assert found == reference(model, prompts, 16)


def test_each_distinct_prompt_is_read_once_and_what_has_ended_leaves():
    model = tiny_gpt2().eval()
    shapes = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    prompts = [prompt for prompt in random_prompts(4) for _ in range(16)]
    completions = generate(model, prompts, Decoding(24, 1.0, ENDS, PAD), seeded(1))
    assert shapes[0] == (4, max(map(len, prompts)))
    rows = [rows for rows, width in shapes[1:] if width == 1]
    assert rows[0] == 64
    assert rows == sorted(rows, reverse=True)
    assert rows[-1] < 64
    assert len(rows) < max(map(len, completions)) <= 24


def test_what_recurs_is_sampled_by_transformers():
    config = AutoConfig.for_model("mamba", vocab_size=41, hidden_size=16, num_hidden_layers=1)
    assert not rollout.keeps_simple_cache(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True, "num_key_value_heads": 2},
        {"num_key_value_heads": 1, "head_dim": 16},
        {"rope_parameters": LONG},
    ],
    ids=["plain", "tied-grouped", "one-key-head", "llama3-rope"],
)
def test_greedy_equals_generate(changes):
    model = tiny_llama(**changes)
    prompts = random_prompts(24)
    completions = sample(model, prompts, 24, None)
    assert completions == reference(model, prompts)
    lengths = {len(completion) for completion in completions}
    assert len(lengths) > 3, "rows must end at different times, or compaction is not tried"


def test_equal_prompts_in_any_order_get_their_own_completions():
    model = tiny_llama()
    a, b = random_prompts(2)
    completions = sample(model, [a, b, a, b, b], 24, None)
    assert completions == reference(model, [a, b, a, b, b])


def test_a_completion_ends_with_its_end_token_or_at_the_limit():
    completions = sample(tiny_llama(), random_prompts(64), 6, 1.0, seeded(0))
    for completion in completions:
        assert 1 <= len(completion) <= 6
        assert not set(completion[:-1]) & set(ENDS)
        assert len(completion) == 6 or completion[-1] in ENDS


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_tokens_are_drawn_with_the_models_probabilities(temperature):
    model = tiny_llama(initializer_range=0.15)
    prompt = [5, 9, 3]
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1]
    expected = torch.softmax(logits / temperature, dim=-1)
    count = 20_000
    drawn = sample(model, [prompt] * count, 1, temperature, seeded(3))
    observed = torch.bincount(torch.tensor(drawn)[:, 0], minlength=41) / count
    deviation = (observed - expected).abs() / (expected * (1 - expected) / count).sqrt()
    assert deviation.max() < 4.5  # standard deviations; 41 tokens, a fixed seed


def test_no_token_of_probability_zero():
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[4:] = 0
        model.model.norm.weight.zero_()
    drawn = sample(model, [[5]] * 100, 1, 1.0, seeded(0))
    assert len({tokens[0] for tokens in drawn}) > 20, "equal logits must spread over all tokens"


def test_the_generator_decides_and_the_global_random_state_stays():
    model = tiny_llama()
    prompts = random_prompts(8)
    decoding = Decoding(10, 1.0, ENDS, PAD)
    before = torch.random.get_rng_state()
    first = generate(model, prompts, decoding, seeded(5))
    assert first == generate(model, prompts, decoding, seeded(5))
    assert first != generate(model, prompts, decoding, seeded(6))
    assert torch.equal(before, torch.random.get_rng_state())


def tiny_gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=41,
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=64,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=PAD,
    )
    return GPT2LMHeadModel(config).train()


@pytest.mark.parametrize("cached", [True, False])
def test_other_architectures_are_sampled_from_a_cache_or_by_transformers(monkeypatch, cached):
    model = tiny_gpt2()
    assert not is_small_llama(model)
    assert rollout.keeps_simple_cache(model)
    monkeypatch.setattr(rollout, "keeps_simple_cache", lambda _: cached)
    prompts = random_prompts(6)
    decoding = Decoding(10, 1.0, ENDS, PAD)
    before = torch.random.get_rng_state()
    first = generate(model, prompts, decoding, seeded(5))
    assert first == generate(model, prompts, decoding, seeded(5))
    assert first != generate(model, prompts, decoding, seeded(6))
    assert torch.equal(before, torch.random.get_rng_state())
    assert model.training, "the mode must be kept"
    greedy = Decoding(10, None, ENDS, PAD)
    assert generate(model, prompts, greedy, seeded(0)) == reference(model.eval(), prompts, 10)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True},
        {"mlp_bias": True},
        {"hidden_act": "gelu"},
        {"attention_dropout": 0.1},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0}},
    ],
)
def test_unusual_llama_models_are_left_to_transformers(changes):
    assert not is_small_llama(tiny_llama(**changes))


def test_half_precision_is_left_to_transformers():
    assert not is_small_llama(tiny_llama().to(torch.bfloat16))


# The packed forward pass


def batch(groups: int, group: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Shuffled rows of several groups, padded as TRL pads; one completion is empty."""
    generator = torch.Generator().manual_seed(2)
    width, tail = 9, 7
    ids = torch.zeros(groups * group, width + tail, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for g in range(groups):
        length = 2 + (3 * g) % width
        length = min(length, width)
        prompt = torch.randint(2, 29, (length,), generator=generator)
        for i in range(g * group, (g + 1) * group):
            count = int(torch.randint(1, tail + 1, (1,), generator=generator)) if i else 0
            ids[i, width - length : width] = prompt
            ids[i, width : width + count] = torch.randint(2, 29, (count,), generator=generator)
            mask[i, width - length : width + count] = 1
    order = torch.randperm(groups * group, generator=generator)
    return ids[order], mask[order], tail


@pytest.mark.parametrize("width", [640, 20], ids=["one-row-a-group", "several-rows-a-group"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_forward_and_gradient_equal_trls(policy, tmp_path, monkeypatch, width, temperature):
    monkeypatch.setattr(fast_cpu, "_WIDTH", width)
    trainer = build_plain_trainer(policy, tmp_path, temperature=temperature)
    model = trainer.model
    ids, mask, tail = batch(groups=4, group=5)
    theirs, entropies, _ = trainer._get_per_token_logps_and_entropies(
        model, ids, mask, tail, compute_entropy=True
    )
    pull = torch.linspace(-1, 1, theirs.numel()).view_as(theirs)
    (theirs * pull).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    ours, our_entropies = fast_cpu.compute_log_probs(model, ids, mask, tail, temperature)
    (ours * pull).sum().backward()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(our_entropies, entropies.detach(), rtol=1e-5, atol=1e-5)
    assert theirs.abs().sum() > 0
    for parameter, expected in zip(model.parameters(), gradients, strict=True):
        assert (parameter.grad - expected).norm() <= 2e-5 * expected.norm()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"beta": 0.1, "loss_type": "grpo"},
        {"num_iterations": 2, "loss_type": "dr_grpo"},
        {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 8, "loss_type": "bnpo"},
    ],
    ids=["dapo", "kl", "two-passes", "accumulation"],
)
def test_packed_training_equals_unpacked_training(policy, tmp_path, monkeypatch, changes):
    def trained(packs: bool) -> list[torch.Tensor]:
        monkeypatch.setattr(fast_cpu, "can_pack", lambda model: packs)
        trainer = build_plain_trainer(
            policy,
            tmp_path,
            cls=GDPOTrainer,
            normalization="gdpo",
            rollout_func=sample_for_trainer,
            reward_funcs=[vowels],
            optim="sgd",  # Adam would turn rounding error in a gradient of 0 into a whole step
            **changes,
        )
        trainer.train()
        return [parameter.detach() for parameter in trainer.model.parameters()]

    untrained = load_policy(policy)[0]
    for ours, theirs, before in zip(
        trained(True), trained(False), untrained.parameters(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        assert not torch.equal(ours, before)


def vowels(completions, **_):
    return [float(sum(c in "aeiou" for c in text)) for text in completions]


def test_nothing_is_packed_where_the_gradient_would_be_wrong(policy, tmp_path):
    def packs(**changes) -> bool:
        trainer = build_plain_trainer(
            policy,
            tmp_path,
            cls=GDPOTrainer,
            normalization="gdpo",
            reward_funcs=[score_constantly],
            **changes,
        )
        return trainer._can_pack(trainer.model)

    assert packs()
    assert not packs(entropy_coef=0.1)
    assert not fast_cpu.can_pack(tiny_gpt2())
