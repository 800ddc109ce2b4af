"""Sums with a calculator: a policy learns when a call is worth its tokens (docs/tools.md).

A third of the sums add one digit, which the policy may learn to do by itself. Of two numbers with
two digits each it rarely gets the sum without the calculator.
"""

import random

from gdpo_tune.rewards import length, reward
from gdpo_tune.tasks.custom import RewardFunctionTask


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return int(a) + int(b)


@reward(0, 1)
def correctness(completion, answer):
    """Return 1.0 if the text of the last turn is the answer."""
    return float(completion.strip() == answer)


def no_call(completions, **_):
    """Return 1.0 for each completion without a call."""
    return [float(not any(turn.get("tool_calls") for turn in turns)) for turns in completions]


# As the policy `embedded_tools` has learned to read tools and to write calls. It has no template.
TEMPLATE = """\
{% for tool in tools or [] %}Tools: {{ tool.function.name }}\
({{ tool.function.parameters.properties | join(',') }})
{% endfor %}\
{% for turn in messages %}{% if turn.role == 'user' %}User: {{ turn.content }}
{% elif turn.role == 'tool' %}Result: {{ turn.content }}
{% else %}{{ turn.content }}{% for call in turn.tool_calls or [] %}<tool_call>\
{"name":"{{ call.function.name }}","parameters":\
{{ call.function.arguments | tojson(separators=(',', ':')) }}}</tool_call>{% endfor %}\
{{ eos_token }}{% endif %}{% endfor %}"""
CALL = {"name": "{content.name}", "arguments": "{content.parameters}"}


class Calculator(RewardFunctionTask):
    """Sums of two numbers, and a tool that adds."""

    reward_funcs = [correctness, no_call, length]
    ranges = {"no_call": (0, 1)}
    tools = [add]
    tool_time_limit = 1.0
    chat_template = TEMPLATE
    response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor_pattern": "(User|Result): .*\n",
        "fields": {
            "tool_calls": {
                "open": "<tool_call>",
                "close": "</tool_call>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": CALL},
            },
            "content": {"close": "<eos>", "content": "text"},
        },
    }

    def rows(self):
        """Yield 400 sums of a number and a digit, and 800 of two numbers with two digits."""
        draw, tens = random.Random(0), range(10, 50)
        for count, first, second in ((400, range(1, 50), range(1, 10)), (800, tens, tens)):
            pairs = [(a, b) for a in first for b in second]
            for a, b in draw.sample(pairs, count):
                yield {"prompt": f"{a} plus {b}.", "answer": str(a + b), "a": a, "b": b}

    def write_reference(self, problem):
        """Return the policy's turns: a third of the answers without a call."""
        a, b, answer = (problem.data[name] for name in ("a", "b", "answer"))
        if (a + 2 * b) % 3 == 0:
            return [answer]
        return [f'<tool_call>{{"name":"add","parameters":{{"a":{a},"b":{b}}}}}</tool_call>', answer]
