"""Write docs/reference.md, and the tables of docs/schedule.md: `python docs/reference_pages.py`.

They are every name that a user types, from the docstrings of the models and the registry. The
docstrings are read from the source: pydantic's `use_attribute_docstrings` would read them at every
start of every command.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise, starmap
from operator import attrgetter
from pathlib import Path
from string import Template
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from gdpo_tune.clusters import schedule_spec
from gdpo_tune.core import registry
from gdpo_tune.core.metrics import COST_METRICS, MetricInfo
from gdpo_tune.core.parameters import FAMILIES, PARAMETERS, ParameterInfo
from gdpo_tune.core.settings import Section
from gdpo_tune.core.task_files import load_task_info
from gdpo_tune.core.text import join_names, render_table, show
from gdpo_tune.core.trial_files import MOST_POINTS
from gdpo_tune.core.trl_fields import OWN_KEYS, REFUSALS, TRL_FIELDS
from gdpo_tune.spec.model import SweepSpec

T = TypeVar("T")
REFERENCE, SCHEDULE = (Path(__file__).with_name(name) for name in ("reference.md", "schedule.md"))
BEGIN, END = "<!-- generated: keys -->", "<!-- end -->"
"""Marks around the tables of a page that has other text, too."""
BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
"""Constraint of annotated_types and pydantic -> its words."""
DURATION = "length of time: `90m`, `6h`, `1d12h`"
OTHER_DEFAULTS = {"name": "the file's stem", "policy": "the task's own", "objectives": "required"}
"""Key of the file -> its default, where the model has none."""


def render_reference() -> str:
    """Return the page, in Markdown: `reference.template` with its tables."""
    doc, families = attrgetter("doc"), {f"{name}.<reward>": FAMILIES[name] for name in FAMILIES}
    sections = [("Keys of the file", SweepSpec), *_list_sections(SweepSpec)]
    return Template(REFERENCE.with_suffix(".template").read_text(encoding="utf-8")).substitute(
        sections="\n\n".join(starmap(describe_section, sections)),
        parameters=_tabulate(
            ("parameter", "values", "default", "meaning"),
            PARAMETERS | families,
            _describe_parameter,
            lambda info: f"`{show(info.default)}`",
            doc,
        ),
        trl_fields=_tabulate(
            ("parameter", "values", "default", "meaning"),
            TRL_FIELDS,
            _describe_parameter,
            lambda info: f"`{show(info.default)}`",
            doc,
        ),
        other_trl_fields=render_table(
            ("fields", "written as, or why not"),
            [
                *((_list_code(fields.split()), f"`{key}`") for key, fields in OWN_KEYS.items()),
                *((_list_code(fields.split()), reason) for reason, fields in REFUSALS.items()),
            ],
        ),
        tasks="\n\n".join(map(_describe_task, registry.TASKS)),
        costs=_tabulate_metrics(COST_METRICS),
        modes=_tabulate(
            ("name", "meaning"),
            registry.NORMALIZATIONS,
            lambda mode: (
                read_function_doc(*mode.target.split(":"))
                + (f" Ignores {join_names(mode.ignores)}." if mode.ignores else "")
            ),
        ),
        samplers=_tabulate(("name", "meaning"), registry.SAMPLERS, doc),
        schedulers=_tabulate(("name", "meaning"), registry.SCHEDULERS, doc),
        layouts=_tabulate(
            ("name", "tasks", "columns (those that may be missing)", "meaning"),
            {name: registry.describe_layout(name) for name in registry.LAYOUTS},
            lambda info: join_names(info.tasks),
            lambda i: (
                join_names(i.columns) + (f" ({join_names(i.optional)})" if i.optional else "")
            ),
            doc,
        ),
        most_points=MOST_POINTS,
        half_points=MOST_POINTS // 2,
    )


def _list_sections(kind: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in getattr(kind, "model_fields", {}).items():
        key, section = f"{prefix}{name}", field.annotation
        if NoneType in get_args(section):
            section = next(filter(_is_section, get_args(section)), section)
        if get_origin(section) is dict:
            key, section = f"{key}.<metric>", get_args(section)[1]
        if field.discriminator:
            for each in get_args(section):
                yield f"`{key}: {{type: {each().type}}}`", each
        elif _is_section(section):
            yield f"`{key}`", section
            yield from _list_sections(section, f"{key}.")


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def describe_default(name: str, field: FieldInfo) -> str:
    """Return the value of a key that is left out."""
    value: object = field.default
    if isinstance(value, BaseModel):
        return "below"
    if name in OTHER_DEFAULTS or value is PydanticUndefined:
        return OTHER_DEFAULTS.get(name, "required")
    return "" if value in ("", (), {}, None) else f"`{show(value)}`"


def describe_values(field: FieldInfo) -> str:
    """Return the values that a field may have, by its type and its bounds."""
    return _describe_type(field.annotation, field.metadata)


def describe_section(
    title: str,
    kind: type[BaseModel],
    values: Callable[[FieldInfo], str] = describe_values,
    default: Callable[[str, FieldInfo], str] = describe_default,
) -> str:
    """Return a heading and a table of the fields of a pydantic model."""
    prefix = f"{title.strip('`').partition(':')[0]}." if title[0] == "`" else ""
    docs = read_attribute_docs(kind)
    rows = [
        (f"`{prefix}{name}`", values(field), default(name, field), docs[name])
        for name, field in kind.model_fields.items()
    ]
    summary = (inspect.getdoc(kind) or "").partition("\n")[0]
    table = render_table(("key", "values", "default", "meaning"), rows)
    return f"## {title}\n\n{summary}\n\n{table}"


def _describe_type(kind: Any, constraints: Iterable[object] = ()) -> str:
    if get_origin(kind) is Annotated:
        inner, *bounds = get_args(kind)
        return _describe_type(inner, bounds)
    if get_origin(kind) is Literal:
        return join_names(get_args(kind))
    if get_origin(kind) is tuple:
        return "list"
    if get_origin(kind) is Union:
        return " or ".join(filter(None, map(_describe_type, get_args(kind))))
    words = {int: "whole number", float: "number", bool: "true, false"}.get(kind, "")
    bounds = [
        f"{text} {getattr(constraint, name)}"
        for constraint in constraints
        for name, text in BOUNDS.items()
        if hasattr(constraint, name)
    ]
    return ", ".join([words, *bounds]) if words else ""


def _describe_parameter(info: ParameterInfo) -> str:
    if info.kind == "choice":
        return join_names(info.choices)
    words = "whole number" if info.kind == "int" else "number"
    if info.low is not None:
        words += f", {'above' if info.open_low else 'at least'} {info.low:g}"
    return words + (f", at most {info.high:g}" if info.high is not None else "")


def _describe_task(name: str) -> str:
    task = load_task_info(name)
    ranges = task.rewards.items()
    rewards = ", ".join(f"`{reward}` ({low:g} to {high:g})" for reward, (low, high) in ranges)
    for reward, info in task.optional_rewards.items():
        rewards += f". Only if the space has a weight for it: `{reward}`, {info.doc} "
        rewards += f"({info.low:g} to {info.high:g})"
    length = f" Length reward: `{task.length_reward}`." if task.length_reward else ""
    partial = f" With partial credit: `{task.partial_reward}`." if task.partial_reward else ""
    released = " Also with `scoring: released`." if task.offers_released else ""
    published = ", ".join(f"`{key}: {show(v)}`" for key, v in task.published.items())
    return (
        f"## Task `{name}`\n\nRewards: {rewards}.{length}{partial}{released} Policy that ships for "
        f"it: `{task.embedded}`. Published setting, trained as a baseline: {published}.\n\n"
        "Objectives and constraints name these held-out metrics; MLflow has "
        "them as `test/<metric>` and `validation/<metric>`.\n\n" + _tabulate_metrics(task.metrics)
    )


def _tabulate_metrics(metrics: Mapping[str, MetricInfo]) -> str:
    better, doc = attrgetter("direction"), attrgetter("doc")
    head = ("metric", "better", "range", "meaning")
    return _tabulate(head, metrics, better, lambda i: f"{i.low:g} to {i.high:g}", doc)


def _tabulate(head: tuple[str, ...], infos: Mapping[str, T], *columns: Callable[[T], str]) -> str:
    rows = [(f"`{name}`", *(column(i) for column in columns)) for name, i in infos.items()]
    return render_table(head, rows)


def _list_code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def fill_schedule_page(page: str) -> str:
    """Return the page with new tables between its marks; `ValueError`: it lacks one."""
    before, begun, rest = page.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not begun or not ended:
        raise ValueError(f"the page lacks {BEGIN} or {END}")
    sections = [("Keys of the file", schedule_spec.ScheduleSettings)]
    sections += [(f"`{key}`", section) for key, section in schedule_spec.list_sections().items()]
    how = (_describe_schedule_values, _describe_schedule_default)
    tables = [f"#{describe_section(title, section, *how)}" for title, section in sections]
    return "\n\n".join([before + BEGIN, *tables, END + after])


def _describe_schedule_values(field: FieldInfo) -> str:
    kind, *_ = (*get_args(field.annotation), None)
    if schedule_spec.DURATION_VALIDATOR in (*field.metadata, *getattr(kind, "__metadata__", ())):
        return DURATION
    if get_origin(field.annotation) is tuple and get_origin(kind) is Literal:
        return f"some of {join_names(get_args(kind))}"
    return describe_values(field)


def _describe_schedule_default(name: str, field: FieldInfo) -> str:
    if field.default == schedule_spec.EVERY_OCCASION:
        return "all"
    if field.default and _describe_schedule_values(field) == DURATION:
        return f"`{schedule_spec.format_period(field.default)}`"
    return describe_default(name, field)


def read_attribute_docs(kind: type[Any]) -> dict[str, str]:
    """Return the docstring below each field of a class, which Python itself discards."""
    inherited = [base for base in kind.__bases__ if _is_section(base) and base is not Section]
    docs = {name: doc for base in inherited for name, doc in read_attribute_docs(base).items()}
    (definition,) = ast.parse(inspect.getsource(kind)).body
    return docs | {
        field.target.id: " ".join(doc.value.value.split())
        for field, doc in pairwise(getattr(definition, "body", []))
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(doc, ast.Expr)
        and isinstance(doc.value, ast.Constant)
        and isinstance(doc.value.value, str)
    }


def read_function_doc(module: str, function: str) -> str:
    """Return the first paragraph of a function's docstring without importing it, and thus torch."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"the registry names {module}, which does not exist")
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
    raise AttributeError(f"the registry names {module}:{function}, which does not exist")


if __name__ == "__main__":
    REFERENCE.write_text(render_reference(), encoding="utf-8")
    page = SCHEDULE.read_text(encoding="utf-8")
    SCHEDULE.write_text(fill_schedule_page(page), encoding="utf-8")
