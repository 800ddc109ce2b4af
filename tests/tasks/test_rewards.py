import pytest

from gdpo_tune.tasks.answers import extract_code
from gdpo_tune.tasks.rewards import score_block_format, score_length
from tests.support.data import build_sample

F = "def f(x): return x"


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (f"<think>1+1=2</think><answer>{F}</answer>", 1),
        (f"<think></think><answer>{F}</answer>", 1),
        (f"<think>a\nb</think>\n<answer>\n{F}\n</answer>\n", 1),
        ("<think></think><answer></answer>", 1),
        (f"<think>1+1=2<answer>{F}</answer>", 0),
        (f"<think></think><answer>{F}", 0),
        (f"<think></think><answer>{F}</answer> I hope this helps.", 0),
        (f"Sure. <think></think><answer>{F}</answer>", 0),
        (f"<think></think>so<answer>{F}</answer>", 0),
        (f"<think></think><think></think><answer>{F}</answer>", 0),
        (f"<think></think><answer>{F}</answer><answer>{F}</answer>", 0),
        (f"<think><think></think></think><answer>{F}</answer>", 0),
        (f"<think>the <answer> tag</think><answer>{F}</answer>", 0),
        (f"<answer>{F}</answer><think></think>", 0),
        (f"<answer>{F}</answer>", 0),
        (F, 0),
        ("", 0),
    ],
)
def test_block_format(completion, expected):
    assert score_block_format(build_sample(completion)) == expected


@pytest.mark.parametrize(("length", "expected"), [(1, 1), (25, 1), (26, 1), (27, 0), (64, 0)])
def test_length_includes_the_limit(length, expected):
    assert score_length(build_sample("", length, 26)) == expected


@pytest.mark.parametrize(
    "completion",
    [
        f"<think>1+1=2</think><answer>{F}</answer>",
        f"<think>1+1=2</think><answer>\n{F}\n</answer> I hope this helps.",
        f"<think>1+1=2<answer>{F}",
        f"<answer>def f(x): return 0</answer><answer>{F}</answer>",
        f"<think></think><answer>```python\n{F}\n```</answer>",
        f"<think></think><answer>```\n{F}```</answer>",
        f"1+1=2\n{F}",
        f"<think>def f(x): return 0</think>{F}",
        F,
    ],
)
def test_extract_code_finds_the_program(completion):
    assert extract_code(completion, "f") == F


CHAT = f"""Here it is, with `f` as asked:

```python
import os
{F}
```

Use it so:
```python
print(f(2))
```
It works."""


@pytest.mark.parametrize(
    "completion",
    [
        CHAT,
        f"<think>\n```python\ndef f(x): return 0\n```\n</think>\n{CHAT}",
        f"<think></think><answer>{CHAT}</answer>",
        f"Cut short:\n```py\nimport os\n{F}",
        f"```\nimport os\n{F}```",
    ],
)
def test_extract_code_finds_the_fence_that_defines_the_function(completion):
    assert extract_code(completion, "f") == f"import os\n{F}"


PROGRAM = "print(int(input()) + 1)"


@pytest.mark.parametrize(
    "completion",
    [
        PROGRAM,
        f"<think>easy</think>\n{PROGRAM}\n",
        f"<answer>\n{PROGRAM}</answer>",
        f"It was\n```\nx\n```\nbut is\n```python3 \n{PROGRAM}\n```\nnow.",
    ],
)
def test_extract_code_finds_a_program_without_a_function(completion):
    assert extract_code(completion, "") == PROGRAM


@pytest.mark.parametrize("completion", ["", "42", "def g(x): return x", "<think>a</think>"])
def test_extract_code_finds_nothing_where_nothing_is(completion):
    assert extract_code(completion, "f") == ""


def test_an_empty_answer_is_empty_even_if_the_thoughts_hold_code():
    assert extract_code(f"<think>{F}</think><answer></answer>", "f") == ""
