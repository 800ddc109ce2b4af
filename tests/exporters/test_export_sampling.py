"""Libraries sample from an exported file as the trial did, whatever the policy's own files say.

Source: `GenerationMixin._prepare_generation_config` of Transformers, which takes what a call leaves
out from the generation config of the model; `prepare_generation_config` of ms-swift 4.6.0;
`GRPOTrainer.__init__` and `_generate_single_turn` of TRL 1.9.0 and 1.16.0.
"""

import ast
import copy
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from huggingface_hub.errors import RevisionNotFoundError
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from gdpo_tune.core.errors import PolicyError
from gdpo_tune.exporters.write_export import export_training
from tests.support.export import export_to, make_page, make_recipe, make_request, parse_settings
from tests.support.packages import download_source
from tests.support.training import build_plain_trainer, write_gpt2

TEMPERATURE = 0.7
ENDS = [1, 5]
HOSTILE = {
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 50,
    "top_p": 0.8,
    "min_p": 0.1,
    "typical_p": 0.5,
    "repetition_penalty": 1.3,
    "no_repeat_ngram_size": 1,
    "suppress_tokens": [20, 21],
    "num_beams": 2,
    "eos_token_id": ENDS,
}


@pytest.fixture
def policy(tmp_path):
    return write_gpt2(tmp_path / "policy", HOSTILE, n_positions=512)


def export(library, policy):
    recipe = make_recipe(f"policy={policy}", f"space.temperature={TEMPERATURE}")
    exported = export_to(library, recipe)
    return exported, parse_settings(exported)


def check_first_token(policy, config, model=None):
    """Compare what `generate` draws from with the policy itself at the trial's temperature."""
    model = model or AutoModelForCausalLM.from_pretrained(policy)
    tokens = torch.tensor([[7, 8, 9, 7, 8]])
    config = copy.deepcopy(config)
    config.update(max_new_tokens=1, output_scores=True, return_dict_in_generate=True)
    scores = model.generate(tokens, generation_config=config).scores[0][0]
    with torch.no_grad():
        own = (model(tokens).logits[0, -1] / TEMPERATURE).softmax(-1)
    assert (scores.softmax(-1) - own).abs().max() < 1e-6
    assert config.do_sample


def test_trl_samples_as_the_trial(policy, tmp_path):
    _, written = export("trl", policy)
    keys = ("temperature", "top_p", "generation_kwargs")
    settings = {key: written[key] for key in keys if key in written}
    config = build_plain_trainer(policy, tmp_path / "run", **settings).generation_config
    assert sorted(config.eos_token_id) == ENDS
    check_first_token(policy, config)


def test_axolotl_samples_and_ends_as_the_trial(policy, tmp_path, monkeypatch):
    exported, written = export("axolotl", policy)
    parent = ModuleType("axolotl.integrations.base")
    parent.BasePlugin = object
    for name in ("axolotl", "axolotl.integrations"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, parent.__name__, parent)
    plugin = {}
    exec(exported.training.others["keep_order.py"], plugin)
    # TRL 1.9 knows the tokenizer's end token alone, and pads behind the others.
    kwargs = {"temperature": written["trl"]["temperature"], "top_p": 1.0, "top_k": 0}
    kwargs |= {"do_sample": True, "repetition_penalty": 1.0, "eos_token_id": 1, "pad_token_id": 0}
    trainer = SimpleNamespace(
        generation_config=GenerationConfig(**kwargs),
        generation_kwargs=kwargs,
        _generate_single_turn=lambda *_: ([[7, 5, 0, 0], [7, 8, 1], [7, 8, 9]], None),
    )
    section = SimpleNamespace(generation_kwargs=written["trl"]["generation_kwargs"])
    plugin["KeepOrder"]().post_trainer_create(SimpleNamespace(trl=section), trainer)
    assert trainer.generation_config.eos_token_id == ENDS
    assert trainer._generate_single_turn() == ([[7, 5], [7, 8, 1], [7, 8, 9]], None)
    check_first_token(policy, trainer.generation_config)


@pytest.mark.slow  # it downloads ms-swift
def test_ms_swift_samples_as_the_trial(policy, tmp_path, monkeypatch):
    source = download_source("ms-swift", tmp_path / "ms-swift") / "swift/infer_engine/utils.py"
    names = {"prepare_generation_config", "_set_generation_config_default_value"}
    text = source.read_text()
    parts = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name in names]
    swift = {"GenerationConfig": GenerationConfig, "fix_do_sample_warning": lambda _: None}
    code = "\n".join(str(ast.get_source_segment(text, part)) for part in parts)
    exec(f"from __future__ import annotations\n{code}", swift)

    exported, written = export("ms-swift", policy)
    callbacks = {}
    module = ModuleType("swift.callbacks")
    vars(module).update(TrainerCallback=object, callbacks_map=callbacks)
    monkeypatch.setitem(sys.modules, "swift", ModuleType("swift"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    _, _, callback = exported.training.ending.partition('REWARDS["length"]')
    exec(callback, {})
    model = AutoModelForCausalLM.from_pretrained(policy)
    for name in written["callbacks"]:
        callbacks[name]().on_train_begin(None, None, None, model=model)
    # As swift/rlhf_trainers/rollout_mixin.py builds it.
    request = SimpleNamespace(max_tokens=written["max_completion_length"], length_penalty=1.0)
    vars(request).update({key: written[key] for key in ("temperature", "top_p", "top_k")})
    vars(request).update(repetition_penalty=1.0, num_beams=1)
    tokenizer = AutoTokenizer.from_pretrained(policy)
    config = swift["prepare_generation_config"](model.generation_config, request, tokenizer)
    assert config.eos_token_id == ENDS
    check_first_token(policy, config, model)


def test_what_vllm_samples_with_is_neutral(policy):
    # Source: `SamplingParams` of vLLM, where -1 and None keep every token, and its engine adds the
    # end tokens of generation_config.json; `configure_generation_config` of NeMo-RL.
    _, verl = export("verl", policy)
    sampler = verl["actor_rollout_ref"]["rollout"]
    assert (sampler["temperature"], sampler["top_p"], sampler["top_k"]) == (TEMPERATURE, 1.0, -1)
    _, nemo_rl = export("nemo-rl", policy)
    assert nemo_rl["policy"]["generation"]["stop_token_ids"] == ENDS
    recipe = make_recipe(f"policy={policy}", "rollout.engine=vllm")
    assert "generation_kwargs" not in export_to("trl", recipe).text  # vLLM would refuse these
    assert parse_settings(export_to("ms-swift", recipe))["top_k"] == -1


def test_a_page_says_what_cannot_be_turned_off(tmp_path):
    policy = write_gpt2(tmp_path / "policy", {"sequence_bias": [[[5], 8.0]]}, n_positions=512)
    assert "applies `sequence_bias`: remove them from" in make_page("trl", f"policy={policy}")
    assert "sampling by the policy's own files" not in make_page("trl")


def test_a_policy_that_is_not_here_has_everything_turned_off():
    recipe = make_recipe("policy=org/nowhere")
    assert recipe.own_decoding is None
    written = parse_settings(export_to("trl", recipe))["generation_kwargs"]
    assert (written["min_p"], written["suppress_tokens"]) == (0.0, [])
    page = make_page("axolotl", "policy=org/nowhere")
    assert "| tokens that end a completion |" in page


def test_an_unknown_revision_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    def refuse(*_, **__):
        answer = SimpleNamespace(headers={}, request=None)
        raise RevisionNotFoundError("Revision Not Found", response=answer)

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", refuse)
    request = make_request(("policy=org/nowhere", "model.revision=v9"))
    with pytest.raises(PolicyError, match=r"'org/nowhere' at revision v9 cannot be loaded .*Check"):
        export_training(request, "trl", "org/nowhere", tmp_path / "out")
    assert not (tmp_path / "out").exists()
