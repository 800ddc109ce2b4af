"""The samplers against Transformers' `generate`, and the packed pass against TRL's.

Held-out completions are sampled in chunks that fit, or through the engine where one runs.
"""

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

from gdpo_tune.core.engines import NEWEST, VLLM
from gdpo_tune.core.settings import RolloutSettings
from gdpo_tune.training import fast_cpu, rollout, trial
from gdpo_tune.training.decoding import Decoding
from gdpo_tune.training.fast_cpu import is_small_llama
from gdpo_tune.training.rollout import generate, sample_in_chunks
from gdpo_tune.training.trainer import GDPOTrainer
from gdpo_tune.training.trial import build_trainer
from tests.support.training import build_plain_trainer
from tests.support.trials import build_trial, get_results, run_metrics

ENDS, PAD = (1, 7), 0
SIZES = {"vocab_size": 41, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
SIZES |= {"initializer_range": 0.3, "pad_token_id": PAD, "eos_token_id": 1}
ROPE = {"rope_type": "llama3", "rope_theta": 1000.0, "factor": 8.0, "low_freq_factor": 1.0}
LONG = {**ROPE, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


def build_llama(**changes) -> LlamaForCausalLM:
    settings = {**SIZES, "num_hidden_layers": 2, "max_position_embeddings": 128, **changes}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**settings)).eval()


def build_gpt2() -> GPT2LMHeadModel:
    sizes = {"vocab_size": 41, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    ends = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": PAD}
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(initializer_range=0.3, **sizes, **ends)).train()


def draw_prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 12, (count,), generator=generator).tolist()
    return [torch.randint(2, 41, (n,), generator=generator).tolist() for n in lengths]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def generate_alone(model, prompts, tokens: int = 24) -> list[list[int]]:
    """Generate by Transformers each distinct prompt alone, without padding or batching."""
    ends = {"eos_token_id": list(ENDS), "pad_token_id": PAD}
    found = {}
    for prompt in {tuple(prompt) for prompt in prompts}:
        ids = torch.tensor([prompt])
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": tokens, **ends}
        output = model.generate(ids, do_sample=False, **options)
        found[prompt] = output[0, len(prompt) :].tolist()
    return [found[tuple(prompt)] for prompt in prompts]


def sample(model, prompts, tokens, temperature, generator=None):
    """Sample with the fast CPU sampler."""
    assert is_small_llama(model)
    return generate(model, prompts, Decoding(tokens, temperature, ENDS, PAD), generator)


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
    sizes = {**SIZES, "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 8}
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **sizes, **KINDS[kind])
    model = AutoModelForCausalLM.from_config(config).float().eval()
    prompts = [prompt for prompt in draw_prompts(4) for _ in range(3)]
    found = generate(model, prompts, Decoding(16, None, ENDS, PAD), seeded(0))
    assert found == generate_alone(model, prompts, 16)


def test_each_distinct_prompt_is_read_once_and_what_has_ended_leaves():
    model, shapes = build_gpt2().eval(), []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    prompts = [prompt for prompt in draw_prompts(4) for _ in range(16)]
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
    model = build_llama(**changes)
    prompts = draw_prompts(24)
    prompts += prompts[3:0:-1]  # equal ones, in another order
    completions = sample(model, prompts, 24, None)
    assert completions == generate_alone(model, prompts)
    lengths = {len(completion) for completion in completions}
    assert len(lengths) > 3, "rows must end at different times, or compaction is not tried"


def test_a_completion_ends_with_its_end_token_or_at_the_limit():
    completions = sample(build_llama(), draw_prompts(64), 6, 1.0, seeded(0))
    for completion in completions:
        assert 1 <= len(completion) <= 6
        assert not set(completion[:-1]) & set(ENDS)
        assert len(completion) == 6 or completion[-1] in ENDS


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_tokens_are_drawn_with_the_models_probabilities(temperature):
    model, prompt, count = build_llama(initializer_range=0.15), [5, 9, 3], 20_000
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1]
    expected = torch.softmax(logits / temperature, dim=-1)
    drawn = sample(model, [prompt] * count, 1, temperature, seeded(3))
    observed = torch.bincount(torch.tensor(drawn)[:, 0], minlength=41) / count
    deviation = (observed - expected).abs() / (expected * (1 - expected) / count).sqrt()
    assert deviation.max() < 4.5  # standard deviations; 41 tokens, a fixed seed


def test_equal_logits_spread_over_all_tokens():
    model = build_llama()
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.model.norm.weight.zero_()
    drawn = sample(model, [[5]] * 100, 1, 1.0, seeded(0))
    assert len({tokens[0] for tokens in drawn}) > 20


@pytest.mark.parametrize(
    ("build", "cached"),
    [(build_llama, True), (build_gpt2, True), (build_gpt2, False)],
    ids=["fast", "cached", "Transformers"],
)
def test_the_generator_decides_and_the_global_random_state_stays(monkeypatch, build, cached):
    assert not is_small_llama(build_gpt2())
    assert rollout.keeps_simple_cache(build_gpt2())
    monkeypatch.setattr(rollout, "keeps_simple_cache", lambda _: cached)
    model = build()
    prompts, was_training = draw_prompts(6), model.training
    decoding = Decoding(10, 1.0, ENDS, PAD)
    before = torch.random.get_rng_state()
    first = generate(model, prompts, decoding, seeded(5))
    assert first == generate(model, prompts, decoding, seeded(5))
    assert first != generate(model, prompts, decoding, seeded(6))
    assert torch.equal(before, torch.random.get_rng_state())
    assert model.training is was_training
    greedy = Decoding(10, None, ENDS, PAD)
    found = generate(model, prompts, greedy, seeded(0))
    assert found == generate_alone(model.eval(), prompts, 10)


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
    assert is_small_llama(build_llama())
    assert not is_small_llama(build_llama(**changes))
    assert not is_small_llama(build_llama().to(torch.bfloat16))


def draw_batch(groups: int, group: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Shuffled rows of several groups, padded as TRL pads; one completion is empty."""
    generator = torch.Generator().manual_seed(2)
    width, tail = 9, 7
    ids = torch.zeros(groups * group, width + tail, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for g in range(groups):
        length = min(2 + (3 * g) % width, width)
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
    ids, mask, tail = draw_batch(groups=4, group=5)
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


def test_nothing_is_packed_where_the_gradient_would_be_wrong(policy, tmp_path):
    for changes, packs in (({}, True), ({"entropy_coef": 0.1}, False)):
        own = {"cls": GDPOTrainer, "normalization": "gdpo", **changes}
        trainer = build_plain_trainer(policy, tmp_path, **own)
        assert trainer._can_pack(trainer.model) is packs
    assert not fast_cpu.can_pack(build_gpt2())


def test_a_chunk_holds_a_number_of_tokens_whatever_the_batch():
    sizes, long = [], [[2] * 2048] * 512

    def echo(prompts):
        sizes.append(len(prompts))
        return [list(prompt) for prompt in prompts]

    assert sample_in_chunks(echo, long, 1024) == long
    assert max(sizes) * (2048 + 1024) <= rollout.TOKENS_AT_ONCE
    assert sum(sizes) == 512
    assert sample_in_chunks(echo, [[2] * 2**18] * 2, 1) == [[2] * 2**18] * 2
    assert sizes[-2:] == [1, 1]
    assert sample_in_chunks(echo, [], 8) == []


def test_a_chunk_that_does_not_fit_is_halved_and_order_stays():
    prompts, sizes, fitting = [[number] for number in range(50)], [], 7

    def echo(part):
        sizes.append(len(part))
        if len(part) > fitting:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return [list(prompt) for prompt in part]

    assert sample_in_chunks(echo, prompts, 8) == prompts
    assert sizes[:4] == [50, 25, 12, 6]
    assert max(sizes[3:]) == 6, "later chunks start with the size that fitted"
    fitting = 0
    with pytest.raises(torch.OutOfMemoryError):
        sample_in_chunks(echo, prompts, 8)


def test_transformers_samples_as_many_at_once_as_fit(monkeypatch):
    monkeypatch.setattr(rollout, "keeps_simple_cache", lambda _: False)
    model, seen, runs = build_gpt2(), [], []
    inner = model.generate

    def watched(tokens, **keywords):
        seen.append(tuple(tokens.shape))
        return inner(tokens, **keywords)

    model.generate = watched
    for most in (rollout.TOKENS_AT_ONCE, 8 * 12):
        monkeypatch.setattr(rollout, "TOKENS_AT_ONCE", most)
        generator = seeded(3)
        prompts = [[2 + number % 30] * 4 for number in range(20)]
        completions = generate(model, prompts, Decoding(8, 1.0, (1,), 0), generator)
        runs.append((completions, torch.rand(1, generator=generator).item()))
    assert seen == [(20, 4), (8, 4), (8, 4), (4, 4)], "all at once, as ever, where they fit"
    (whole, drawn), (parts, drawn_again) = runs
    assert len(parts) == len(whole) == 20
    assert parts[:8] != parts[8:16]
    assert drawn_again == drawn, "the evaluation's generator moves as far as without chunks"


def test_the_fast_cpu_sampler_is_not_cut_into_chunks(toy, policy, tmp_path, monkeypatch):
    config = build_trial(policy, tmp_path / "t", train=False)
    _, expected = run_metrics(config)
    monkeypatch.setattr(rollout, "TOKENS_AT_ONCE", 1)
    assert run_metrics(config)[1].test == expected.test


def test_the_untrained_baseline_is_sampled_by_the_engine_of_a_training(
    toy, policy, tmp_path, monkeypatch
):
    built, prompts, checked = [], [], []

    def build_watched(config, cache, *others):
        trainer, sampler = build_trainer(config, cache, *others)
        built.append((config, trainer.ref_model))

        def watched(model, batch, decoding, generator):
            assert model is trainer.model
            prompts.extend(batch)
            return sampler(model, batch, decoding, generator)

        return trainer, watched

    monkeypatch.setattr(trial, "build_trainer", build_watched)
    monkeypatch.setattr(trial, "check_following", lambda *_: checked.append(True))
    config = build_trial(policy, tmp_path / "t", beta=0.1, train=False)
    _, plain = run_metrics(config)
    assert not built
    monkeypatch.setattr(trial, "uses_engine_in_process", lambda _: True)
    _, engine = run_metrics(config)
    assert get_results(engine) == get_results(plain)
    assert checked == [True], "the engine shows once that it follows"
    ((used, reference),) = built
    assert used.params["beta"] == 0
    assert reference is None, "nothing is trained, so nothing is compared with the policy"
    assert len(prompts) == 2 * 6 * 2
    assert engine.checkpoint is None


@pytest.mark.parametrize(
    ("settings", "uses"),
    [
        (RolloutSettings(), True),
        (RolloutSettings(engine="transformers"), False),
        (RolloutSettings(engine="vllm", vllm_mode="server", vllm_server="http://h:1"), False),
    ],
)
def test_an_engine_in_this_process_is_told_from_a_server(tmp_path, monkeypatch, settings, uses):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(rollout, "find_vllm", lambda: VLLM(NEWEST, on_cpu=False))
    config = build_trial("embedded", tmp_path, rollout=settings)
    assert rollout.uses_engine_in_process(config) is uses
