"""Prompts as a policy reads them: through its chat template if it has one, else as plain text.

An export carries this module.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPTS_FILE = "prompts.json"
"""File in a policy's directory that says whether it was trained with instructions."""
_OPENED = re.compile(r"<\w+>\s*$")
"""A tag at the end of a rendered prompt, such as the `<think>` of some reasoning policies."""


@dataclass(frozen=True)
class PromptFormat:
    """Converter from prompts of a task to the tokens that a policy reads before its completion."""

    tokenizer: PreTrainedTokenizerBase
    instructions: str = ""
    """Text before every prompt; may be empty."""

    def render(self, prompt: str) -> str:
        """Return the text that the policy reads.

        With a chat template, the instructions are the system message and the prompt is the user
        message; a template without a system role gets both as the user message. Without a chat
        template, the instructions stand above the prompt.
        """
        if self.tokenizer.chat_template is None:
            return f"{self.instructions}\n\n{prompt}" if self.instructions else prompt
        # The completion is judged from its first tag on, so the policy has to write it itself.
        return _OPENED.sub("", self._apply_template(self.build_messages(prompt)))

    def build_messages(self, prompt: str) -> list[dict[str, str]]:
        """Return the turns that the chat template gets, each with `role` and `content`."""
        user = {"role": "user", "content": prompt}
        if not self.instructions:
            return [user]
        if self._has_system_role:
            return [{"role": "system", "content": self.instructions}, user]
        return [{"role": "user", "content": f"{self.instructions}\n\n{prompt}"}]

    def find_opened_tag(self) -> str:
        """Return the tag that the chat template opens at the end of a prompt; empty if none."""
        if self.tokenizer.chat_template is None:
            return ""
        opened = _OPENED.search(self._apply_template(self.build_messages("x")))
        return opened[0].strip() if opened else ""

    def encode(self, prompts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of P prompts; a template writes its own special tokens."""
        tokenize: Any = self.tokenizer
        special = self.tokenizer.chat_template is None
        texts = [self.render(prompt) for prompt in prompts]
        return tokenize(texts, add_special_tokens=special)["input_ids"]

    def save(self, directory: Path) -> None:
        """Record in a trained policy's directory whether it was trained with instructions."""
        text = json.dumps({"instructions": bool(self.instructions)})
        (directory / PROMPTS_FILE).write_text(text, encoding="utf-8")

    @functools.cached_property
    def _has_system_role(self) -> bool:
        from jinja2 import TemplateError

        try:
            self._apply_template(
                [{"role": "system", "content": "x"}, {"role": "user", "content": "x"}]
            )
        except TemplateError:
            return False
        return True

    def _apply_template(self, turns: list[dict[str, str]]) -> str:
        rendered = self.tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, tokenize=False
        )
        return str(rendered)
