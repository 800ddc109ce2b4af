"""The program in a completion, as policies write it.

The answer is the last answer block that is not among the thoughts, or else all that stands outside
of them; there is none while thoughts are open. In it, the program is a Markdown fence, or what
reads as Python between lines of prose. Nothing is run here, and the time grows with the length.

Sources: `code_extract` and `extract_target_code_or_empty` of EvalPlus' `sanitize.py`, which keep
the lines that parse, imports, and what the function needs; `extraction_utils.py` of LiveCodeBench;
the stop words of HumanEval's bodies (arXiv 2107.03374, section 2.1); CommonMark 0.31, "Fenced code
blocks".
"""

from __future__ import annotations

import ast
import builtins
import re
import textwrap
import threading
import warnings
from collections.abc import Iterator
from typing import NamedTuple

from gdpo_tune.tasks.answers import find_answer

_MOST_PARSED = 20
"""Characters of incomplete statements that are parsed, in multiples of the text's length."""
_MARGIN = re.compile(r"[ \t>]*(?:(?:[-*+]|\d+[.)])[ \t]+)?")
"""Marks of lists and quotations that may precede a fence on its line."""
_LANGUAGE = re.compile(r"[\s{.]*([\w+#-]*)")
_PYTHON = frozenset(("python", "python3", "py", "py3", "python-3", "ipython", "ipython3"))
_CONTINUES = re.compile(r"(?:else|elif|except|finally)\b|[)\]}]|$|\s")
"""Start of a line that belongs to the statement above it."""
_INCOMPLETE = re.compile("never closed|unterminated triple|expected an indented|unexpected EOF")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_IMPORTS = (ast.Import, ast.ImportFrom)
_parsing = threading.Lock()
"""Held while warnings are off, because their filters belong to the process."""


class _Block(NamedTuple):
    """The content of a fence, or lines between prose; `tree` is empty if it is not Python."""

    code: str
    tree: ast.Module
    language: str = ""


def extract_program(
    completion: str, function: str = "", head: str = "", *, reads_open_thoughts: bool = False
) -> str:
    """Return the program in a completion; empty if there is none.

    Among several fences it is the last one that defines `function`, with what it needs of those
    above; or the last one in Python, if the program reads and prints, so that `function` is empty.
    `head` is Python above the program. Where it begins the function, the completion may be the body
    alone, and the program is the head with that body.
    """
    text, is_marked = find_answer(completion, reads_open_thoughts=reads_open_thoughts)
    text = text[: 1 << 17].replace("\r\n", "\n")  # the rest is not read
    stripped = text.strip()
    if is_marked and "\n" not in stripped and not head:
        return stripped
    before, mark, after = text.partition("\n```")
    if mark and not after.partition("\n")[0].strip() and "```" not in before:
        # A prompt may have begun the fence, or a bare program may stand above its output.
        tree, _ = _parse_python(textwrap.dedent(before))
        if _is_program(tree, function) or _complete_body(before, function, head):
            text = f"```python\n{text}"
    if blocks := list(_read_fences(text))[-64:]:
        return _choose_block(blocks, function, head)
    for code in dict.fromkeys((stripped, textwrap.dedent(text).strip())):
        tree, _ = _parse_python(code)
        bound = _read_names(tree)[1]
        prose = (_read_names(node)[0] for node in tree.body if _is_prose(node))
        if _is_program(tree, function) and all(names and names <= bound for names in prose):
            return code
    runs = list(_split_prose(text))
    if not function:
        longest = max(runs, key=lambda run: run.code.count("\n"), default=None)
        return longest.code if longest and _is_program(longest.tree, "") else stripped
    if any(_is_program(run.tree, function) for run in runs):
        return _choose_block(runs, function, head)
    start = 0 if is_marked else stripped.find(f"def {function}(")
    return _complete_body(text, function, head) or (stripped[start:] if start >= 0 else "")


def _read_fences(text: str) -> Iterator[_Block]:
    """Yield the blocks between fences, without the indentation of a list around them."""
    marks, indent, language = "", 0, ""
    lines: list[str] = []
    for line in text.split("\n"):
        plain = line.rstrip()
        position = max(plain.rfind("```"), plain.rfind("~~~")) + 3
        before = plain[:position].rstrip(plain[position - 1 : position])
        run, info = plain[len(before) : position], plain[position:]
        is_first = bool(_MARGIN.fullmatch(before))
        margin = len(before.expandtabs(4)) if is_first and ">" not in before else 0
        if run[:3] not in ("```", "~~~") or (is_first and marks and margin > indent + 3):
            # NOTE: marks that are indented further are in a text of the program's own.
            lines.append(line)
            continue
        if marks and run.startswith(marks) and (is_first or not info):
            yield _build_block([*lines, before] if before.strip() else lines, indent, language)
            marks = ""
            if not is_first or not info or info[0].isspace() or not _LANGUAGE.fullmatch(info):
                continue
        if marks or "`" in info or before.count("```") % 2 or not (is_first or run[0] == "`"):
            lines.append(line)
            continue
        found = _LANGUAGE.match(info)
        marks, indent, language = run, margin, found[1].lower() if found else ""
        lines = []
    if marks:
        yield _build_block(lines, indent, language)


def _build_block(lines: list[str], indent: int, language: str) -> _Block:
    if indent:
        lines = [re.sub(f"^ {{0,{indent}}}", "", line.expandtabs(4)) for line in lines]
    code = "\n".join(lines).rstrip()
    return _Block(code, _parse_python(code)[0], language)


def _split_prose(text: str) -> Iterator[_Block]:
    groups: list[str] = []
    for line in text.split("\n"):
        is_decorated = bool(groups) and groups[-1].startswith("@") and "\n" not in groups[-1]
        if is_decorated or (groups and _CONTINUES.match(line)):
            groups[-1] += "\n" + line
        else:
            groups.append(line)
    groups.append("prose ends the last run")
    left = _MOST_PARSED * len(text)
    run: list[str] = []
    number = 0
    while number < len(groups):
        code, taken = groups[number], 1
        tree, error = _parse_python(code)
        least = max(0, left - 4 * len(text))
        while _INCOMPLETE.search(error) and number + taken < len(groups) and left > least:
            code += "\n" + groups[number + taken]
            taken += 1
            left -= len(code)
            tree, error = _parse_python(code)
        if not error and not any(map(_is_prose, tree.body)):
            run.append(code)
            number += taken
            continue
        if joined := "\n".join(run).strip():
            yield _Block(joined, _parse_python(joined)[0])
        run = []
        number += 1


def _choose_block(blocks: list[_Block], function: str, head: str) -> str:
    last_first = blocks[::-1]
    if function:
        plain = sorted(
            last_first,
            key=lambda b: (b.language not in ("", *_PYTHON), not _has_body(b.tree, function)),
        )
        for block in plain:
            if _is_program(block.tree, function):
                return _join_needed(block, blocks)
        begins = re.compile(rf"^[ \t]*(?:async )?(?:def|class) {re.escape(function)}\b", re.M)
        for block in plain:
            if begins.search(block.code):
                # NOTE: prose may follow in a fence that has no end.
                runs = [r.code for r in _split_prose(block.code) if _is_program(r.tree, function)]
                return runs[-1] if runs else textwrap.dedent(block.code).strip()
        for block in plain:
            if body := _complete_body(block.code, function, head):
                return body
    ranked = sorted(last_first, key=lambda b: (b.language not in _PYTHON, bool(b.language)))
    for block in ranked:
        if _is_program(block.tree, ""):
            return _join_needed(block, blocks)
    return textwrap.dedent(ranked[0].code).strip()


def _join_needed(block: _Block, blocks: list[_Block]) -> str:
    """Return the block below what it needs of others: imports, definitions, constants."""
    parts: list[tuple[str, ast.stmt]] = []
    providers: dict[str, int] = {}
    waiting = [*list_missing_names(block.tree)]
    for other in (each for each in blocks if waiting and each is not block):
        lines = other.code.split("\n")
        for node in other.tree.body:
            providers |= dict.fromkeys(list_bound_names(node), len(parts))
            first = min(each.lineno for each in (node, *getattr(node, "decorator_list", ())))
            parts.append(("\n".join(lines[first - 1 : node.end_lineno]), node))
    waiting.append("*")
    taken: set[int] = set()
    while waiting:
        number = providers.get(waiting.pop())
        if number is not None and number not in taken:
            taken.add(number)
            waiting += list_missing_names(parts[number][1])
    return "\n".join([*(parts[number][0] for number in sorted(taken)), block.code]).strip()


def _has_body(tree: ast.Module, function: str) -> bool:
    """Return whether a module defines the function itself, by more than an import or a stub."""
    for node in reversed(tree.body):
        for each in (*_list_methods(node)[::-1], node):
            if function in list_bound_names(each) and not isinstance(each, _IMPORTS):
                body = each.body if isinstance(each, _FUNCTIONS) else []
                return not body or not all(
                    isinstance(line, ast.Pass | ast.Raise)
                    or (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
                    for line in body
                )
    return False


def _list_methods(node: ast.stmt) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    body = node.body if isinstance(node, ast.ClassDef) else []
    return [each for each in body if isinstance(each, _FUNCTIONS)]


def list_bound_names(node: ast.stmt) -> set[str]:
    """Return the names that a statement of a module gives it; `*` for all of another's."""
    if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
        return {node.name}
    kinds = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.If, ast.Try)
    return _read_names(node)[1] if isinstance(node, kinds) else set()


def list_missing_names(tree: ast.AST) -> set[str]:
    """Return the names that are read and nowhere bound, without Python's own."""
    read, bound = _read_names(tree)
    return read - bound - set(dir(builtins))


def _read_names(tree: ast.AST) -> tuple[set[str], set[str]]:
    read: set[str] = set()
    bound: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                read.add(name)
            case ast.Name(id=name) | ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
                bound.add(name)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                bound.add(node.name)
            case ast.alias():
                bound.add((node.asname or node.name).partition(".")[0])
            case _:
                pass
    return read, bound


def _is_program(tree: ast.Module, function: str) -> bool:
    """Return whether this defines the function, or else more than printed values."""
    if function:
        nodes = [each for node in tree.body for each in (node, *_list_methods(node))]
        return any(function in list_bound_names(node) for node in nodes)
    kinds = (ast.Call, ast.Import, ast.ImportFrom, ast.ClassDef, *_FUNCTIONS)
    return any(isinstance(node, kinds) for node in ast.walk(tree))


def _is_prose(node: ast.stmt) -> bool:
    """Return whether a statement only reads as Python: a word (`Sure`), a label (`Note: x`)."""
    match node:
        case ast.Expr(value=ast.Constant(value=str())):
            return False
        case ast.Expr(value=value):
            return not any(isinstance(each, (ast.Call, ast.Await)) for each in ast.walk(value))
        case _:
            return isinstance(node, ast.AnnAssign) and node.value is None


def _complete_body(text: str, function: str, head: str) -> str:
    """Return the head with the text as the body of its function; empty if that is not Python.

    The body ends where a line is not indented, as HumanEval stops at the next statement.
    """
    begins = re.search(rf"^([ \t]*)(?:async )?def {re.escape(function)}\b", head, re.MULTILINE)
    if not begins:
        return ""
    margin = begins[1] + "    "
    lines = text.strip("\n").split("\n")
    end = next((n for n, line in enumerate(lines) if n and line[:1].strip()), len(lines))
    # NOTE: tokenizers and `strip` take the indentation of the first line, fences that of all.
    first = "\n".join(lines[:end])
    for body in (first, textwrap.indent(textwrap.dedent(text), margin), margin + first.lstrip()):
        tree, _ = _parse_python(textwrap.dedent(f"{begins[1]}if 1:\n{body}".rstrip()))
        match tree.body:
            case [ast.If(body=inner)] if not all(map(_is_prose, inner)):
                code = f"{head.rstrip()}\n{body.rstrip()}\n"
                if not _parse_python(code)[1]:
                    return code
            case _:
                pass
    return ""


def _parse_python(code: str) -> tuple[ast.Module, str]:
    """Return the tree; or an empty one, and the reason why this is not Python."""
    try:
        with _parsing, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(code), ""
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return ast.Module([], []), f"not Python: {error}"
