"""Prompts as a policy reads them: through its chat template if it has one, else as plain text."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdpo_tune.core.errors import PolicyError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPTS_FILE = "prompts.json"
"""File in a policy's directory that says how it was prompted in its training."""
TEMPLATE_FILE = "chat_template.jinja"
"""File in which Transformers saves the chat template of a tokenizer."""
CLOCK = "strftime_now"
"""Function that Transformers and vLLM give to chat templates."""
FIXED_DATE = "2024-07-26"
"""Date in prompts where none is given: the one that Llama 3.1's template writes without a clock."""
THOUGHT_TAGS = ("<think>", "<thinking>", "<thought>", "<reasoning>")
"""Tags that some chat templates open for the policy, and that it writes itself here."""
_DIRECTIVE = re.compile(r"%[-#]?[aAbBcdDeFhHIjmMpSTuUVwWxXyYzZ]")
"""Part of a date in a call of `strftime_now`."""
_PROBES = ("2718281828", "3141592653")
"""Contents of a system and a user turn that templates may trim or escape without a change."""
Turns = Sequence[Mapping[str, str]]
"""Turns of a chat, each with `role` and `content`."""


@dataclass(frozen=True)
class PromptFormat:
    """Converter from prompts of a task to the tokens that a policy reads before its completion."""

    tokenizer: PreTrainedTokenizerBase
    instructions: str = ""
    """Text before every prompt; may be empty."""
    tags: Sequence[str] = THOUGHT_TAGS
    """Tags that a chat template may open at the end of a prompt, and that are left to the policy.

    A completion is judged from its first tag on. Any other tag there is the assistant's marker.
    """
    template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of the chat template, such as `enable_thinking`."""
    date: str = ""
    """Date that the chat template writes as today's, `2026-01-31`; empty for `FIXED_DATE`."""
    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas of tools that the chat template may write."""

    def render(self, prompt: str | Turns) -> str:
        """Return the text that the policy reads for a prompt, which is a text or turns of a chat.

        Without a chat template, the instructions stand above the prompt; see `build_messages`.

        Raises:
            PolicyError: the chat template refuses or does not write the prompt, or there is none
                for turns.
        """
        if self.template is not None:
            return self._apply(self.template, self.build_messages(prompt))
        if not isinstance(prompt, str):
            raise PolicyError(
                "the prompts are turns of a chat, and the tokenizer has no chat template: give "
                "prompts as texts, or set tokenizer.chat_template and save it with the policy"
            )
        return f"{self.instructions}\n\n{prompt}" if self.instructions else prompt

    def build_messages(self, prompt: str | Turns) -> list[dict[str, str]]:
        """Return the turns that the chat template gets; a text is a user turn.

        Instructions are a system turn, above the text of one that is there. For a template that
        does not write a system turn, both stand above the text of the first user turn.
        """
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        turns = [dict(turn) for turn in prompt]
        texts = [self.instructions] if self.instructions else []
        if turns[0]["role"] == "system" and (texts or not self._has_system_role):
            texts.append(turns.pop(0)["content"])
        if not texts:
            return turns
        if self._has_system_role:
            return [{"role": "system", "content": "\n\n".join(texts)}, *turns]
        first = next((turn for turn in turns if turn["role"] == "user"), turns[0])
        first["content"] = "\n\n".join([*texts, first["content"]])
        return turns

    def encode(self, prompts: Sequence[str | Turns]) -> list[list[int]]:
        """Return the tokens of P prompts; a template writes its own special tokens.

        A plain text begins with the tokenizer's special tokens and does not end in them: the policy
        continues it.
        """
        tokenize: Any = self.tokenizer
        start = find_added_tokens(self.tokenizer)[0] if self.template is None else []
        texts = [self.render(prompt) for prompt in prompts]
        return [[*start, *ids] for ids in tokenize(texts, add_special_tokens=False)["input_ids"]]

    @property
    def own_template(self) -> str:
        """Chat template of the tokenizer; empty if it has none."""
        return str(self.tokenizer.get_chat_template()) if self.tokenizer.chat_template else ""

    @functools.cached_property
    def template(self) -> str | None:
        """Chat template that writes every prompt as the policy reads it; None for plain text.

        It is the tokenizer's own if that depends neither on arguments nor on the date and opens no
        tag. It needs nothing but the turns, so it is saved with a trained policy.
        """
        if not self.own_template:
            return None
        fixed, end = self._fixed_template, self._opened
        return drop_prompt_suffix(fixed, end) if end else fixed

    def find_left_out(self) -> str:
        """Return what stands at the end of a prompt elsewhere and is left out here; often empty.

        It is a tag that the chat template opens, or the end token of a plain text.
        """
        if self.template is not None:
            return self._opened.strip()
        return str(self.tokenizer.decode(find_added_tokens(self.tokenizer)[1]))

    def find_contradiction(self, tags: Collection[str]) -> str:
        """Return why no completion can begin with one of `tags` in this template; empty if it can.

        Either prompts end in a closed block of such a tag, or the policy's own turns begin with a
        text, as those of channels do.
        """
        if self.template is None:
            return ""
        prompt = self._apply(self.template, [{"role": "user", "content": _PROBES[0]}])
        closed = re.search(r"</(\w+)>\s*$", prompt)
        if closed and f"<{closed[1]}>" in tags:
            return f"its chat template ends every prompt in {closed[0].strip()}"
        turn = _write_turn(self.tokenizer, self._fixed_template).rpartition(_PROBES[1])[0]
        begin = turn.removeprefix(prompt) if turn.startswith(prompt) else ""
        codec: Any = self.tokenizer
        begin = re.sub(r"<(\w+)>\s*</\1>", "", begin)  # an empty thought, which tasks allow
        ids = codec(begin, add_special_tokens=False)["input_ids"]
        seen = str(codec.decode(ids, skip_special_tokens=True)).strip()
        if not seen or _list_special(self.tokenizer).isdisjoint(ids):
            return ""
        return f"its chat template begins turns with {begin!r}, which rewards read as {seen!r}"

    def save(self, directory: Path) -> None:
        """Make a trained policy's directory prompt it as in its training, and record how that was.

        The directory holds the tokenizer already. Its chat template then needs nothing but turns.
        """
        record: dict[str, object] = {"instructions": bool(self.instructions)}
        if self.instructions:
            record["instructions_text"] = self.instructions
        if end := self.find_left_out():
            record["left_out_at_the_end"] = end
        if self.template is not None and self.template != self.own_template:
            (directory / TEMPLATE_FILE).write_text(self.template, encoding="utf-8")
            record["chat_template_kwargs"] = dict(self.template_kwargs)
            record["template_date"] = self.date or FIXED_DATE
        text = json.dumps(record, ensure_ascii=False)
        (directory / PROMPTS_FILE).write_text(text, encoding="utf-8")

    @functools.cached_property
    def _fixed_template(self) -> str:
        return fix_arguments(self.own_template, self.template_kwargs, self.date or FIXED_DATE)

    @functools.cached_property
    def _opened(self) -> str:
        """End of every prompt that is left to the policy: a tag and what follows it."""
        text = self._apply(self._fixed_template, self.build_messages(_PROBES[1]))
        if _PROBES[1] not in text:
            raise PolicyError(
                "the chat template does not write the text of a prompt: set a template for turns "
                "whose content is a text as tokenizer.chat_template, and save it with the policy"
            )
        opened = re.search(r"(<\w+>)\s*$", text.rpartition(_PROBES[1])[2])
        return opened[0] if opened and opened[1] in self.tags else ""

    @functools.cached_property
    def _has_system_role(self) -> bool:
        """Whether the template writes a system turn, and the user turn below it.

        A template without the role may raise an error or leave out either text.
        """
        system, user = _PROBES
        turns = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        try:
            text = self._apply(self._fixed_template, turns)
        except PolicyError:
            return False
        return all(probe in text for probe in _PROBES)

    def _apply(self, template: str, turns: list[dict[str, str]]) -> str:
        from jinja2 import TemplateError

        options: dict[str, Any] = {"chat_template": template, "tokenize": False}
        options["tools"] = [*self.tools] or None
        try:
            text = self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, **options)
        except TemplateError as error:
            roles = ", ".join(turn["role"] for turn in turns)
            raise PolicyError(
                f"the chat template refuses turns of the roles {roles}: {error}: give turns in the "
                "order that it expects, or set another as tokenizer.chat_template"
            ) from error
        return str(text)


def fix_arguments(template: str, values: Mapping[str, Any], date: str) -> str:
    """Return a chat template with defaults for its arguments, and with a date for its clock.

    Every name of `values`, JSON scalars, has its value where the caller gives none. `strftime_now`,
    which Transformers and vLLM define, gives midnight of `date` in every format.
    """
    # The line breaks are Jinja's to remove, so the rest of the template is rendered as it was.
    head = "".join(
        f"{{% if {name} is not defined %}}{{% set {name} = "
        f"{json.dumps(value, ensure_ascii=False)} %}}{{% endif %}}\n"
        for name, value in values.items()
    )
    if CLOCK in template and f"macro {CLOCK}" not in template:
        day = datetime.fromisoformat(date)
        replaced = "".join(
            f" | replace({json.dumps(part)}, {json.dumps(day.strftime(part))})"
            for part in sorted(set(_DIRECTIVE.findall(template)))
        )
        head += f"{{% macro {CLOCK}(format) %}}{{{{ format{replaced} }}}}{{% endmacro %}}\n"
    return template if template.startswith(head) else head + template


def drop_prompt_suffix(template: str, end: str) -> str:
    """Return a chat template whose generation prompt lacks the suffix `end`."""
    # Jinja drops one line break at the end of a template; the empty text keeps its spaces.
    body = template.removesuffix("\n") + "{{ '' }}{% endset %}"
    text = json.dumps(end)
    return (
        f"{{% set whole_prompt %}}\n{body}{{% if add_generation_prompt and "
        f"whole_prompt.endswith({text}) %}}{{{{ whole_prompt[:-{len(end)}] }}}}"
        "{% else %}{{ whole_prompt }}{% endif %}"
    )


def find_turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the special token with which a chat template ends a turn of the policy, if any.

    Base policies often have a template and another end token: Qwen2.5-7B does.
    """
    text = _write_turn(tokenizer, tokenizer.chat_template and tokenizer.get_chat_template())
    ids: Any = tokenizer(text.rpartition(_PROBES[1])[2], add_special_tokens=False)["input_ids"]
    special = _list_special(tokenizer)
    return next((token for token in ids if token in special), None)


def _list_special(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    return {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}


def _write_turn(tokenizer: PreTrainedTokenizerBase, template: Any) -> str:
    """Return a prompt and a turn of the policy, `_PROBES`, as text; empty if it is not written."""
    from jinja2 import TemplateError

    roles = zip(("user", "assistant"), _PROBES, strict=True)
    turns = [{"role": role, "content": content} for role, content in roles]
    try:
        text = template and tokenizer.apply_chat_template(
            turns, chat_template=template, tokenize=False
        )
    except TemplateError:
        return ""
    return str(text) if text and _PROBES[1] in text else ""


def find_added_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the tokens that a tokenizer prepends and appends to plain text."""
    codec: Any = tokenizer
    plain: list[int] = codec("a 1", add_special_tokens=False)["input_ids"]
    whole: list[int] = codec("a 1")["input_ids"]
    starts = range(len(whole) - len(plain) + 1)
    start = next((n for n in starts if whole[n : n + len(plain)] == plain), 0)
    return whole[:start], whole[start + len(plain) :]
