"""Turns of a policy and its tools without a trainer: held-out completions and demonstrations.

The loop is TRL's own, on an object that has what it reads of a trainer. So tools are called, cut
and told of errors in an evaluation as they are in training.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from trl.chat_template_utils import parse_response
from trl.trainer.grpo_trainer import GRPOTrainer

from gdpo_tune.core.text import join_turns
from gdpo_tune.policies.prompt_format import PromptFormat
from gdpo_tune.tasks.base import Problem
from gdpo_tune.tasks.custom import TOOL_ERROR

Sample = Callable[[Sequence[Sequence[int]]], list[list[int]]]
"""Gets the tokens of N conversations, and returns those of the policy's next turn in each."""


def encode_answers(trainer: Any, answers: Sequence[dict[str, Any]]) -> list[int]:
    """Return TRL's tokens of messages of tools, without halves of characters.

    JSON of a call may have one as an escape, a tool may repeat it, and no tokenizer reads it.
    """
    for answer in answers:
        for key in ("name", "content"):
            answer[key] = answer[key].encode(errors="replace").decode()
    tokens: list[int] = vars(GRPOTrainer)["_get_tool_suffix_ids"](trainer, answers)
    return tokens


class TurnLoop:
    """Run TRL's loop of turns without a trainer: it has the attributes that the loop reads."""

    _is_vlm = use_vllm = False
    environment_factories = None
    _get_tool_suffix_ids = encode_answers

    def __init__(
        self, task: Any, prompts: PromptFormat, longest: int, positions: int, iterations: int
    ) -> None:
        """Call the tools of `task` in at most `iterations` turns of a completion.

        A completion has at most `longest` tokens, and with its prompt fewer than `positions`.
        """
        self.tools: Any = prompts.tools
        self.processing_class = self._tokenizer = prompts.tokenizer
        self.chat_template, self.chat_template_kwargs = prompts.template, dict[str, Any]()
        self.max_completion_length, self.max_tool_calling_iterations = longest, iterations
        self.model = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=positions))
        self._named = {tool.__name__: tool for tool in task.tools}

    def run(
        self, problems: Sequence[Problem], prompts: Sequence[Sequence[int]], sample: Sample
    ) -> tuple[list[Any], list[list[int]], list[list[int]]]:
        """Return N completions: messages, tokens after `prompts`, and 1 for the policy's own."""
        starts = [list(prompt) for prompt in prompts]
        first = sample(starts)
        turns = [
            [parse_response(self._tokenizer, ids, prefix=start, tools=self.tools)]
            for start, ids in zip(starts, first, strict=True)
        ]
        self._sync_tool_dicts, self._async_tool_dicts = (
            [named] * len(starts) for named in (self._named, {})
        )

        def sample_turn(tokens: list[list[int]], *_: Any, **__: Any) -> tuple[Any, None]:
            return sample(tokens), None

        self._generate_single_turn = sample_turn
        asked = copy.deepcopy([list(problem.turns) for problem in problems])  # it appends to them
        loop: Any = vars(GRPOTrainer)["_tool_call_loop"]
        mask, messages, tokens, *_ = loop(self, asked, starts, first, turns, None, None, {})
        return messages, tokens, mask


def run_script(
    loop: TurnLoop, problem: Problem, prompt: Sequence[int], script: Sequence[list[int]]
) -> tuple[list[int], list[int], str]:
    """Run a demonstration, given as the tokens of the policy's turns.

    Returns:
        Its tokens, 1 for those of the policy and 0 for those of tools, and what is wrong with it.
    """
    left: list[Any] = [[*turn, loop.processing_class.eos_token_id] for turn in script]
    turns, tokens, mask = loop.run([problem], [prompt], lambda _: [left.pop(0) if left else []])
    raised = any(turn["content"].startswith(TOOL_ERROR) for turn in turns[0])
    is_open = left or turns[0][-1].get("tool_calls") or turns[0][-1]["role"] == "tool"
    why = "a call raised" if raised else "each turn but the last has to call a tool, the last none"
    return tokens[0], mask[0], f"{why}: {join_turns(turns[0])!r}" if raised or is_open else ""
