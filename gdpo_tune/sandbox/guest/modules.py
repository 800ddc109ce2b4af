"""Modules that candidates and tests may import.

A locked process cannot open a file, so it imports from memory. The modules that nearly every
program needs are imported before the fork. The rest of the standard library is kept in memory as
compiled code: imported but unused modules would cost every fork the copy of their pages.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import marshal
import os
import random
import struct
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from . import lockdown
from .lockdown import LockdownError

IMPORTED = """
abc array binascii bisect cmath collections collections.abc contextlib copy datetime decimal
enum fractions functools heapq io itertools json math numbers operator os random re string
struct sys time types typing unicodedata warnings zlib
"""
EXTENSIONS = "_blake2 _contextvars _csv _md5 _sha1 _sha2 _sha256 _sha3 _sha512"
"""Machine code that stored modules need: a locked process cannot load it.
Which of these exist depends on Python's version."""
NOT_OFFERED = """
_aix_support _bootsubprocess _osx_support _pydecimal _pyio aifc antigravity asynchat asyncio
asyncore bz2 cProfile cgi cgitb chunk compileall crypt ctypes curses dbm distutils email ensurepip
ftplib http idlelib imaplib imghdr lib2to3 lzma mailbox mailcap mimetypes multiprocessing netrc
nntplib pipes plistlib poplib pty py_compile pyclbr pydoc pydoc_data rlcompleter site smtpd smtplib
sndhdr socketserver sqlite3 ssl subprocess sunau sysconfig tarfile telnetlib test tkinter turtle
turtledemo uu venv wave webbrowser wsgiref xdrlib xml xmlrpc zipapp zipfile zipimport zoneinfo
"""
"""Modules without use in a locked process: networks, processes, screens, file formats."""

_INDEX_SIZE = struct.Struct("=Q")


def preload(extra: Sequence[str]) -> None:
    """Import common modules and the `extra` ones, store the rest, and disable every other import.

    Raises:
        LockdownError: an extra one cannot be imported, or has started a thread; or the kernel
            refuses files in memory.
    """
    # NOTE: keeps OpenSSL out, which would double the pages that every fork has to copy; hashlib
    # then uses the interpreter's own implementations.
    sys.modules["_hashlib"] = None  # pyright: ignore[reportArgumentType]
    for name in IMPORTED.split():
        importlib.import_module(name)
    for name in EXTENSIONS.split():
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    _import_extra(extra[::2], extra[1::2])
    stored = StoredModules()
    # NOTE: an empty path makes any other import a ModuleNotFoundError at once.
    sys.path.clear()
    sys.path_importer_cache.clear()
    sys.meta_path.remove(importlib.machinery.PathFinder)
    sys.meta_path.append(stored)


def seed_generators(seed: int) -> None:
    """Seed every generator that code can use without creating one."""
    random.seed(seed)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(seed % 2**32)


class StoredModules:
    """Finder and loader of the standard library's Python modules, from memory."""

    def __init__(self) -> None:
        try:
            descriptor = os.memfd_create("modules")
        except OSError as error:
            # NOTE: the first of several: the files of streams are in memory too.
            raise LockdownError("memfd", error.strerror) from error
        # NOTE: in a fork, because every later fork would copy the memory that this uses.
        child = os.fork()
        if child == 0:
            try:
                with open(descriptor, "wb") as file:
                    _write_modules(file)
                os._exit(0)
            finally:
                os._exit(1)
        if os.waitpid(child, 0)[1]:
            raise LockdownError("modules", "the standard library cannot be read")
        self._memory = lockdown.ReadOnly(descriptor)
        end = len(self._memory)
        (size,) = _INDEX_SIZE.unpack(self._memory.read(end - _INDEX_SIZE.size, _INDEX_SIZE.size))
        index = self._memory.read(end - _INDEX_SIZE.size - size, size)
        self._index: dict[str, tuple[int, int, bool]] = marshal.loads(index)

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the module's spec if it is stored here; `sys.meta_path` calls this."""
        entry = self._index.get(name)
        if entry is None:
            return None
        # NOTE: to inherit from the abstract class of loaders would import a dozen modules.
        loader: Any = self
        return importlib.machinery.ModuleSpec(name, loader, is_package=entry[2])

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """Return None, for an ordinary module."""

    def exec_module(self, module: types.ModuleType) -> None:
        """Run the module's code."""
        start, size, _ = self._index[module.__name__]
        exec(marshal.loads(self._memory.read(start, size)), module.__dict__)


def _write_modules(file: BinaryIO) -> None:
    directory = os.path.dirname(os.__file__)
    index: dict[str, tuple[int, int, bool]] = {}
    for library in sys.stdlib_module_names.difference(NOT_OFFERED.split()):
        for name, is_package, code in _compile_module(directory, library):
            index[name] = (file.tell(), len(code), is_package)
            file.write(code)
    packed = marshal.dumps(index)
    file.write(packed + _INDEX_SIZE.pack(len(packed)))


def _compile_module(directory: str, name: str) -> Iterator[tuple[str, bool, bytes]]:
    spec = importlib.machinery.PathFinder.find_spec(name, [directory])
    if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
        return
    inner = next(iter(spec.submodule_search_locations or ()), None)
    if name not in sys.modules:
        yield name, inner is not None, marshal.dumps(spec.loader.get_code(name))
    for entry in os.listdir(inner) if inner is not None else ():
        part = entry.removesuffix(".py")
        if part.isidentifier() and part not in ("__init__", "__pycache__", "test"):
            yield from _compile_module(str(inner), f"{name}.{part}")


def _import_extra(names: Sequence[str], directories: Sequence[str]) -> None:
    sys.path += filter(None, dict.fromkeys(directories))
    for name in names:
        try:
            module = importlib.import_module(name)
        except Exception as error:
            # NOTE: a package can raise anything; no work may begin without it.
            raise LockdownError("modules", f"{name} cannot be imported: {error!r}") from error
        # NOTE: some packages import a part when its name is first used, which is too late.
        for part in getattr(module, "__all__", ()):
            with contextlib.suppress(AttributeError, ImportError):
                getattr(module, part)
    if names and len(os.listdir("/proc/self/task")) > 1:
        reason = f"a thread runs, which no fork can copy, after {', '.join(names)}"
        raise LockdownError("modules", reason)
