"""Choice of how a policy reads prompts, by its name and its tokenizer."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gdpo_tune.core.errors import PolicyError, get_first_line
from gdpo_tune.core.registry import POLICIES
from gdpo_tune.core.task_info import ToolFormat
from gdpo_tune.policies.load_policy import (
    find_local_directory,
    list_end_tokens,
    read_own_decoding,
    resolve_policy,
)
from gdpo_tune.policies.prompt_format import (
    PROMPTS_FILE,
    TEMPLATE_FILE,
    THOUGHT_TAGS,
    PromptFormat,
    find_added_tokens,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from gdpo_tune.core.settings import ModelSettings


_TOKENIZER_FILE = "tokenizer_config.json"
_TAG = re.compile(r"</?\w+>")


def choose_prompt_format(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    instructions: str,
    model: ModelSettings,
    tools: ToolFormat | None = None,
) -> PromptFormat:
    """Choose how the policy `name` reads the prompts of a task with these instructions.

    The chat template opens no tag that the instructions name: the policy writes it itself, whether
    it gets the instructions or not. See `choose_instructions` for `model.instructions`, and
    `prepare_tools` for `tools`.

    Raises:
        PolicyError: a tag that the instructions name is lost between tokens and text, or the chat
            template leaves no place for it, or reads no argument of this name.
    """
    if tools is not None:
        prepare_tools(name, tokenizer, tools)
    chosen = choose_instructions(name, tokenizer, instructions, model.instructions)
    given, tags = model.chat_template_kwargs, list_own_tags(instructions)
    schemas = tools.schemas if tools else ()
    prompts = PromptFormat(tokenizer, chosen, tags, given, model.template_date, schemas)
    check_template_kwargs(name, prompts.own_template, given)
    named = _TAG.findall(instructions)
    if named and (reason := prompts.find_contradiction(named)):
        raise PolicyError(
            f"policy {name!r}: {reason}, but the task rewards completions that begin with "
            f"{named[0]}: set model.chat_template_kwargs so that the policy thinks, such as "
            "enable_thinking: true, or train a task of your own whose rewards need no tag"
        )
    return prompts


def prepare_tools(name: str, tokenizer: PreTrainedTokenizerBase, tools: ToolFormat) -> None:
    """Give the tokenizer of the policy `name` templates that write and read calls of tools.

    A chat template that writes earlier turns in another way once a later one follows is replaced by
    TRL's for trainings. A call that it writes is read back.

    Raises:
        PolicyError: a template lacks tools, or the two do not fit.
    """
    from trl import chat_template_utils as templates  # late: it imports torch

    codec: Any = tokenizer
    codec.chat_template = tools.chat_template or codec.chat_template
    codec.response_template = tools.response_template or codec.response_template
    call = {"name": tools.schemas[0]["function"]["name"], "arguments": {}}
    calls = [{"type": "function", "function": call}]
    asked = [{"role": "user", "content": "1"}]
    answered = [*asked, {"role": "assistant", "content": "", "tool_calls": calls}]
    write = functools.partial(codec.apply_chat_template, tokenize=True, return_dict=False)
    try:
        if not templates.supports_tool_calling(codec):
            raise ValueError("there is no chat template that writes calls of tools and answers")
        if codec.response_template is None:
            templates.add_response_schema(codec)
        if not templates.is_chat_template_prefix_preserving(codec):
            codec.chat_template = templates.get_training_chat_template(codec)
        prompt, whole = write(asked, add_generation_prompt=True), write(answered)
        pairs = enumerate(zip(prompt, whole, strict=False))
        start = next((row for row, (one, other) in pairs if one != other), len(prompt))
        found = templates.parse_response(codec, whole[start:], whole[:start], [*tools.schemas])
        if found.get("tool_calls") != calls:
            raise ValueError(f"the call {codec.decode(whole[start:])!r} is read as {found}")
    except ValueError as error:
        raise PolicyError(
            f"policy {name!r} cannot call tools: {get_first_line(error)}: train one that can, such "
            "as Qwen/Qwen2.5-0.5B-Instruct, or give the class of the task a chat_template and a "
            "response_template (docs/tools.md)"
        ) from error


def list_own_tags(instructions: str) -> tuple[str, ...]:
    """Return the tags that a policy writes itself under a task with these instructions."""
    return tuple(dict.fromkeys((*THOUGHT_TAGS, *_TAG.findall(instructions))))


def check_template_kwargs(name: str, template: str | None, given: Mapping[str, Any]) -> None:
    """Refuse arguments that a chat template does not read: they would have no effect.

    The template of the policy `name` is empty if it has none; None, not known yet, passes.

    Raises:
        PolicyError: the template lacks such a word.
    """
    for word, value in given.items():
        if template is not None and not re.search(rf"\b{word}\b", template):
            raise PolicyError(
                f"model.chat_template_kwargs.{word} = {json.dumps(value)}: policy {name!r} has no "
                "chat template that reads it, so it would have no effect: remove it, or correct "
                "its name"
            )


def choose_instructions(
    name: str,
    tokenizer: PreTrainedTokenizerBase | None,
    instructions: str,
    mode: Literal["auto", "on", "off"],
) -> str:
    """Return those of a task's instructions that the policy `name` gets: all or none.

    With the mode `auto`, a policy that was trained here gets them if it was trained with them; a
    policy that ships gets none; every other policy does. A tokenizer that is not at hand, None, is
    not checked.

    Raises:
        PolicyError: a tag that the instructions name is lost between tokens and text.
    """
    if tokenizer is not None:
        check_tags(name, tokenizer, instructions)
    is_instructed = mode == "on" or (mode == "auto" and name not in POLICIES)
    record = Path(resolve_policy(name)) / PROMPTS_FILE
    if is_instructed and mode == "auto" and record.is_file():
        is_instructed = json.loads(record.read_text(encoding="utf-8"))["instructions"]
    return instructions if is_instructed else ""


def load_local_tokenizer(name: str, revision: str = "") -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of a policy; None if it is not on this machine."""
    directory = _find_tokenizer(name, revision)
    if directory is None:
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def find_text_prefix(name: str, revision: str = "") -> str:
    """Return the special tokens that the tokenizer of a policy prepends to plain text.

    Empty if there are none, or if it is not on this machine.
    """
    tokenizer: Any = load_local_tokenizer(name, revision)
    return "" if tokenizer is None else str(tokenizer.decode(find_added_tokens(tokenizer)[0]))


def read_chat_template(name: str, revision: str = "") -> str | None:
    """Return the text of a policy's chat templates, without loading its tokenizer.

    Empty if it has none; None if it is not on this machine.
    """
    directory = _find_tokenizer(name, revision)
    if directory is None:
        return None
    if (directory / TEMPLATE_FILE).is_file():
        return (directory / TEMPLATE_FILE).read_text(encoding="utf-8")
    settings = json.loads((directory / _TOKENIZER_FILE).read_text(encoding="utf-8"))
    return str(settings.get("chat_template") or "")


def read_back(
    name: str, revision: str, completions: Sequence[str]
) -> tuple[list[list[int]], Sequence[str]]:
    """Return the tokens of N completions, and their texts as rewards would see them.

    Each is cut at its first end token and closed with one, as if a policy had written it. Without
    a tokenizer on this machine there are no tokens, and the texts are as they were.
    """
    tokenizer: Any = load_local_tokenizer(name, revision)
    if tokenizer is None:
        return [], completions
    own = read_own_decoding(name, revision) or {}
    ends = list_end_tokens(tokenizer, own.get("eos_token_id"))
    written = tokenizer(list(completions), add_special_tokens=False)["input_ids"]
    rows = [[*takewhile(lambda token: token not in ends, row), ends[0]] for row in written]
    return rows, tokenizer.batch_decode(rows, skip_special_tokens=True)


def _find_tokenizer(name: str, revision: str) -> Path | None:
    directory = find_local_directory(name, revision)
    return directory if directory and (directory / _TOKENIZER_FILE).is_file() else None


def check_tags(name: str, tokenizer: PreTrainedTokenizerBase, instructions: str) -> None:
    """Refuse a tokenizer that loses tags which rewards need.

    Raises:
        PolicyError: decoding without special tokens does not give back a tag.
    """
    codec: Any = tokenizer

    def is_lost(tag: str) -> bool:
        tokens = codec.encode(f"1{tag}2", add_special_tokens=False)
        return tag not in str(codec.decode(tokens, skip_special_tokens=True))

    lost = list(filter(is_lost, dict.fromkeys(_TAG.findall(instructions))))
    if lost:
        raise PolicyError(
            f"policy {name!r}: its tokenizer does not give back {', '.join(lost)}, by which the "
            "task judges completions: such a tag is a special token, or unknown. Make it an "
            "ordinary one, tokenizer.add_tokens([AddedToken(tag, special=False)]), resize the "
            "embeddings, save both and give that directory"
        )
