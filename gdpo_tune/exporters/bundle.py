"""Bundle of definitions: one readable Python file with what some functions of the package need.

Definitions are copied as they stand, with their comments, from the modules that they are in.
Imports of the standard library and of other packages stay imports.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib.util
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = "gdpo_tune"


@dataclass(frozen=True, order=True)
class Imported:
    """Name that a module imports."""

    module: str
    name: str
    """Empty for `import module`."""
    alias: str
    """Name under which the module knows it."""


@dataclass(frozen=True)
class Definition:
    """Statement at the top of a module that defines names."""

    line: int
    """Place in its module."""
    text: str
    """Source, with the comments above it and the docstring below an assignment."""
    used: frozenset[str]
    """Names that it reads, annotations included."""


@dataclass(frozen=True)
class _Module:
    """Definitions and imports of one module, by name."""

    definitions: Mapping[str, Definition]
    imports: Mapping[str, Imported]


@dataclass
class Bundle:
    """Definitions that some roots need.

    `instead` maps a module to the module whose definitions are taken in its place. `renamed` maps a
    module to that which stands for it where the bundle is used; what is imported from it, or from
    below it, is not copied. None: it is absent there, and its names, which may only be types,
    become `object`.
    """

    instead: Mapping[str, str] = field(default_factory=dict[str, str])
    renamed: Mapping[str, str | None] = field(default_factory=dict[str, str | None])
    _chosen: dict[str, dict[str, Definition]] = field(
        default_factory=dict[str, dict[str, Definition]]
    )
    """Module -> name -> definition, modules in the order in which they have to be defined."""
    _imports: set[Imported] = field(default_factory=set[Imported])
    _absent: set[str] = field(default_factory=set[str])

    def add(self, module: str, name: str) -> None:
        """Add a definition and everything that it needs.

        Raises:
            LookupError: the module has no such name at its top.
        """
        module = self.instead.get(module, module)
        source = _read_module(module)
        if name in source.imports:
            self._add_import(source.imports[name])
            return
        definition = source.definitions[name]
        if name in self._chosen.get(module, {}):
            return
        self._chosen.setdefault(module, {})[name] = definition
        for used in sorted(definition.used & (set(source.definitions) | set(source.imports))):
            self.add(module, used)

    def format(self, settings: Mapping[str, str]) -> tuple[str, str]:
        """Return the imports and the definitions as source.

        `settings` replaces definitions by their names.

        Raises:
            ValueError: two modules define the same name.
        """
        owners: dict[str, str] = {}
        for module, names in self._chosen.items():
            for name in names:
                if name in owners:
                    raise ValueError(f"{name} is defined in {owners[name]} and in {module}")
                owners[name] = module
        parts = [
            settings.get(name, f"{name} = object  # a type that is absent here") + "\n"
            for name in sorted(self._absent)
        ]
        for module in self._order_modules():
            parts.append(f"\n\n# From {module}\n")
            texts = {
                definition.line: settings.get(name, definition.text)
                for name, definition in self._chosen[module].items()
            }
            parts += [self._rename(_space(text)) for _, text in sorted(texts.items())]
        return _format_imports(self._imports), "".join(parts).strip()

    def _order_modules(self) -> list[str]:
        """Return modules so that each stands behind those that it imports."""
        ordered: list[str] = []

        def visit(module: str) -> None:
            if module in ordered:
                return
            for imported in _read_module(module).imports.values():
                needed = self.instead.get(imported.module, imported.module)
                if needed in self._chosen:
                    visit(needed)
            ordered.append(module)

        for module in self._chosen:
            visit(module)
        return ordered

    def _add_import(self, imported: Imported) -> None:
        renamed = self._find_renamed(imported.module)
        if renamed is not None:
            _, target = renamed
            if target is None:
                self._absent.add(imported.alias)
            else:
                self._imports.add(Imported(target, imported.name, imported.alias))
        elif imported.module.partition(".")[0] == PACKAGE:
            self.add(imported.module, imported.name)
        else:
            self._imports.add(imported)

    def _find_renamed(self, module: str) -> tuple[str, str | None] | None:
        for prefix, target in self.renamed.items():
            if module == prefix or module.startswith(f"{prefix}."):
                return prefix, target and target + module.removeprefix(prefix)
        return None

    def _rename(self, text: str) -> str:
        """Return a definition whose own imports name the modules that stand for others."""
        for module, target in self.renamed.items():
            if target is not None:
                text = text.replace(f"from {module}", f"from {target}")
        return text


def format_docstring(text: str) -> str:
    """Return a text as a docstring, although a path in it may hold what ends one."""
    return '"""' + text.replace("\\", "/").replace('"', "'") + '"""'


@functools.cache
def _read_module(module: str) -> _Module:
    spec = importlib.util.find_spec(module)
    assert spec is not None, module
    assert spec.origin is not None, module
    source = Path(spec.origin).read_text(encoding="utf-8")
    lines, tree = source.splitlines(), ast.parse(source)
    definitions: dict[str, Definition] = {}
    imports: dict[str, Imported] = {}
    for position, node in enumerate(tree.body):
        for statement in _list_imports(node):
            imports.update(_read_import(statement, spec.parent or ""))
        following = tree.body[position + 1] if position + 1 < len(tree.body) else None
        names = list(_list_names(node))
        if names:
            definition = _read_definition(node, following, lines)
            definitions.update(dict.fromkeys(names, definition))
    return _Module(definitions, imports)


def _list_imports(node: ast.stmt) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports of a statement at the top, those for type checkers included."""
    match node:
        case ast.Import() | ast.ImportFrom():
            yield node
        case ast.If(test=ast.Name("TYPE_CHECKING")):
            yield from (part for part in node.body if isinstance(part, ast.Import | ast.ImportFrom))
        case _:
            pass


def _read_import(node: ast.Import | ast.ImportFrom, package: str) -> Iterator[tuple[str, Imported]]:
    """Yield what a statement in a module of `package` imports, by name."""
    for alias in node.names:
        if isinstance(node, ast.Import):
            name = alias.asname or alias.name.partition(".")[0]
            yield name, Imported(alias.name, "", name)
        elif node.module != "__future__":
            assert node.module is not None, "an import from the package itself"
            relative = "." * node.level + node.module
            name = alias.asname or alias.name
            yield name, Imported(importlib.util.resolve_name(relative, package), alias.name, name)


def _list_names(node: ast.stmt) -> Iterator[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name
        case ast.Assign(targets=[target]):
            yield from (part.id for part in ast.walk(target) if isinstance(part, ast.Name))
        case _:
            pass


def _read_definition(node: ast.stmt, following: ast.stmt | None, lines: list[str]) -> Definition:
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(part.lineno for part in decorators)]) - 1
    while first and lines[first - 1].startswith("#"):
        first -= 1
    last = node.end_lineno or node.lineno
    match following:
        case ast.Expr(value=ast.Constant(value=str())) if isinstance(
            node, ast.Assign | ast.AnnAssign
        ):
            last = following.end_lineno or last
        case _:
            pass
    used = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    text = "\n".join(lines[first:last])
    return Definition(first, text, frozenset(used - set(dir(builtins)) - set(_list_names(node))))


def _space(text: str) -> str:
    """Return a definition with the empty lines around it that the style of Python asks for."""
    is_block = any(line.startswith(("def ", "class ", "@")) for line in text.splitlines())
    return f"\n\n{text}\n" if is_block else f"\n{text}\n"


def _format_imports(imports: Collection[Imported]) -> str:
    """Return import statements: one per module, the standard library first."""
    plain: dict[bool, list[str]] = {True: [], False: []}
    for each in sorted(imports):
        if not each.name:
            alias = "" if each.alias == each.module.partition(".")[0] else f" as {each.alias}"
            plain[_is_standard(each.module)].append(f"import {each.module}{alias}")
    modules = sorted({each.module for each in imports if each.name})
    for module in modules:
        names = ", ".join(
            each.name if each.alias == each.name else f"{each.name} as {each.alias}"
            for each in sorted(imports)
            if each.module == module and each.name
        )
        plain[_is_standard(module)].append(f"from {module} import {names}")
    return "\n\n".join("\n".join(lines) for lines in plain.values() if lines)


def _is_standard(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names
