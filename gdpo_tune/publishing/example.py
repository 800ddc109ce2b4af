"""A prompt for a published policy, in the form in which it read prompts in its training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gdpo_tune.core import task_files
from gdpo_tune.policies.prompt_choice import choose_prompt_format, load_local_tokenizer
from gdpo_tune.policies.prompt_format import PROMPTS_FILE
from gdpo_tune.spec import SweepSpec

PLACEHOLDER = "YOUR PROMPT"


@dataclass(frozen=True)
class Example:
    """A prompt to begin with."""

    text: str
    """What the policy reads; empty if it reads turns of a chat."""
    messages: list[dict[str, str]]
    """Turns for the chat template of its tokenizer; empty without one."""
    is_placeholder: bool
    """True if the reader has to write the prompt itself."""


def build_example(spec: SweepSpec, directory: Path) -> Example | None:
    """Build an example for the policy in a directory.

    Rows of data sets are not published, so their place is marked. None if the directory has no
    tokenizer, or if the task is in a file, whose words are not published either.
    """
    tokenizer = load_local_tokenizer(str(directory))
    if tokenizer is None or task_files.is_task_file(spec.task):
        return None
    with task_files.build_task(spec.task, spec.training, spec.sandbox, spec.data) as task:
        instructions: str = task.instructions
        own = "" if spec.data.source else str(task.problems("test", 1, 0)[0].prompt)
    # A policy that ships knows the format; one that was trained says how it was prompted.
    name = str(directory) if (directory / PROMPTS_FILE).exists() else spec.policy
    arguments = spec.model.chat_template_kwargs, spec.model.template_date
    mode = spec.model.instructions
    style = choose_prompt_format(name, tokenizer, instructions, mode, *arguments)
    prompt = own or PLACEHOLDER
    if tokenizer.chat_template is None:
        return Example(style.render(prompt), [], not own)
    return Example("", style.build_messages(prompt), not own)
