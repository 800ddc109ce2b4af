"""Choice of how a policy reads prompts, by its name and its tokenizer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gdpo_tune.core.errors import PolicyError
from gdpo_tune.core.registry import POLICIES
from gdpo_tune.policies.load_policy import find_local_directory, resolve_policy
from gdpo_tune.policies.prompt_format import PROMPTS_FILE, PromptFormat

__all__ = ["PROMPTS_FILE", "PromptFormat"]

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENIZER_FILE = "tokenizer_config.json"
_TAG = re.compile(r"</?\w+>")


def choose_prompt_format(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    instructions: str,
    mode: Literal["auto", "on", "off"],
) -> PromptFormat:
    """Choose how the policy `name` reads the prompts of a task.

    `instructions` are the task's. With the mode `auto`, a policy that was trained here gets them if
    it was trained with them; a policy that ships gets none; every other policy does.

    Raises:
        PolicyError: a tag that the instructions name is lost between tokens and text.
    """
    return PromptFormat(tokenizer, choose_instructions(name, tokenizer, instructions, mode))


def choose_instructions(
    name: str,
    tokenizer: PreTrainedTokenizerBase | None,
    instructions: str,
    mode: Literal["auto", "on", "off"],
) -> str:
    """Return the instructions that the policy `name` gets, which may be empty.

    See `choose_prompt_format`. A tokenizer that is not at hand, None, is not checked.

    Raises:
        PolicyError: a tag that the instructions name is lost between tokens and text.
    """
    if tokenizer is not None:
        check_tags(name, tokenizer, instructions)
    is_instructed = _needs_instructions(name) if mode == "auto" else mode == "on"
    return instructions if is_instructed else ""


def _needs_instructions(name: str) -> bool:
    file = Path(resolve_policy(name)) / PROMPTS_FILE
    if name in POLICIES or not file.is_file():
        return name not in POLICIES
    return bool(json.loads(file.read_text(encoding="utf-8"))["instructions"])


def load_local_tokenizer(name: str, revision: str = "") -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of a policy; None if it is not on this machine."""
    directory = _find_tokenizer(name, revision)
    if directory is None:
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def find_text_prefix(name: str, revision: str = "") -> str:
    """Return the special tokens that the tokenizer of a policy writes above a plain text.

    Empty if there are none, or if it is not on this machine.
    """
    tokenizer: Any = load_local_tokenizer(name, revision)
    return "" if tokenizer is None else str(tokenizer.decode(tokenizer("")["input_ids"]))


def has_chat_template(name: str, revision: str = "") -> bool | None:
    """Return whether a policy has a chat template; None if it is not on this machine."""
    directory = _find_tokenizer(name, revision)
    if directory is None:
        return None
    if (directory / "chat_template.jinja").is_file():
        return True
    return "chat_template" in json.loads((directory / _TOKENIZER_FILE).read_text(encoding="utf-8"))


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
