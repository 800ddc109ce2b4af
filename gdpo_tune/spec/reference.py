"""One page with every name that a user types: `python -m gdpo_tune.spec.reference`.

It is printed from the docstrings of the models and from the registry. The docstrings are read from
the source: pydantic's `use_attribute_docstrings` would read them at every start of every command.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise, starmap
from operator import attrgetter
from pathlib import Path
from string import Template
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from gdpo_tune.core import registry
from gdpo_tune.core.metrics import COST_METRICS, MetricInfo
from gdpo_tune.core.parameters import FAMILIES, PARAMETERS, ParameterInfo
from gdpo_tune.core.steps import MOST_POINTS
from gdpo_tune.spec import model, search_section
from gdpo_tune.spec.objectives import ObjectiveSpec
from gdpo_tune.spec.problems import one_of, show
from gdpo_tune.spec.task_section import task_names, task_of

T = TypeVar("T")
SECTIONS = ("training", "sandbox", "data", "model", "rollout", "search")
"""Sections of the page, before those within others."""
OTHER_DEFAULTS = {"name": "the file's stem", "policy": "the task's own", "objectives": "required"}
"""Key of the file -> its default, where the model does not say it."""


def reference() -> str:
    """Return the page, in Markdown: `reference.md` with its tables."""
    doc, families = attrgetter("doc"), {f"{name}.<reward>": FAMILIES[name] for name in FAMILIES}
    sections = {"Keys of the file": model.SweepSpec} | _list_sections()
    return Template(Path(__file__).with_suffix(".md").read_text(encoding="utf-8")).substitute(
        sections="\n\n".join(starmap(_describe_section, sections.items())),
        parameters=_list_names(
            ("parameter", "values", "default", "what"),
            PARAMETERS | families,
            _describe_parameter,
            lambda info: f"`{show(info.default)}`",
            doc,
        ),
        tasks="\n\n".join(map(_describe_task, task_names())),
        costs=_list_metrics(COST_METRICS),
        modes=_list_names(("name", "what"), registry.NORMALIZATIONS, _describe_mode),
        samplers=_list_names(("name", "what"), registry.SAMPLERS, doc),
        schedulers=_list_names(("name", "what"), registry.SCHEDULERS, doc),
        layouts=_list_names(
            ("name", "tasks", "columns (those that may be missing)", "what"),
            registry.LAYOUTS,
            lambda info: one_of(info.tasks),
            lambda i: one_of(i.columns) + (f" ({one_of(i.optional)})" if i.optional else ""),
            doc,
        ),
        most_points=MOST_POINTS,
        half_points=MOST_POINTS // 2,
    )


def _list_sections() -> dict[str, type[Any]]:
    """Return the class of every section by its dotted key, as code."""
    fields, search = model.SweepSpec.model_fields, search_section.Search.model_fields
    schedulers: tuple[Any, ...] = get_args(search["scheduler"].annotation)
    classes: dict[str, Any] = {
        "objectives.<metric>": ObjectiveSpec,
        **{name: fields[name].annotation for name in SECTIONS},
        **{f"search.scheduler: {{type: {kind().type}}}": kind for kind in schedulers},
        **{f"search.{name}": search[name].annotation for name in ("replicates", "budget")},
        **{name: fields[name].annotation for name in ("resources", "tracking")},
    }
    return {f"`{key}`": kind for key, kind in classes.items()}


def _describe_section(title: str, kind: type[Any]) -> str:
    """Return a heading and a table of the fields of a pydantic model or a dataclass."""
    prefix = f"{title.strip('`').partition(':')[0]}." if title[0] == "`" else ""
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind, include_extras=True)
        fields = {
            field.name: FieldInfo.from_annotated_attribute(hints[field.name], field.default)
            for field in dataclasses.fields(kind)
        }
    else:
        fields = kind.model_fields
    docs = attribute_docs(kind)
    rows = [
        (f"`{prefix}{name}`", _describe_values(field), _describe_default(name, field), docs[name])
        for name, field in fields.items()
    ]
    summary = (inspect.getdoc(kind) or "").partition("\n")[0]
    return f"## {title}\n\n{summary}\n\n{table(('key', 'values', 'default', 'what'), rows)}"


def _describe_default(name: str, field: FieldInfo) -> str:
    """Return a field's default as a reader would type it."""
    value: object = field.default
    if name in OTHER_DEFAULTS:
        return OTHER_DEFAULTS[name]
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, BaseModel) or dataclasses.is_dataclass(value):
        return "below"
    return "" if value in ("", (), {}) else f"`{show(value)}`"


def _describe_values(field: FieldInfo) -> str:
    """Return the values that a field may have, by its type and its bounds."""
    kind: Any = field.annotation
    if get_origin(kind) is Literal:
        return one_of(get_args(kind))
    if get_origin(kind) is tuple:
        return "list"
    words = {int: "whole number", float: "number", bool: "true, false"}.get(kind, "")
    return ", ".join(filter(None, [words, *map(bound, field.metadata)])) if words else ""


def bound(constraint: object) -> str:
    """Return a bound in words; empty for other constraints."""
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    for name, word in words.items():
        if hasattr(constraint, name):
            return f"{word} {getattr(constraint, name)}"
    return ""


def _describe_parameter(info: ParameterInfo) -> str:
    """Return the values that a parameter may have."""
    if info.kind == "choice":
        return one_of(info.choices)
    words = "whole number" if info.kind == "int" else "number"
    if info.low is not None:
        words += f", {'above' if info.open_low else 'at least'} {info.low:g}"
    return words + (f", at most {info.high:g}" if info.high is not None else "")


def _describe_task(name: str) -> str:
    """Return rewards, published setting and metrics of a task."""
    task = task_of(name)
    rewards = ", ".join(
        f"`{reward}` ({low:g} to {high:g})" for reward, (low, high) in task.rewards.items()
    )
    length = f" Length reward: `{task.length_reward}`." if task.length_reward else ""
    partial = f" With partial credit: `{task.partial_reward}`." if task.partial_reward else ""
    published = ", ".join(f"`{key}: {show(v)}`" for key, v in task.published.items())
    return (
        f"## Task `{name}`\n\nRewards: {rewards}.{length}{partial} Policy that ships for it: "
        f"`{task.embedded}`. Published setting, drawn as a baseline: {published}.\n\n"
        "Objectives and constraints name these held-out metrics; MLflow has "
        "the objectives as `objective/<metric>`, the others as `test/<metric>`.\n\n"
        + _list_metrics(task.metrics)
    )


def _list_metrics(metrics: Mapping[str, MetricInfo]) -> str:
    """Return a table of metrics with their better side and range."""
    better, doc = attrgetter("direction"), attrgetter("doc")
    head = ("metric", "better", "range", "what")
    return _list_names(head, metrics, better, lambda i: f"{i.low:g} to {i.high:g}", doc)


def _describe_mode(info: registry.ModeInfo) -> str:
    """Return the first line of the docstring of a normalization mode's function."""
    ignored = f" Ignores {one_of(info.ignores)}." if info.ignores else ""
    return function_doc(*info.target.split(":")) + ignored


def _list_names(head: tuple[str, ...], infos: Mapping[str, T], *columns: Callable[[T], str]) -> str:
    """Return a table of one of the registry's dicts."""
    rows = [(f"`{name}`", *(column(i) for column in columns)) for name, i in infos.items()]
    return table(head, rows)


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    escaped = [tuple(cell.replace("|", "\\|") for cell in row) for row in rows]
    lines = [head, tuple("---" for _ in head), *escaped]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def attribute_docs(kind: type[Any]) -> dict[str, str]:
    """Return the docstring below each field of a class, which Python itself throws away."""
    (definition,) = ast.parse(inspect.getsource(kind)).body
    return {
        field.target.id: " ".join(doc.value.value.split())
        for field, doc in pairwise(getattr(definition, "body", []))
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(doc, ast.Expr)
        and isinstance(doc.value, ast.Constant)
        and isinstance(doc.value.value, str)
    }


def function_doc(module: str, function: str) -> str:
    """Return the first paragraph of a function's docstring without importing it, and thus torch."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"the registry names {module}, which does not exist")
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
    raise AttributeError(f"the registry names {module}:{function}, which does not exist")


if __name__ == "__main__":
    sys.stdout.write(reference())
