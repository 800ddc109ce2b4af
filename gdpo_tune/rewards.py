"""Reward functions for tasks of your own and for TRL: `from gdpo_tune.rewards import answer`.

Each is called as TRL's `GRPOTrainer(reward_funcs=[...])` calls it: with the completions, texts or
messages, and the columns of their rows as keywords, lists of N each. It returns N numbers, or None
for a completion that it does not score. The tasks that ship use the same functions.

    answer                     1 for the right answer of mathematics: `answer`, `tolerance`
    exact_answer               1 for the text of `answer` exactly
    integer                    1 for an answer of ASCII digits alone
    tests_passed               1 for a program that passes all tests: `asserts` of its `function`,
                               or `streams`, pairs of input and expected output; `head`, `tail`
    share_passed, bug_free     the share of tests that pass; 1 if no test breaks the program
    tool_calls                 -3 to 3: agreement with the right calls, `calls`
    tool_format                1 for the tags that `calls` and `response` need
    block_format, line_format  1 for one think and one answer block
    length                     1 for at most `length_limit` tokens
    Judge(...)                 the score that a language model behind a server gives

`reward` makes such a function of one that scores a single completion, and states its range:

    @reward(0, 1)
    def polite(completion, name):
        return float(f"Dear {name}" in completion)

Programs run in the sandbox of this machine: without isolation nothing runs.
"""

from gdpo_tune.tasks.judge import Judge
from gdpo_tune.tasks.text_rewards import (
    answer,
    block_format,
    bug_free,
    exact_answer,
    integer,
    length,
    line_format,
    reward,
    share_passed,
    tests_passed,
)
from gdpo_tune.tasks.tool_rewards import tool_calls, tool_format

__all__ = [
    "Judge",
    "answer",
    "block_format",
    "bug_free",
    "exact_answer",
    "integer",
    "length",
    "line_format",
    "reward",
    "share_passed",
    "tests_passed",
    "tool_calls",
    "tool_format",
]
