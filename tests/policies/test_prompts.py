"""How prompts are rendered, and which tokenizers are refused for losing tags."""

import json
import re
import shutil

import pytest
from transformers import AddedToken

from gdpo_tune.core import registry
from gdpo_tune.core.errors import PolicyError
from gdpo_tune.core.settings import ModelSettings, TrainingSettings
from gdpo_tune.policies.load_policy import load_policy, resolve_policy
from gdpo_tune.policies.prompt_choice import choose_prompt_format
from gdpo_tune.policies.prompt_format import PromptFormat
from tests.support.tables import cases

INSTRUCTIONS = "Write <think>why</think> and <answer>what</answer>."
CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('') }}{% endif %}" + CHAT


@pytest.fixture
def tokenizer():
    """The embedded policy's, the test's to change."""
    return load_policy("embedded")[1]


def test_without_a_template_the_prompt_is_plain_text(tokenizer):
    assert PromptFormat(tokenizer).render("p") == "p"
    assert PromptFormat(tokenizer, INSTRUCTIONS).render("p") == f"{INSTRUCTIONS}\n\np"
    assert PromptFormat(tokenizer).encode(["1+2", "3"]) == tokenizer(["1+2", "3"])["input_ids"]


def test_with_a_template_the_instructions_are_the_systems(tokenizer):
    tokenizer.chat_template = CHAT
    assert PromptFormat(tokenizer).render("p") == "<|user|>p\n<|assistant|>"
    instructed = PromptFormat(tokenizer, "do it")
    assert instructed.render("p") == "<|system|>do it\n<|user|>p\n<|assistant|>"


def test_a_template_without_a_system_role_gets_them_from_the_user(tokenizer):
    tokenizer.chat_template = NO_SYSTEM
    assert PromptFormat(tokenizer, "do it").render("p") == "<|user|>do it\n\np\n<|assistant|>"


def test_the_tokens_are_the_templates_own(tokenizer):
    """A tokenizer that begins every text with a token must not begin a rendered one again."""
    from tokenizers.processors import TemplateProcessing

    start = tokenizer.pad_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<pad> $A", special_tokens=[("<pad>", start)]
    )
    assert PromptFormat(tokenizer).encode(["7"])[0][0] == start
    tokenizer.chat_template = "<pad>" + CHAT
    messages = [{"role": "user", "content": "7"}]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    (encoded,) = PromptFormat(tokenizer).encode(["7"])
    assert encoded == expected
    assert encoded.count(start) == 1


@cases("policies", "instructions")
def test_policies_that_get_instructions(tokenizer, name, mode, instructed):
    chosen = choose_prompt_format(name, tokenizer, INSTRUCTIONS, ModelSettings(instructions=mode))
    assert bool(chosen.instructions) is instructed


@pytest.mark.parametrize("name", registry.TASKS)
def test_every_task_asks_for_its_format_in_tags_that_its_own_policy_keeps(name):
    info = registry.describe_task(name)
    with info.build(TrainingSettings(length_limit=123)) as task:
        instructions = task.instructions
    assert {"<think>", "</think>"} < set(re.findall(r"</?\w+>", instructions))
    assert "at most 123 tokens" in instructions
    own = load_policy(info.embedded)[1]
    model = ModelSettings(instructions="on")
    chosen = choose_prompt_format(info.embedded, own, instructions, model)
    assert chosen.instructions == instructions


@pytest.mark.parametrize("instructed", [True, False])
def test_a_policy_that_we_trained_is_prompted_as_in_its_training(tokenizer, tmp_path, instructed):
    folder = shutil.copytree(resolve_policy("embedded"), tmp_path / "trained")
    assert choose_prompt_format(str(folder), tokenizer, INSTRUCTIONS, ModelSettings()).instructions
    PromptFormat(tokenizer, INSTRUCTIONS if instructed else "").save(folder)
    text = {"instructions_text": INSTRUCTIONS} if instructed else {}
    assert json.loads((folder / "prompts.json").read_text()) == {"instructions": instructed, **text}
    chosen = choose_prompt_format(str(folder), tokenizer, INSTRUCTIONS, ModelSettings())
    assert bool(chosen.instructions) is instructed


def test_tags_that_are_special_are_refused(tokenizer):
    tokenizer.add_tokens([AddedToken("<tool_call>", special=True)])
    off = ModelSettings(instructions="off")
    with pytest.raises(PolicyError, match=r"does not give back <tool_call>, by which.*AddedToken"):
        choose_prompt_format("embedded", tokenizer, "Use <tool_call> and <think>.", off)
