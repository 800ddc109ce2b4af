"""The program in a completion, in the forms in which policies write it."""

import ast
import re
import textwrap

import pytest

from gdpo_tune.tasks.programs import extract_program
from tests.support.data import read_rows
from tests.support.tables import read_table

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
HEAD = 'from typing import List\n\n\ndef f(xs: List[int]) -> int:\n    """ Sum them. """\n'
BODY = "    total = 0\n    for x in xs:\n        total += x\n    return total\n"
TEXTS = {"CHAT": CHAT, "PROGRAM": PROGRAM, "HEAD": HEAD, "BODY": BODY, "F": F}
TABLE = {
    section: [
        re.sub(r"CHAT|PROGRAM|HEAD|BODY|\bF\b", lambda name: TEXTS[name[0]], row) for row in rows
    ]
    for section, rows in read_table("programs").items()
    if section != "blocks"
}


@pytest.mark.parametrize("completion", TABLE["found"])
def test_the_program_is_found(completion):
    assert extract_program(completion, "f") == F


@pytest.mark.parametrize("completion", TABLE["fences"])
def test_the_fence_that_defines_the_function_is_the_program(completion):
    assert extract_program(completion, "f") == f"import os\n{F}"


@pytest.mark.parametrize("completion", TABLE["readers"])
def test_a_program_that_reads_is_found(completion):
    assert extract_program(completion) == PROGRAM


@pytest.mark.parametrize("completion", ["", "42", "def g(x): return x", "<think>a</think>", "\0"])
def test_nothing_is_found_where_nothing_is(completion):
    assert extract_program(completion, "f") == ""


@pytest.mark.parametrize("completion", TABLE["drafts"])
def test_drafts_in_thoughts_are_no_answer(completion):
    assert extract_program(completion, "f") == ""
    assert extract_program(completion) == ""


def test_tags_in_the_text_of_a_program_are_its_own():
    code = "def f(x): return '<think>' + x"
    assert extract_program(f"<think>a</think><answer>{code}</answer>", "f") == code


@pytest.mark.parametrize("fenced", TABLE["commonmark"])
def test_every_fence_of_commonmark_counts(fenced):
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


@pytest.mark.parametrize("code", TABLE["bare"])
def test_bare_code_keeps_what_stands_above_and_loses_prose(code):
    assert extract_program(f"{code}\n", "f") == code
    told = (
        f"Sure\nHere (as you asked) it is, I don't know why:\n\n{code}\n\nNote: it is fast.\nBye!"
    )
    assert extract_program(told, "f") == code
    assert extract_program(f"<answer>{told}</answer>", "f") == code


@pytest.mark.parametrize("completion", TABLE["bodies"])
def test_a_body_alone_gets_its_head(completion):
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


@pytest.mark.parametrize("completion", TABLE["usage"])
def test_the_program_is_neither_its_usage_nor_its_stub(completion):
    namespace: dict = {}
    exec(extract_program(completion, "f", "def f(x):\n"), namespace)
    assert namespace["f"](1) == 2


def test_a_program_that_only_imports_its_function_is_one():
    assert "import pos as f" in extract_program("```\nfrom operator import pos as f\n```", "f")
