"""Training and evaluation sample from the policy itself, whatever its directory holds.

Most tests use a GPT-2: its positions are learned, it has dropout, and its modules are Conv1D.
"""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments

from gdpo_tune.core.errors import PolicyError
from gdpo_tune.core.settings import ModelSettings, TrainingSettings
from gdpo_tune.policies.load_policy import load_policy
from gdpo_tune.training import rollout
from gdpo_tune.training.decoding import Decoding
from gdpo_tune.training.lora import build_adapter_config
from tests.support import training as support
from tests.support.training import SETTINGS, write_gpt2
from tests.support.trials import build_trial, run_metrics

pytestmark = pytest.mark.usefixtures("toy")

ONE_STEP = SETTINGS.replace(steps=1)
DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.2)
OWN_DECODING = {
    "temperature": 0.1,
    "top_k": 2,
    "top_p": 0.1,
    "min_p": 0.9,
    "typical_p": 0.2,
    "epsilon_cutoff": 0.05,
    "eta_cutoff": 0.05,
    "repetition_penalty": 1.5,
    "encoder_repetition_penalty": 1.5,
    "no_repeat_ngram_size": 1,
    "encoder_no_repeat_ngram_size": 1,
    "min_new_tokens": 8,
    "min_length": 12,
    "max_length": 3,
    "max_time": 1e-9,
    "suppress_tokens": [20, 21, 22],
    "begin_suppress_tokens": [20, 21, 22],
    "bad_words_ids": [[20], [21]],
    "sequence_bias": [[[5], 8.0]],
    "forced_bos_token_id": 5,
    "forced_eos_token_id": 5,
    "exponential_decay_length_penalty": [1, 3.0],
    "num_beams": 2,
    "num_return_sequences": 2,
    "guidance_scale": 2.0,
    "stop_strings": ["a", "e", "i"],
    "remove_invalid_values": True,
    "renormalize_logits": True,
    "use_cache": False,
    "cache_implementation": "static",
    "do_sample": False,
    "output_scores": True,
    "return_dict_in_generate": True,
    "assistant_early_exit": 1,
    "prompt_lookup_num_tokens": 2,
    "a_key_of_a_later_version": 3,
}
"""Every kind of key that a generation_config.json may have, each with a value that would show."""


def run(policy, directory, training=ONE_STEP, **changes):
    """Train and return the metrics of all steps and the outcome."""
    steps, outcome = run_metrics(build_trial(policy, directory, training=training, **changes))
    return [{k: v for k, v in m.items() if "time" not in k} for _, m in steps], outcome


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return write_gpt2(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def plain(gpt2, tmp_path_factory):
    """Metrics of the first step of a GPT-2 with neutral decoding, and the outcome."""
    with pytest.MonkeyPatch.context() as patch:
        support.register_toy_task(patch)
        (step,), outcome = run(gpt2, tmp_path_factory.mktemp("plain"))
    return step, outcome


@pytest.fixture(scope="module")
def draw(tmp_path_factory):
    """A function that samples held-out completions under a policy's own decoding."""
    policy = tmp_path_factory.mktemp("policy")
    write_gpt2(policy)

    def draw(**generation):
        entries = {"eos_token_id": 1, "pad_token_id": 0, **generation}
        (policy / "generation_config.json").write_text(json.dumps(entries))
        seed = torch.Generator().manual_seed(0)
        decoding = Decoding(8, 1.0, (1,), 0)
        return rollout.generate(load_policy(str(policy))[0], [[5, 6, 7]] * 16, decoding, seed)

    return draw


@pytest.fixture(scope="module")
def plain_draw(draw):
    return draw()


@pytest.mark.parametrize("key", OWN_DECODING)
def test_no_key_of_a_generation_config_changes_a_held_out_draw(draw, plain_draw, key):
    # Source: verl#7270; `_prepare_generation_config` of transformers fills in what a call lacks.
    sampled = {} if key == "do_sample" else {"do_sample": True}
    assert draw(**sampled, **{key: OWN_DECODING[key]}) == plain_draw


def test_no_key_of_a_generation_config_changes_a_training(tmp_path, plain):
    # Source: trl#5783.
    policy = write_gpt2(tmp_path / "own", {**OWN_DECODING, "do_sample": True})
    (step,), outcome = run(policy, tmp_path / "trial")
    assert step == plain[0]
    assert outcome.test == plain[1].test


def test_an_unmoved_policy_has_no_kl_and_clips_nothing_despite_its_dropout(tmp_path):
    # Source: trl#3500, trl#3234. Before any update the policy is the reference.
    policy = write_gpt2(tmp_path / "policy", **DROPOUT)
    settings = ONE_STEP.replace(mini_batch_size=8)
    params = {"beta": 0.04, "learning_rate": 1e-12, "num_iterations": 2}
    (step,), _ = run(policy, tmp_path / "trial", settings, **params)
    assert step["train/kl"] < 1e-6
    assert step["train/clip_ratio/region_mean"] == 0


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
EXPERTS = {"intermediate_size": 48, "num_key_value_heads": 2, "num_local_experts": 4}
NOISY = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, **DROPOUT},
    "opt": {**SIZES, "word_embed_proj_dim": 32, "ffn_dim": 48, "dropout": 0.2, "layerdrop": 0.5},
    "falcon": {**SIZES, "hidden_dropout": 0.2, "attention_dropout": 0.2},
    "llama": {**SIZES, "intermediate_size": 48, "attention_dropout": 0.2},
    "mixtral": {**SIZES, **EXPERTS, "router_jitter_noise": 0.3},
}
"""Architectures whose forward passes read their dropout, or other noise, from different places."""


@pytest.mark.parametrize("kind", NOISY)
def test_training_mode_computes_what_evaluation_mode_computes(gpt2, tmp_path, kind):
    sizes = {"vocab_size": 64, "eos_token_id": 1, "pad_token_id": 0, **NOISY[kind]}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).save_pretrained(tmp_path)
    load_policy(gpt2)[1].save_pretrained(tmp_path)
    tokens = torch.arange(5, 25)[None]
    for dropout in (False, True):
        model, _ = load_policy(str(tmp_path), dropout=dropout)
        with torch.no_grad():
            expected = model.eval()(tokens).logits
            logits = model.train()(tokens).logits
        assert torch.equal(logits, expected) is not dropout


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_padding_moves_no_learned_position(tmp_path, gpt2, plain, lora_rank):
    # Source: trl#469, trl#6800: micro-batches of other widths give the same gradient, and a policy
    # that does not move has ratios of 1.
    model = ModelSettings(lora_rank=lora_rank)
    whole = run(gpt2, tmp_path / "whole", model=model)[0] if lora_rank else [plain[0]]
    parts, _ = run(gpt2, tmp_path / "parts", ONE_STEP.replace(micro_batch_size=4), model=model)
    assert parts[0]["train/grad_norm"] == pytest.approx(whole[0]["train/grad_norm"], rel=1e-4)
    settings = ONE_STEP.replace(mini_batch_size=8, micro_batch_size=4)
    params = {"beta": 0.04, "learning_rate": 1e-12, "model": model}
    (step,), _ = run(gpt2, tmp_path / "still", settings, **params)
    assert step["train/kl"] < 1e-6
    assert step["train/clip_ratio/region_mean"] == 0


@pytest.mark.parametrize("target", ["c_attn", "wpe", "all-linear"])
def test_adapters_of_other_modules_than_linear_train_and_merge(tmp_path, gpt2, target):
    # Source: peft#2992; PEFT adapts Conv1D and embeddings too, and c_attn is its default for GPT-2.
    peft = pytest.importorskip("peft")
    model = ModelSettings(lora_rank=2, lora_targets=(target,))
    _, outcome = run(gpt2, tmp_path, ONE_STEP.replace(steps=2), model=model)
    merged = load_policy(str(outcome.checkpoint))[0]
    base = load_policy(gpt2)[0]
    tokens = torch.arange(2, 20)[None]
    with torch.no_grad():
        untrained = base(tokens).logits
        adapted = peft.PeftModel.from_pretrained(base, str(outcome.checkpoint))
        expected = adapted(tokens).logits
        torch.testing.assert_close(merged(tokens).logits, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(expected, untrained)


@pytest.mark.parametrize("target", ["wte", "lm_head", "q_proj"])
def test_targets_without_weights_of_their_own_are_refused_with_those_that_exist(gpt2, target):
    settings = ModelSettings(lora_rank=2, lora_targets=(target,))  # wte is tied to the head
    with pytest.raises(PolicyError, match=rf"no linear module {target}: .*c_attn, c_fc, c_proj"):
        build_adapter_config(load_policy(gpt2)[0], settings, "mine")


def test_the_temperature_of_evaluations_is_a_setting(tmp_path, gpt2, monkeypatch):
    used = []

    def sample(model, prompts, decoding, generator):
        used.append(decoding.temperature)
        return rollout.generate(model, prompts, decoding, generator)

    monkeypatch.setattr(rollout, "choose_held_out_sampler", lambda _: sample)
    for temperature in (0.5, 0.0):
        settings = ONE_STEP.replace(evaluation_temperature=temperature)
        run(gpt2, tmp_path / f"{temperature}", settings, temperature=0.7)
    assert list(dict.fromkeys(used)) == [0.5, None]  # None: the most likely token


@pytest.mark.parametrize(
    ("temperature", "lora_rank"), [(0.5, 0), (0.5, 2), (1.0, 0)], ids=["full", "lora", "default"]
)
def test_a_checkpoint_records_by_which_decoding_it_was_judged(tmp_path, temperature, lora_rank):
    # Source: generation_config.json, which `from_pretrained`, pipelines and vLLM read.
    policy = write_gpt2(tmp_path / "policy", OWN_DECODING | {"eos_token_id": [5]})
    settings = ONE_STEP.replace(steps=2, checkpoint_every=1, evaluate_every=1)
    settings = settings.replace(evaluation_temperature=temperature)
    model = ModelSettings(lora_rank=lora_rank)
    run(policy, tmp_path / "trial", settings, model=model, temperature=0.7)
    places = sorted((tmp_path / "trial").glob("checkpoint-*"))
    assert places
    for place in places:
        config = json.loads((place / "generation_config.json").read_text())
        del config["transformers_version"]
        expected = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        assert config == {**expected, "eos_token_id": [1, 5], "pad_token_id": 0}


def test_an_adapter_names_the_revision_of_its_base(gpt2):
    # Source: `revision` of `PeftConfig`; the Hub's commit where a sweep names none. peft#1567.
    model = load_policy(gpt2)[0]
    model.config._commit_hash = "c" * 40
    for revision, expected in (("v1.0", "v1.0"), ("", "c" * 40)):
        settings = ModelSettings(lora_rank=2, revision=revision)
        assert build_adapter_config(model, settings, "mine").revision == expected


@pytest.mark.parametrize(
    ("share", "steps", "expected"),
    [(0.05, 10, 1), (0.0, 10, 0), (0.33, 3, 1), (0.67, 3, 3), (0.1, 60, 6), (0.07, 100, 7)],
)
def test_a_warm_up_takes_the_ceiling_of_its_share(tmp_path, share, steps, expected):
    # Source: `TrainingArguments.get_warmup_steps`, which takes the ceiling. It makes 8 steps of
    # .07 x 100, whose product is 7.000000000000001; we take 7.
    settings = TrainingSettings(steps=steps, warmup_share=share)
    assert settings.warmup_steps == expected
    theirs = TrainingArguments(output_dir=str(tmp_path), warmup_steps=share, use_cpu=True)
    if share > 0 and share * steps != pytest.approx(expected, abs=1e-9):
        assert theirs.get_warmup_steps(steps) == expected


def test_the_warm_up_of_a_shorter_training_is_as_long():
    # `retrain` ends a trial of 100 steps at an earlier one, with the share that gives as many.
    for steps in range(1, 100):
        for warm in range(steps):
            share = min(warm / steps, 0.99)
            assert TrainingSettings(steps=steps, warmup_share=share).warmup_steps == warm
