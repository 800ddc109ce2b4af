"""`model:` in training: precision, recomputation, adapters, chat templates, end tokens."""

import dataclasses
import json
import shutil
from itertools import product
from types import SimpleNamespace

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config

from gdpo_tune.cli import check_trainable
from gdpo_tune.core.errors import PolicyError, TrialFailure
from gdpo_tune.core.policy_shapes import TEXT_PART_TYPES, find_expert_problem
from gdpo_tune.core.settings import ModelSettings
from gdpo_tune.core.trial_config import TrainedPart
from gdpo_tune.policies.adapters import load_adapter
from gdpo_tune.policies.load_policy import check_policy, load_policy, measure_policy
from gdpo_tune.training import checkpoints, worker_cache, written_policy
from gdpo_tune.training.lora import build_adapter_config, fill_adapter, save_policy
from gdpo_tune.training.trainer import GDPOTrainer
from gdpo_tune.training.trial import build_trainer
from gdpo_tune.training.trl_arguments import build_trainer_arguments
from tests.support import training as support
from tests.support.training import SETTINGS, ToyTask
from tests.support.trials import build_trial, get_results, run_metrics
from tests.support.tuning import load_code_spec

CHAT = (
    "{% for m in messages %}{{ m['role'][0] }}={{ m['content'] }}={% endfor %}"
    "{% if add_generation_prompt %}a={% endif %}"
)

pytestmark = pytest.mark.usefixtures("toy")
PLAIN, LORA = ModelSettings(), ModelSettings(lora_rank=4)
SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}


class InstructedTask(ToyTask):
    """The toy task with instructions."""

    instructions = "answer"


@pytest.fixture(scope="module")
def chat(policy, tmp_path_factory):
    """A Qwen3 with a chat template and a second token that ends a turn."""
    folder = tmp_path_factory.mktemp("chat")
    _, tokenizer = load_policy(policy)
    tokenizer.chat_template = CHAT
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    ends = {"pad_token_id": 0, "eos_token_id": 1, "initializer_range": 0.2}
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer), max_position_embeddings=128, **sizes, **heads, **ends
        )
    )
    end_of_turn = tokenizer.convert_tokens_to_ids("z")
    model.generation_config = GenerationConfig(eos_token_id=[end_of_turn, 1], pad_token_id=0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def once(policy, tmp_path_factory):
    """Run a trial only the first time; return its steps and its outcome."""
    results = {}

    def run_once(model=PLAIN, **changes):
        key = (model, *changes.items())
        if key not in results:
            if model.lora_rank:
                pytest.importorskip("peft")
            directory = tmp_path_factory.mktemp("once")
            results[key] = run_metrics(build_trial(policy, directory, model=model, **changes))
        return results[key]

    return run_once


def compute_logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits


def test_bfloat16_changes_the_arithmetic_and_not_the_stored_weights(once):
    exact, _ = once(ModelSettings(dtype="float32"))
    coarse, outcome = once(ModelSettings(dtype="bfloat16"))
    assert once()[0] == exact != coarse
    weights = load_file(outcome.checkpoint / "model.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.float32}
    assert any(bool((value.bfloat16().float() != value).any()) for value in weights.values())


@pytest.mark.parametrize("choice", ["auto", "on", "off"])
def test_recomputation_saves_memory_and_changes_no_number(
    policy, tmp_path, once, monkeypatch, choice
):
    recomputed, original = [], GDPOTrainer.compute_loss

    def compute_loss(self, model, *arguments, **keywords):
        recomputed.append(model.is_gradient_checkpointing)
        return original(self, model, *arguments, **keywords)

    monkeypatch.setattr(GDPOTrainer, "compute_loss", compute_loss)
    settings = ModelSettings(gradient_checkpointing=choice)
    metrics, _ = run_metrics(build_trial(policy, tmp_path, model=settings))
    assert set(recomputed) == {choice == "on"}
    assert metrics == once()[0]


@pytest.fixture
def loads(monkeypatch):
    """What a model is loaded with, by TRL too, which takes this machine for one with a GPU."""
    plain, seen = transformers.PreTrainedModel.from_pretrained.__func__, []

    def record(cls, *arguments, **options):
        seen.append(options)
        return plain(cls, *arguments, **options)

    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", classmethod(record))
    gpu = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr("trl.trainer.utils.PartialState", lambda: gpu)
    return seen


def test_the_reference_goes_where_the_policy_is_and_has_the_weights_of_the_start(
    policy, tmp_path, loads
):
    """Source: `create_model_from_path` of TRL: by default a model's map is "auto" on a GPU."""
    start = load_policy(policy)[0]
    with torch.no_grad():
        start.lm_head.weight += 1
    start.save_pretrained(tmp_path / "start")
    config = build_trial(policy, tmp_path / "trial", beta=0.1, start=tmp_path / "start")
    del loads[:]
    with worker_cache.open_worker_cache(config) as cache:
        trainer, _ = build_trainer(config, cache)
    own, reference = loads
    assert (own.get("device_map"), reference["device_map"]) == (None, None)
    assert trainer.ref_model.dtype == torch.float32, "as `TrialMemory.reference` counts"
    assert trainer.ref_model.device == trainer.model.device
    for name, weight in start.state_dict().items():
        assert torch.equal(trainer.ref_model.state_dict()[name], weight), name


@pytest.mark.parametrize("attention", ["auto", "sdpa", "eager"])
def test_policy_and_reference_have_the_chosen_attention(policy, tmp_path, attention):
    model = ModelSettings(attention=attention, shared_prompts="off")
    config = build_trial(policy, tmp_path, model=model, beta=0.1)
    with worker_cache.open_worker_cache(config) as cache:
        trainer, _ = build_trainer(config, cache)
    chosen = "sdpa" if attention == "auto" else attention
    for network in (trainer.model, trainer.ref_model):
        assert network.config._attn_implementation == chosen


def test_the_reference_is_of_the_same_revision_which_a_directory_has_not(policy, tmp_path):
    for revision, asked in (("", "main"), ("v2", "v2")):
        config = build_trial(policy, tmp_path, model=ModelSettings(revision=revision), beta=0.1)
        arguments = build_trainer_arguments(config, ToyTask.rewards)
        assert arguments.model_init_kwargs["revision"] == asked
    with pytest.raises(PolicyError, match=r"is a directory, so model\.revision = v2"):
        run_metrics(config)


def test_an_adapter_is_trained_and_the_policy_is_not(policy, once):
    reports, outcome = once(LORA)
    before, _ = load_policy(policy)
    merged, tokenizer = load_policy(str(outcome.checkpoint))
    adapted = load_adapter(load_policy(policy)[0], outcome.checkpoint)
    tokens = tokenizer("tabc=")["input_ids"]
    logits = [compute_logits(model, tokens) for model in (before, merged, adapted)]
    torch.testing.assert_close(logits[1], logits[2], atol=1e-5, rtol=1e-5)
    assert float((logits[0] - logits[1]).abs().max()) > 1e-3
    saved = json.loads((outcome.checkpoint / "adapter_config.json").read_text())
    assert (saved["r"], saved["lora_alpha"]) == (4, 8)
    assert (saved["base_model_name_or_path"], saved["revision"]) == (policy, None)
    assert not list(outcome.checkpoint.glob("model*")), "its base is not written"
    assert torch.equal(merged.get_input_embeddings().weight, before.get_input_embeddings().weight)
    assert len(reports) == SETTINGS.steps


@pytest.mark.parametrize(
    "change",
    [{"lora_rank": 2}, {"lora_alpha": 32.0}, {"lora_targets": ("q_proj",)}, {"dtype": "bfloat16"}],
)
def test_each_setting_of_an_adapter_changes_training(once, change):
    usual, other = (once(model)[0] for model in (LORA, LORA.replace(**change)))
    name = "train/grad_norm"
    assert [metrics[name] for _, metrics in usual] != [metrics[name] for _, metrics in other]


def test_adapters_start_from_the_trials_seed_whatever_ran_before(policy, tmp_path, once):
    first, outcome = once(LORA)
    torch.manual_seed(99)
    again, other = run_metrics(build_trial(policy, tmp_path, model=LORA))
    assert first == again
    assert get_results(outcome) == get_results(other)


@pytest.mark.system
@pytest.mark.parametrize(
    ("step", "dtype"),
    support.mark_slow_cases(product((1, 2), ("auto", "bfloat16")), [(2, "auto"), (1, "bfloat16")]),
)
def test_a_resumed_trial_with_an_adapter_is_bitwise_equal(policy, tmp_path, once, step, dtype):
    model = LORA.replace(dtype=dtype)
    whole, outcome = once(model, beta=0.05)
    config = build_trial(policy, tmp_path, model=model, beta=0.05)
    checkpoint = support.stop_after(config, step)
    assert not (checkpoint / "model.safetensors").exists()
    rest, again = run_metrics(config, checkpoint)
    assert rest == whole[step:]
    assert get_results(again) == get_results(outcome)


@pytest.mark.parametrize("model", [ModelSettings(dtype="bfloat16"), LORA], ids=["whole", "adapter"])
def test_a_finished_trial_reports_again_and_evaluates_to_the_same(policy, once, model):
    _, whole = once(model)
    config = build_trial(policy, whole.checkpoint.parent, model=model)
    reports, again = support.run(config, whole.checkpoint)
    assert [dict(measurement.metrics) for measurement, _ in reports] == [{}], "no step is done"
    assert get_results(again) == get_results(whole)


def test_an_adapter_and_its_base_load_by_the_functions_of_the_libraries(once):
    place = once(LORA)[1].checkpoint
    peft = pytest.importorskip("peft")
    model, tokenizer = load_policy(str(place))
    tokens = tokenizer("tabc=")["input_ids"]
    assert transformers.AutoTokenizer.from_pretrained(place)("tabc=")["input_ids"] == tokens
    for loaded in (
        peft.AutoPeftModelForCausalLM.from_pretrained(place),
        AutoModelForCausalLM.from_pretrained(place),
        transformers.pipeline("text-generation", model=str(place)).model,
    ):
        logits = compute_logits(loaded.float(), tokens)
        torch.testing.assert_close(logits, compute_logits(model, tokens), atol=1e-5, rtol=1e-5)


def test_an_adapter_of_another_base_is_refused_in_one_line(policy, tmp_path):
    pytest.importorskip("peft")
    base = shutil.copytree(policy, tmp_path / "base")
    config = build_trial(str(base), tmp_path / "t", model=LORA)
    checkpoint = run_metrics(config)[1].checkpoint
    with pytest.raises(PolicyError, match="is an adapter, and a training begins at a whole policy"):
        check_policy(str(checkpoint))
    model = load_policy(policy)[0]
    with torch.no_grad():
        model.model.norm.weight += 0.1
    model.save_pretrained(base)
    worker_cache.release_worker_cache()
    merged = dataclasses.replace(config, train=False, parts=(TrainedPart(checkpoint, 1.0),))
    for read, message in (
        (lambda: load_policy(str(checkpoint)), "is another policy than .*base: give the one"),
        (lambda: run_metrics(config, checkpoint), "is another policy than .*base: give the one"),
        (lambda: run_metrics(merged), "from another initial policy than this sweep's"),
    ):
        with pytest.raises((PolicyError, TrialFailure), match=message) as caught:
            read()
        assert "\n" not in str(caught.value)
    shutil.rmtree(base)
    with pytest.raises(PolicyError, match=r"the base of \S+: policy .*no such directory"):
        load_policy(str(checkpoint))


def test_an_adapter_takes_the_place_of_one_with_the_same_modules_alone(policy, tmp_path):
    """With an engine in the process, a candidate's adapter replaces that of a new trainer."""

    def adapt(seed, **settings):
        model, _ = load_policy(policy)
        torch.manual_seed(seed)
        config = build_adapter_config(model, ModelSettings(lora_rank=4, **settings), policy)
        config.init_lora_weights = False  # else B is 0
        return peft.get_peft_model(model, config)

    trained, other, narrow = adapt(1), adapt(2), adapt(3, lora_targets=("q_proj",))
    trained.save_pretrained(tmp_path)
    fill_adapter(other, tmp_path)
    wanted, found = map(peft.get_peft_model_state_dict, (trained, other))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    with pytest.raises(PolicyError, match=r"differs from the adapters of this policy in .*lora"):
        fill_adapter(narrow, tmp_path)


@pytest.mark.system
def test_a_trial_that_is_killed_while_it_writes_its_last_adapter_resumes(
    policy, tmp_path, once, monkeypatch
):
    class Killed(BaseException):
        """Stands for the death of the process."""

    expected = once(LORA)[1]
    config = build_trial(policy, tmp_path, model=LORA)

    def save_half(model, directory, *, dtype, **options):
        save_policy(model, directory, dtype=dtype, **options)
        if not (config.directory / "checkpoint-2").exists():
            return
        file = directory / "adapter_model.safetensors"
        file.write_bytes(file.read_bytes()[:1000])
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(written_policy, "save_policy", save_half)
        patch.setattr(checkpoints.shutil, "rmtree", lambda *_, **__: None)  # nothing tidies up
        with pytest.raises(Killed):
            run_metrics(config)
    assert (config.directory / ".unfinished-3" / "adapter_model.safetensors").is_file()
    newest = checkpoints.find_newest_checkpoint(config.directory)
    assert newest == config.directory / "checkpoint-2"
    again = run_metrics(config, newest)[1]
    assert get_results(again) == get_results(expected)
    assert not list(config.directory.glob(".unfinished*"))
    ours, theirs = (o.checkpoint / "adapter_model.safetensors" for o in (again, expected))
    assert ours.read_bytes() == theirs.read_bytes()


def test_the_kl_of_an_adapter_is_against_the_policy_without_it(once):
    reports, _ = once(LORA, beta=0.05)
    kl = [metrics["train/kl"] for _, metrics in reports]
    assert kl[0] == pytest.approx(0, abs=1e-7)
    assert kl[-1] > 1e-4


@pytest.mark.parametrize(
    ("targets", "missing"), [(("q_proj", "c_attn"), "c_attn"), (("lm_head",), "lm_head")]
)
def test_a_target_that_matches_no_module_is_refused_with_the_names_of_modules(
    chat, policy, tmp_path, targets, missing
):
    settings = ModelSettings(lora_rank=4, lora_targets=targets)
    names = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    with pytest.raises(PolicyError, match=f"no linear module {missing}(.|\n)*{names}"):
        run_metrics(build_trial(policy, tmp_path, model=settings))
    with pytest.raises(PolicyError, match=f"no linear module {missing}"):
        build_adapter_config(load_policy(chat)[0], settings, chat)


def test_adapters_on_all_linear_modules_of_experts_are_refused_before_training(tmp_path):
    """Source: unsloth#5345, Automodel#1151: PEFT leaves experts or cannot write them."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    settings = transformers.Qwen3MoeConfig(**experts, **SIZES, **HEADS)
    model = transformers.Qwen3MoeForCausalLM(settings)
    model.save_pretrained(tmp_path)
    names = dict(model.named_parameters()), measure_policy(str(tmp_path)).shapes
    for each in names:  # in memory one parameter of a layer, in files one of an expert
        assert "mixture of experts" in find_expert_problem(each, ["all-linear"])
        assert not find_expert_problem(each, ["q_proj"])
    with pytest.raises(PolicyError, match="mixture of experts"):
        build_adapter_config(model, ModelSettings(lora_rank=4), "mine")


def test_adapters_that_vllm_would_know_by_other_names_are_refused_before_the_sweep(
    tmp_path, monkeypatch
):
    """Source: vllm#34186; the class that each mapping of Transformers names for a type."""
    from transformers.models.auto import configuration_auto, modeling_auto

    text, whole = (
        getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES")
        for kind in ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT")
    )
    newer = {"dots3_note"} - text.keys()  # of Transformers 5.24
    assert {*TEXT_PART_TYPES} - newer == {
        kind
        for kind in text.keys() & whole.keys()
        if text[kind] != whole[kind]
        and "text_config" in configuration_auto.CONFIG_MAPPING[kind].sub_configs
    }
    config = transformers.Qwen3_5Config(text_config={**SIZES, **HEADS})
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "text")
    model.save_pretrained(tmp_path / "whole")
    (tmp_path / "whole/config.json").write_text(config.to_json_string())
    monkeypatch.setattr("gdpo_tune.policies.load_policy._check_directory", lambda *_: None)
    for name, engine, rank, is_refused in (
        ("whole", "vllm", 4, True),
        ("whole", "vllm", 0, False),
        ("whole", "transformers", 4, False),
        ("text", "vllm", 4, False),
    ):
        changes = [f"policy={tmp_path / name}", f"rollout.engine={engine}"]
        spec = load_code_spec(tmp_path, [*changes, f"model.lora_rank={rank}"])
        if is_refused:
            with pytest.raises(PolicyError, match="by other names\n    fix: write the text model"):
                check_trainable(spec)
        else:
            check_trainable(spec)


@pytest.fixture
def sampled(monkeypatch):
    """Prompts of the trainer, the token ids that TRL continues with, and its completions."""
    seen, original = [], GDPOTrainer._generate

    def generate(self, prompts):
        output = original(self, prompts)
        seen.extend(zip(prompts, output[0], output[1], strict=True))
        return output

    monkeypatch.setattr(GDPOTrainer, "_generate", generate)
    return seen


@pytest.mark.parametrize(
    ("instructions", "first"), [("auto", "s=answer=u={}=a="), ("off", "u={}=a=")]
)
def test_training_and_held_out_prompts_are_rendered_alike(
    chat, tmp_path, monkeypatch, sampled, instructions, first
):
    support.register_toy_task(monkeypatch, InstructedTask)
    config = build_trial(chat, tmp_path, model=ModelSettings(instructions=instructions))
    with worker_cache.open_worker_cache(config) as cache:
        held_out = cache.load_split("validation")
        decode = cache.tokenizer.decode
        texts = [decode(tokens) for tokens in held_out.prompts]
        assert texts == [first.format(problem.prompt) for problem in held_out.problems]
    run_metrics(config)
    prompts = {problem.prompt for problem in ToyTask(SETTINGS).problems("train", 12, 0)}
    assert {prompt for prompt, *_ in sampled} <= prompts
    assert all(decode(tokens) == first.format(prompt) for prompt, tokens, _ in sampled)


def test_a_policy_without_a_template_gets_instructions_as_plain_text(
    policy, tmp_path, monkeypatch, sampled
):
    support.register_toy_task(monkeypatch, InstructedTask)
    instructed, _ = run_metrics(build_trial(policy, tmp_path / "a"))
    assert all(len(tokens) > len("answer") + len(prompt) for prompt, tokens, _ in sampled)
    sampled.clear()
    off = ModelSettings(instructions="off")
    plain, _ = run_metrics(build_trial(policy, tmp_path / "b", model=off))
    assert all(len(tokens) == len(prompt) for prompt, tokens, _ in sampled)
    assert instructed != plain


def test_every_end_token_of_a_chat_policy_ends_a_completion(chat, tmp_path, sampled):
    """The tokenizer's and those that the policy declares, in training as in evaluation."""
    _, tokenizer = load_policy(chat)
    ends = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("z")}
    run_metrics(build_trial(chat, tmp_path, temperature=1.3))
    completions = [tokens for _, _, tokens in sampled]
    assert all(ends.isdisjoint(tokens[:-1]) for tokens in completions)
    assert {tokens[-1] for tokens in completions if len(tokens) < 8} == ends
