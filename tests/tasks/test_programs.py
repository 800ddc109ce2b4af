"""The program in a completion, in the forms in which policies write it."""

import ast
import textwrap

import pytest

from gdpo_tune.tasks.programs import extract_program
from tests.support.data import read_rows

F = "def f(x): return x"
PROGRAM = "print(int(input()) + 1)"
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
        f"<think>1+1=2</think><answer>{F}</answer>",
        f"<think>1+1=2</think><answer>\n{F}\n</answer> I hope this helps.",
        f"<answer>def f(x): return 0</answer><answer>{F}</answer>",
        f"<think></think><answer>```python\n{F}\n```</answer>",
        f"<think></think><answer>```\n{F}```</answer>",
        f"1+1=2\n{F}",
        f"*2 *9 -3\n{F}",
        f"abs +8\n{F}",
        f"```python\n{F}\n\nThis is it, I hope.",
        f"<think>def f(x): return 0</think>{F}",
        f"def f(x): return 0</think>{F}",
        f"<think>a <answer>def f(x): return 0</answer></think>{F}",
        f"<think>x</think><answer>{F}</answer></think>",
        # A policy that forgets the end of its thoughts, and not one that is cut within them.
        f"<think>1+1=2<answer>{F}</answer>\n",
        F,
    ],
)
def test_the_program_is_found(completion):
    assert extract_program(completion, "f") == F


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
def test_the_fence_that_defines_the_function_is_the_program(completion):
    assert extract_program(completion, "f") == f"import os\n{F}"


@pytest.mark.parametrize(
    "completion",
    [
        PROGRAM,
        f"<think>easy</think>\n{PROGRAM}\n",
        f"<answer>\n{PROGRAM}</answer>",
        f"It was\n```\nx\n```\nbut is\n```python3 \n{PROGRAM}\n```\nnow.",
        f"Sure, here it is:\n\n{PROGRAM}\n\nIt reads a number.",
        # What LiveCodeBench's last pair of fences would take is the sample below.
        f"```python\n{PROGRAM}\n```\nFor\n```\n3\n```\nit prints\n```\n4\n```\n",
        f"<answer>```python\n{PROGRAM}\n```\nOutput:\n```\n4\n```\n</answer>",
        f"```\n{PROGRAM}\n```\nOutput:\n```\nyes\n```\n",
        f"```python\n{PROGRAM}\n```\nRun it:\n```bash\npython a.py\n```\n```json\n[1]\n```",
        f"```python\n{PROGRAM}\n```\n```python\nfor in x\n```",
    ],
)
def test_a_program_that_reads_is_found(completion):
    assert extract_program(completion) == PROGRAM


@pytest.mark.parametrize("completion", ["", "42", "def g(x): return x", "<think>a</think>", "\0"])
def test_nothing_is_found_where_nothing_is(completion):
    assert extract_program(completion, "f") == ""


@pytest.mark.parametrize(
    "completion",
    [
        f"<think>{F}</think><answer></answer>",
        # Cut within the thoughts: TRL's `reasoning_accuracy_reward` gives 0 without `</think>`.
        f"<think>1+1=2<answer>{F}",
        f"<think>Maybe\n```python\n{F}\n```\nHmm, but what if n is",
        f"<think>A draft: <answer>{F}</answer> but I doubt it. Let me try",
        f"<think>a</think>{F}<think>wait",
    ],
)
def test_drafts_in_thoughts_are_no_answer(completion):
    assert extract_program(completion, "f") == ""
    assert extract_program(completion) == ""


def test_tags_in_the_text_of_a_program_are_its_own():
    code = "def f(x): return '<think>' + x"
    assert extract_program(f"<think>a</think><answer>{code}</answer>", "f") == code


@pytest.mark.parametrize(
    "fenced",
    [
        '```python title="a.py"\n{}\n```', "```{{.python .numberLines}}\n{}\n```",
        "~~~python\n{}\n~~~", "````py\n{}\n````", "```Python\r\n{}\r\n```\r\n", "```\n{}",
        "So: ```python\n{}\n```", "```python\n{}\n``` Now you see.", "> ```\n{}\n```",
        "```text\ndef f(x): no\n```\n```\n{}\n```", "```text\n{}\n```",
        "```js\nf = x => x\n```\n```\n{}\n```",
        "```python\ndef f(x): return 0\n```python\n{}\n```",
        "~~~text\n```\ndef f(x): return 0\n```\n~~~\n```python\n{}\n```",
    ],
)  # fmt: skip
def test_every_fence_of_commonmark_counts(fenced):
    """Sources: CommonMark 0.31, fenced code blocks; bigcode-evaluation-harness#74."""
    code = "def f(x):\n    y = 2 * x\n    return y"
    assert extract_program(fenced.format(code), "f") == code


@pytest.mark.parametrize("margin", [1, 2, 3, 5])
def test_a_fence_in_a_list_loses_the_indentation_of_the_list(margin):
    code = 'def f(x):\n    """Doc:\n\n    ```\n    f(1)\n    ```\n    """\n    return x'
    item = textwrap.indent(f"```python\n{code}\n```", " " * margin)
    assert extract_program(f"1. First\n{item}\n2. Then", "f") == code


def test_what_a_fence_needs_of_those_above_is_joined():
    """Source: `extract_target_code_or_empty` of EvalPlus, which joins all fences."""
    helpers = (
        "import math\n@cache\ndef g(x):\n    return math.sqrt(x + ONE)\nONE = 1\ndef no(): pass"
    )
    first = f"```python\nfrom functools import cache\n{helpers}\n```"
    f = "def f(x):\n    return g(x)"
    joined = extract_program(f"{first}\nThen\n```python\n{f}\n```", "f")
    kept = helpers.replace("\ndef no(): pass", "")
    assert joined == f"from functools import cache\n{kept}\n{f}"
    assert extract_program("```\ndef solve(): print(1)\n```\n```\nsolve()\n```") == (
        "def solve(): print(1)\nsolve()"
    )


BARE = [
    "import math\n\ndef f(x):\n    return math.sqrt(x)",
    "def g(x):\n    return x\n\ndef f(x):\n    return g(x)",
    "class Solution:\n    def f(self, x):\n        return x",
    "@cache\ndef f(x):\n    return x",
    "async def f(x):\n    return x",
    "TABLE = [\n1,\n2,\n]\ndef f(x):\n    try:\n        return 1\n    finally:\n        pass",
    "def f(x):\n    return '''\nno margin\n'''",
]


@pytest.mark.parametrize("code", BARE)
def test_bare_code_keeps_what_stands_above_and_loses_prose(code):
    """Sources: `code_extract` of EvalPlus; lm-evaluation-harness#3769."""
    assert extract_program(f"{code}\n", "f") == code
    told = (
        f"Sure\nHere (as you asked) it is, I don't know why:\n\n{code}\n\nNote: it is fast.\nBye!"
    )
    assert extract_program(told, "f") == code
    assert extract_program(f"<answer>{told}</answer>", "f") == code


HEAD = 'from typing import List\n\n\ndef f(xs: List[int]) -> int:\n    """ Sum them. """\n'
BODY = "    total = 0\n    for x in xs:\n        total += x\n    return total\n"


@pytest.mark.parametrize(
    "completion",
    [
        BODY, BODY.lstrip(), f"```python\n{BODY}```", f"```\n{textwrap.dedent(BODY)}```",
        f"<think>x</think><answer>{BODY}</answer>", f"{BODY}\n\nprint(f([1]))\nThis works.",
        f"{BODY}\n# Test\nassert f([1]) == 1", f"{BODY}\nclass A:\n    pass",
        f"Here:\n```\n{BODY}```\nSo.",
        HEAD + BODY, f"```python\n{HEAD}{BODY}```",
    ],
)  # fmt: skip
def test_a_body_alone_gets_its_head(completion):
    """Source: HumanEval's completions are bodies; it stops at the next top-level statement."""
    code = extract_program(completion, "f", HEAD)
    assert ast.dump(ast.parse(code)) == ast.dump(ast.parse(HEAD + BODY))
    assert not extract_program("I cannot answer this.", "f", HEAD)
    assert not extract_program("42", "f", HEAD)


@pytest.mark.parametrize("row", read_rows("humaneval"), ids=lambda row: row["entry_point"])
def test_bodies_of_humaneval_are_programs(row):
    head, body = row["prompt"], row["canonical_solution"]
    code = extract_program(body, row["entry_point"], head)
    assert ast.dump(ast.parse(code)) == ast.dump(ast.parse(head + body))


@pytest.mark.parametrize("mark", ["- ", "* ", "1. ", "-\t", "12) "])
def test_a_fence_may_begin_an_item_of_a_list(mark):
    code = "def f(x):\n    y = x\n    return y"
    margin = " " * len(mark.expandtabs(4))
    item = textwrap.indent(f"```python\n{code}\n```", margin).lstrip()
    assert extract_program(f"{mark}{item}\n{mark}So.", "f") == code


HOSTILE = ["`", "```\n", "```x", "(\n", "'''\n", "(", "-", "x\n", "@x\n", "def f(x):\n", "<think>",
           "<answer>", " ", "\0", "~", "if x:", "\ud800\n", "\\\n"]  # fmt: skip


@pytest.mark.parametrize("piece", HOSTILE)
@pytest.mark.parametrize("function", ["f", ""])
def test_hostile_text_never_raises(piece, function):
    for text in (piece * (20_000 // len(piece)), f"def f(x):\n{piece * 3000}"):
        assert isinstance(extract_program(text, function, "def f(x):\n    'a'\n"), str)


@pytest.mark.parametrize(
    "completion",
    [
        # A prompt that ends with an opened fence: `stop` of bigcode's harness has its end.
        "    return x + 1\n```\n\nThe function adds one.",
        "def f(x):\n    return x + 1\n```\n\nThe function adds one.",
        # A bare program above its output.
        "def f(x):\n    return x + 1\n```\n2\n```",
        # Usage of the program, and its head again, below it.
        "```python\ndef f(x):\n    return x + 1\n```\n"
        "```python\nfrom solution import f\nprint(f(1))\n```",
        "```python\ndef f(x):\n    return x + 1\n```\n```python\ndef f(x):\n    ...\n```",
        "```python\ndef f(x):\n    return x + 1\n```\n"
        '```python\ndef f(x):\n    """Add one."""\n    raise NotImplementedError\n```',
    ],
)
def test_the_program_is_neither_its_usage_nor_its_stub(completion):
    namespace: dict = {}
    exec(extract_program(completion, "f", "def f(x):\n"), namespace)
    assert namespace["f"](1) == 2


def test_a_program_that_only_imports_its_function_is_one():
    assert "import pos as f" in extract_program("```\nfrom operator import pos as f\n```", "f")
