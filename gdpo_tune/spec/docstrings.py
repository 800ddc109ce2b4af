"""Docstrings of classes, fields and functions, read from their source."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import itertools
from pathlib import Path
from typing import Any


def attribute_docs(section: type[Any]) -> dict[str, str]:
    """Field -> the docstring below it, which Python itself throws away."""
    body = class_body(section)
    return {
        field.target.id: " ".join(doc.value.value.split())
        for field, doc in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(doc, ast.Expr)
        and isinstance(doc.value, ast.Constant)
        and isinstance(doc.value.value, str)
    }


def class_body(section: type[Any]) -> list[ast.stmt]:
    """The statements of a class."""
    (definition,) = ast.parse(inspect.getsource(section)).body
    return definition.body if isinstance(definition, ast.ClassDef) else []


def first_line(section: type[Any]) -> str:
    """The first line of a class's docstring."""
    return (inspect.getdoc(section) or "").partition("\n")[0]


def function_doc(module: str, function: str) -> str:
    """First paragraph of a function's docstring, read from its file: importing it costs torch."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"the registry names {module}, which does not exist")
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
    raise AttributeError(f"the registry names {module}:{function}, which does not exist")
