"""Functions and classes of libraries that cannot be imported without their dependencies.

They are taken from the source. In place of the library's own containers they get tensors.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.export_batch import Batch

Settings = Mapping[str, Any]


def execute_definitions(file: Path, space: dict[str, Any], *names: str, inside: str = "") -> None:
    """Execute functions and classes of a file in `space`, or methods of its class `inside`.

    Decorators, bases that `space` lacks and annotations of functions are left out.
    """
    body = ast.parse(file.read_text()).body
    if inside:
        (body,) = (n.body for n in body if isinstance(n, ast.ClassDef) and n.name == inside)
    taken = [node for node in body if getattr(node, "name", None) in names]
    assert {getattr(node, "name", "") for node in taken} == set(names), file
    for node in (child for definition in taken for child in ast.walk(definition)):
        if isinstance(node, ast.FunctionDef):
            node.decorator_list, node.returns = [], None
            arguments = node.args
            for argument in (*arguments.args, *arguments.kwonlyargs, *arguments.posonlyargs):
                argument.annotation = None
    exec(compile(ast.Module(taken, []), str(file), "exec", dont_inherit=True), space)


def sum_rewards(weights: Iterable[float], batch: Batch) -> Tensor:
    """Return the weighted sum [N] that a reward function returns under modes that sum first."""
    return batch.rewards @ torch.tensor(list(weights), dtype=batch.rewards.dtype)
