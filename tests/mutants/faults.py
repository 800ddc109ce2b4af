"""Plausible faults of a file: each changes one comparison, sign, constant, condition or call."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.Mult,
}
FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}


class Fault(NamedTuple):
    """One change of a file."""

    file: Path
    line: int
    name: str
    """File, function and change, such as `pareto.py:compute_front: a < b -> a <= b`."""
    source: str
    """The whole file with the change."""


def list_faults(file: Path, root: Path) -> list[Fault]:
    """List the faults of a file that compile, in the order of their lines."""
    source = file.read_bytes()
    tree = ast.parse(source)
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    patterns = [node for node in ast.walk(tree) if isinstance(node, ast.pattern)]  # of `match`
    in_patterns = {id(part) for pattern in patterns for part in ast.walk(pattern)}
    found, seen = [], Counter[str]()
    for place, old, new in _walk(tree, file.relative_to(root).as_posix() + ":"):
        begin = starts[old.lineno - 1] + old.col_offset
        end = starts[old.end_lineno - 1] + old.end_col_offset
        after = ast.unparse(new)
        text = f"({after})" if isinstance(new, ast.expr) else after
        changed = (source[:begin] + text.encode() + source[end:]).decode()
        if id(old) in in_patterns:
            try:
                ast.parse(changed)
            except SyntaxError:  # such as a name that has to stand alone
                continue
        name = f"{place}: {' '.join(source[begin:end].decode().split())} -> {after}"
        seen[name] += 1
        name += f" ({seen[name]})" if seen[name] > 1 else ""
        found.append(Fault(file, old.lineno, name, changed))
    return found


def _walk(node: ast.AST, place: str) -> Iterator[tuple[str, ast.AST, ast.AST]]:
    """Yield (place, node, changed node) below a node, but for what no run depends on."""
    if isinstance(node, ast.JoinedStr) or _is_text(node) or _is_for_types(node):
        return
    if isinstance(node, ast.keyword) and node.arg == "strict":  # of zip, a check of our own
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        place = f"{place}{'' if place.endswith(':') else '.'}{node.name}"
    for old, new in _change(node):
        yield place, old, new
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and field not in ("annotation", "returns"):
                yield from _walk(child, place)


def _is_text(node: ast.AST) -> bool:
    """Return True for docstrings of modules, classes, functions and fields."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_for_types(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING"
    if isinstance(node, ast.Subscript):
        return ast.unparse(node.value) in ("Literal", "Annotated")
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) in ("TypeVar", "cast")
    return False


def _change(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yield (part, changed part) for the faults of one node."""
    match node:
        case ast.Compare(left, [op], [right]):
            yield node, ast.Compare(left, [COMPARISONS[type(op)]()], [right])
        case ast.BoolOp(op, values):
            yield node, ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
            yield node, values[0] if len(values) == 2 else ast.BoolOp(op, values[:-1])
        case ast.BinOp(left, op, right) if type(op) in ARITHMETIC:
            yield node, ast.BinOp(left, ARITHMETIC[type(op)](), right)
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield node, operand
        case ast.Constant(bool(value)):
            yield node, ast.Constant(not value)
        case ast.Constant(int(value)):
            yield node, ast.Constant(value + 1)
        case ast.Constant(float(value)):
            yield node, ast.Constant(2 * value or 1.0)
        case ast.IfExp(test, body, other):
            yield node, ast.IfExp(test, other, body)
        case ast.If(test) | ast.While(test):
            yield test, ast.UnaryOp(ast.Not(), test)
        case ast.comprehension(ifs=conditions):
            for condition in conditions:
                yield condition, ast.Constant(True)
        case ast.Expr(ast.Call()) | ast.AugAssign():
            yield node, ast.Pass()
        case ast.Call(ast.Name(name), arguments, keywords) if name in FUNCTIONS:
            yield node, ast.Call(ast.Name(FUNCTIONS[name]), arguments, keywords)
        case _:
            pass
