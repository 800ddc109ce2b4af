"""Prompts of published chat templates, written anew from their shape: to the token, everywhere."""

import json
import re
import shutil
from pathlib import Path

import pytest
import trl
from ruamel.yaml import YAML
from tokenizers.processors import TemplateProcessing
from transformers import AddedToken, AutoTokenizer

from gdpo_tune.core.errors import PolicyError
from gdpo_tune.core.settings import ModelSettings
from gdpo_tune.exporters.runtime import process_nemo_prompt
from gdpo_tune.exporters.runtime_prompts import build_prompt
from gdpo_tune.exporters.training_prompts import ExportedPrompts, collect_prompts
from gdpo_tune.exporters.write_export import list_prompt_differences
from gdpo_tune.policies.load_policy import list_end_tokens, load_policy, resolve_policy
from gdpo_tune.policies.prompt_choice import (
    check_template_kwargs,
    choose_prompt_format,
    find_text_prefix,
    read_back,
)
from gdpo_tune.policies.prompt_format import PromptFormat
from gdpo_tune.rewards import answer, block_format
from gdpo_tune.tasks.base import Problem
from tests.support.export import export_to, make_recipe, parse_settings
from tests.support.paths import ROOT

INSTRUCTIONS = "Write <think>why</think> and <answer>what</answer>."
TURNS = "{% for m in messages %}"
SHAPES = YAML(typ="safe").load(ROOT / "tests" / "data" / "chat_templates.yaml")
TEMPLATES = {name: shape["template"] for name, shape in SHAPES.items()}


@pytest.fixture
def tokenizer():
    """The embedded policy's, the test's to change."""
    return load_policy("embedded")[1]


def save_trained(format_, tokenizer, folder):
    """Write the files of a trained policy's directory by which a server prompts it."""
    shutil.copytree(resolve_policy("embedded"), folder, dirs_exist_ok=True)
    tokenizer.save_pretrained(folder)
    format_.save(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_trained_policy_is_prompted_as_in_its_training_everywhere(tokenizer, tmp_path, name):
    """Training, the directory, exports, the card and a second training read the same tokens.

    Source: transformers' apply_chat_template, by which TRL and vLLM prompt a policy by its files;
    OpenWebRL#7 and LC-R1#5 report policies that were delivered with another prompt.
    """
    tokenizer.chat_template = TEMPLATES[name]
    given, day = SHAPES[name].get("arguments", {}), "2025-01-31"
    # One that closes the thought of every prompt cannot ask for another.
    instructions = "Write <answer>what</answer>." if given else INSTRUCTIONS
    model = ModelSettings(chat_template_kwargs=given, template_date=day)
    trained = choose_prompt_format("org/x", tokenizer, instructions, model)
    prompt = "Close this: <div>"
    text, (tokens,) = trained.render(prompt), trained.encode([prompt])
    assert instructions in text
    assert text.endswith(SHAPES[name].get("end", ""))
    assert ("2025" in text) is ("strftime_now" in TEMPLATES[name])
    served = save_trained(trained, tokenizer, tmp_path)
    messages = trained.build_messages(prompt)
    read = served.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert read == tokens
    assert trained.find_left_out() == SHAPES[name].get("left_out", "")
    # A second training, and the example of the card, by the name of the directory.
    again = choose_prompt_format(str(tmp_path), served, instructions, ModelSettings())
    assert again.encode([prompt]) == [tokens]
    # Rows of an export, and the processor of NeMo-RL, with the directory's tokenizer.
    row = build_prompt(Problem(prompt, "any"), trained, instructions, is_chat=True)
    assert row.messages == messages
    for each in (row.messages, messages):
        columns = {"messages": each, "problem": "{}", "task_name": "t"}
        log = process_nemo_prompt(columns, None, served, 10**6, 0, reading={})["message_log"]
        assert log[0]["token_ids"].tolist() == tokens


CHANNELS = (
    TURNS + "<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}"
    "<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "given", "message"),
    [
        (TEMPLATES["qwen3"], {"enable_thinking": False}, "ends every prompt in </think>, but"),
        (CHANNELS, {}, r"begins turns with '<\|channel\|>final<\|message\|>', .* read as 'final'"),
    ],
)
def test_a_template_that_leaves_no_place_for_a_tag_is_refused(tokenizer, template, given, message):
    """Source: the templates of Qwen3 without thinking, and of gpt-oss."""
    marks = ["<|channel|>", "<|message|>", "<|end|>", "<|start|>"]
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in marks], special_tokens=True)
    tokenizer.chat_template = template
    model = ModelSettings(chat_template_kwargs=given)
    with pytest.raises(PolicyError, match=message):
        choose_prompt_format("org/x", tokenizer, INSTRUCTIONS, model)
    if given:  # with what the error asks for
        thinks = model.replace(chat_template_kwargs={"enable_thinking": True})
        choose_prompt_format("org/x", tokenizer, INSTRUCTIONS, thinks)
    choose_prompt_format("org/x", tokenizer, "Be brief.", model)


PUBLISHED = {
    file.stem: file.read_text(encoding="utf-8")
    for file in (Path(trl.__file__).parent / "chat_templates").glob("*.jinja")
    if not file.stem.endswith("_training")
}
"""Chat templates of published policies that TRL ships."""
MARK = re.compile(r"<[|\uff5c][^<>\n{}' ]+?[|\uff5c]>|<(?:start|end)_of_turn>|<turn\|>")
REASONS = {
    "gptoss": "begins turns with '<|channel|>final<|message|>', which rewards read as 'final'",
    "muse_glimmer": "begins turns with ' to=user<|message|>', which rewards read as 'to=user'",
    "qwen3_5_nothink": "ends every prompt in </think>",
    # They want the parts of a message, as policies that read images do.
    **dict.fromkeys(("idefics3", "llava_next", "smolvlm"), "does not write the text of a prompt"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_right_completion_earns_full_marks_under_published_templates(tokenizer, tmp_path, name):
    """A reference as the policy's turn: tokenised, cut, decoded and scored as a sample is.

    Source: TRL's copies of the templates of Cohere, DeepSeek, Gemma, GLM, gpt-oss, LFM2, Llama,
    Nemotron, Phi, Qwen and others.
    """
    marks = [AddedToken(mark, special=True) for mark in sorted(set(MARK.findall(PUBLISHED[name])))]
    tokenizer.add_tokens(marks, special_tokens=True)
    tokenizer.bos_token = tokenizer.eos_token  # the template of Llama 3 writes it
    tokenizer.chat_template = PUBLISHED[name]
    if name in REASONS:
        with pytest.raises(PolicyError, match=re.escape(REASONS[name])):
            choose_prompt_format("org/x", tokenizer, INSTRUCTIONS, ModelSettings())
        return
    prompts = choose_prompt_format("org/x", tokenizer, INSTRUCTIONS, ModelSettings())
    served = save_trained(prompts, tokenizer, tmp_path)
    again = choose_prompt_format(str(tmp_path), served, INSTRUCTIONS, ModelSettings())
    assert again.encode(["2 + 2?"]) == prompts.encode(["2 + 2?"])
    right = "<think>2 + 2 = 4</think>\n<answer>4</answer>"
    turns = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "17171717"}]
    end = served.apply_chat_template(turns, tokenize=False).rpartition("17171717")[2]
    _, (seen,) = read_back(str(tmp_path), "", [f"{right}{end}<eos>And 3 + 3?"])
    assert answer([seen], answer=["4"]) == block_format([seen]) == [1.0]


def test_a_turn_ends_where_the_template_ends_it(tokenizer):
    """Source: tokenizer_config.json of Qwen/Qwen2.5-7B: `<|endoftext|>` ends, ChatML prompts."""
    tokenizer.add_tokens([AddedToken("<|im_end|>", special=True)], special_tokens=True)
    (end,) = tokenizer.convert_tokens_to_ids(["<|im_end|>"])
    tokenizer.chat_template = TEMPLATES["chatml"]
    assert list_end_tokens(tokenizer, None) == (tokenizer.eos_token_id, end)
    assert list_end_tokens(tokenizer, [end]) == (tokenizer.eos_token_id, end)
    start = (tokenizer.pad_token, tokenizer.pad_token_id)  # Llama writes one before every text
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{start[0]} $A", special_tokens=[start]
    )
    assert list_end_tokens(tokenizer, None) == (tokenizer.eos_token_id, end)
    no_turns = "{{ raise_exception('no turns') }}", "a prompt alone<|im_end|>"
    for template in (None, TEMPLATES["echo"], *no_turns):
        tokenizer.chat_template = template
        assert list_end_tokens(tokenizer, None) == (tokenizer.eos_token_id,)


def test_a_template_that_needs_nothing_is_saved_as_it_is(tokenizer, tmp_path):
    tokenizer.chat_template = TEMPLATES["chatml"]
    served = save_trained(PromptFormat(tokenizer), tokenizer, tmp_path)
    assert served.chat_template == TEMPLATES["chatml"]
    assert json.loads((tmp_path / "prompts.json").read_text()) == {"instructions": False}


def test_only_the_tail_of_a_generation_prompt_is_left_out(tokenizer):
    """Turns that are not to be continued are rendered as by the policy's own template."""
    tokenizer.chat_template = "  \n" + TEMPLATES["deepseek r1"]
    fixed = PromptFormat(tokenizer).template
    turns = [{"role": "user", "content": "a<think>\n"}]
    own = tokenizer.apply_chat_template(turns, tokenize=False)
    assert tokenizer.apply_chat_template(turns, tokenize=False, chat_template=fixed) == own


@pytest.mark.parametrize("marker", ["<assistant>\n", "<reserved_107>", "<AI>"])
def test_the_marker_of_the_assistant_stays(tokenizer, marker):
    """Source: trl#6966, open-r1#560; the templates of MiniCPM and Baichuan2 end in such markers."""
    tokenizer.chat_template = TURNS + "[{{ m.content }}]{% endfor %}{{ " + repr(marker) + " }}"
    assert PromptFormat(tokenizer).render("7") == f"[7]{marker}"


def test_a_tag_that_the_task_names_is_left_to_the_policy(tokenizer):
    tokenizer.chat_template = TURNS + "{{ m.content }}{% endfor %}[A]{{ '<reason>\\n' }}"
    off = ModelSettings(instructions="off")
    asked = choose_prompt_format("org/x", tokenizer, "Write <reason>why</reason>.", off)
    assert asked.render("7") == "7[A]"
    other = choose_prompt_format("org/x", tokenizer, "Write <answer>7</answer>.", off)
    assert other.render("7") == "7[A]<reason>\n"


@pytest.mark.parametrize(
    "template",
    [
        TEMPLATES["phi3"],
        TURNS + "{% if m.role == 'user' %}{{ m.content | e }}{% endif %}{% endfor %}",
        TURNS + "{% if loop.last and m.role == 'user' %}{{ m.content | trim | upper }}{% endif %}"
        "{% endfor %}",
    ],
)
def test_instructions_reach_a_template_without_a_system_role(tokenizer, template):
    """Source: transformers#30545; docs/policies.md: then both are the user message."""
    tokenizer.chat_template = template
    (first, *_) = PromptFormat(tokenizer, "  do it now ").build_messages("p")
    assert "do it now" in first["content"]
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "p"}]
    (only,) = PromptFormat(tokenizer, "do it").build_messages(turns)
    assert only == {"role": "user", "content": "do it\n\nbe brief\n\np"}


def test_a_template_that_escapes_has_a_system_role(tokenizer):
    tokenizer.chat_template = TURNS + "[{{ m.role }}]{{ m.content | trim | e }}{% endfor %}"
    assert PromptFormat(tokenizer, "1 < 2 ").render("p") == "[system]1 &lt; 2[user]p"


def test_turns_of_a_chat_go_to_the_template_as_they_are(tokenizer):
    tokenizer.chat_template = TEMPLATES["chatml"]
    turns = [{"role": r, "content": t} for r, t in zip(("system", "user"), "su", strict=True)]
    assert PromptFormat(tokenizer).build_messages(turns) == turns
    above = PromptFormat(tokenizer, "do it").build_messages(turns)
    assert above == [{"role": "system", "content": "do it\n\ns"}, turns[1]]
    tokenizer.chat_template = None
    with pytest.raises(PolicyError, match="no chat template"):
        PromptFormat(tokenizer).encode([turns])


def test_turns_that_a_template_refuses_are_refused_with_its_reason(tokenizer):
    tokenizer.chat_template = "{% if messages[-1].role != 'user' %}{{ raise_exception('end with a "
    tokenizer.chat_template += "user') }}{% endif %}" + TURNS + "{{ m.content }}{% endfor %}"
    turns = [{"role": role, "content": "7"} for role in ("user", "assistant")]
    with pytest.raises(PolicyError, match="roles user, assistant: end with a user"):
        PromptFormat(tokenizer).render(turns)


def test_a_template_that_drops_the_prompt_is_refused(tokenizer):
    """A template for parts of images and texts iterates over the letters of a text."""
    tokenizer.chat_template = TURNS + "{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    with pytest.raises(PolicyError, match="does not write the text of a prompt"):
        PromptFormat(tokenizer).render("7")


def test_a_prompt_does_not_end_in_the_end_token(tokenizer, tmp_path):
    """Source: trlx#287: a prompt that is continued does not end in it; a start token stays."""
    end, start = tokenizer.eos_token_id, tokenizer.pad_token_id
    plain = tokenizer("7", add_special_tokens=False)["input_ids"]
    names = [(tokenizer.eos_token, end), (tokenizer.pad_token, start)]
    for front, kept in (("", []), (f"{names[1][0]} ", [start])):
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{front}$A {names[0][0]}", special_tokens=names
        )
        assert PromptFormat(tokenizer).encode(["7"]) == [[*kept, *plain]]
        save_trained(PromptFormat(tokenizer), tokenizer, tmp_path)
        assert find_text_prefix(str(tmp_path)) == front.strip()
        noted = json.loads((tmp_path / "prompts.json").read_text())
        assert noted["left_out_at_the_end"] == tokenizer.eos_token


def test_arguments_that_a_template_does_not_read_are_refused():
    """Jinja ignores an argument that no template reads, so a misspelt one would do nothing."""
    check_template_kwargs("p", TEMPLATES["qwen3"], {"enable_thinking": True})
    check_template_kwargs("p", None, {"enable_thinking": True})
    for template in (TEMPLATES["qwen3"], ""):
        with pytest.raises(PolicyError, match=r"chat_template_kwargs\.thinking = true.*no effect"):
            check_template_kwargs("p", template, {"thinking": True})


def test_a_later_argument_overrides_that_of_the_training(tokenizer, tmp_path):
    tokenizer.chat_template = TEMPLATES["qwen3"]
    served = save_trained(
        PromptFormat(tokenizer, template_kwargs={"enable_thinking": False}), tokenizer, tmp_path
    )
    assert PromptFormat(served).render("7").endswith("</think>\n\n")
    thinking = PromptFormat(served, template_kwargs={"enable_thinking": True})
    assert thinking.render("7").endswith("assistant\n")


def test_exports_say_or_set_what_a_template_reads(tokenizer, tmp_path):
    """Source: GRPOConfig.chat_template_kwargs in TRL 1.16, data.apply_chat_template_kwargs in verl.

    The others render by the policy's own template, so the page names the file to use in its place.
    """
    policy = shutil.copytree(resolve_policy("embedded"), tmp_path / "policy")
    tokenizer.chat_template = TEMPLATES["llama3"] + "{{ '<think>\\n' if not enable_thinking }}"
    tokenizer.save_pretrained(policy)
    changes = [f"policy={policy}", "model.chat_template_kwargs.enable_thinking=false"]
    recipe = make_recipe(*changes, "model.template_date=2025-01-31")
    reader = collect_prompts(recipe).reader
    for library, topics in {
        "trl": ["end of a prompt", "date in a prompt"],
        "axolotl": ["end of a prompt", "date in a prompt", "arguments of the chat template"],
        "nemo-rl": [],
    }.items():
        exported = export_to(library, recipe)
        prompts = ExportedPrompts([], INSTRUCTIONS, reader)
        rows = list_prompt_differences(prompts, recipe, exported)
        assert [row.topic for row in rows] == topics
    assert parse_settings(export_to("trl", recipe))["chat_template_kwargs"] == {
        "enable_thinking": False
    }
    verl = parse_settings(export_to("verl", recipe))["data"]
    assert verl["apply_chat_template_kwargs"] == {"enable_thinking": False}
