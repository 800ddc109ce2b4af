"""The modules that candidates and tests may import.

A locked process cannot open a file, so what is not in memory before the fork does not exist
for it. What nearly every program needs is imported before. Of the rest of the standard library
the compiled code is kept, on a shelf from which a fork imports when it needs to: modules that
are imported but not used would cost every fork time, since it has to copy their pages.
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

from . import linux
from .enclosure import StepFailed

IMPORTED = """
abc array binascii bisect cmath collections collections.abc contextlib copy datetime decimal
enum fractions functools heapq io itertools json math numbers operator os random re string
struct sys time types typing unicodedata warnings zlib
"""
EXTENSIONS = "_blake2 _contextvars _csv _md5 _sha1 _sha2 _sha256 _sha3 _sha512"
"""Machine code that modules on the shelf need: it cannot be loaded once a process is locked.
Which of these there are depends on Python's version."""
NOT_OFFERED = """
_aix_support _bootsubprocess _osx_support _pydecimal _pyio aifc antigravity asynchat asyncio
asyncore bz2 cProfile cgi cgitb chunk compileall crypt ctypes curses dbm distutils email ensurepip
ftplib http idlelib imaplib imghdr lib2to3 lzma mailbox mailcap mimetypes multiprocessing netrc
nntplib pipes plistlib poplib pty py_compile pyclbr pydoc pydoc_data rlcompleter site smtpd smtplib
sndhdr socketserver sqlite3 ssl subprocess sunau sysconfig tarfile telnetlib test tkinter turtle
turtledemo uu venv wave webbrowser wsgiref xdrlib xml xmlrpc zipapp zipfile zipimport zoneinfo
"""
"""What a locked process could not use: networks, processes, screens, file formats."""

_INDEX_SIZE = struct.Struct("=Q")


def preload(extra: Sequence[str]) -> None:
    """Import what is common, put the rest on the shelf, forget where modules come from.

    Args:
        extra: names of further modules, each followed by the folder of its top package.

    Raises:
        StepFailed: one of these cannot be imported, or has started a thread; or the kernel
            refuses files in memory.
    """
    # NOTE: keeps OpenSSL out, which would double what every fork has to copy; hashlib then
    # takes the interpreter's own implementations.
    sys.modules["_hashlib"] = None  # pyright: ignore[reportArgumentType]
    for name in IMPORTED.split():
        importlib.import_module(name)
    for name in EXTENSIONS.split():
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    _load_extra(extra[::2], extra[1::2])
    shelf = Shelf()
    # NOTE: an empty path makes any other import a ModuleNotFoundError at once.
    sys.path.clear()
    sys.path_importer_cache.clear()
    sys.meta_path.remove(importlib.machinery.PathFinder)
    sys.meta_path.append(shelf)


def seed_generators(seed: int) -> None:
    """Seed every generator that code may use without an object of its own."""
    random.seed(seed)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(seed % 2**32)


class Shelf:
    """Finds and loads the standard library's modules in Python, from memory."""

    def __init__(self) -> None:
        try:
            descriptor = os.memfd_create("shelf")
        except OSError as error:
            # The first of several: a stream's files are such files too.
            raise StepFailed("memfd", error.strerror) from error
        # NOTE: in a fork, because what it leaves behind in memory every later fork would copy.
        child = os.fork()
        if child == 0:
            try:
                with open(descriptor, "wb") as file:
                    _fill(file)
                os._exit(0)
            finally:
                os._exit(1)
        if os.waitpid(child, 0)[1]:
            raise StepFailed("modules", "the standard library cannot be read")
        self._memory = linux.ReadOnly(descriptor)
        end = len(self._memory)
        (size,) = _INDEX_SIZE.unpack(self._memory.read(end - _INDEX_SIZE.size, _INDEX_SIZE.size))
        index = self._memory.read(end - _INDEX_SIZE.size - size, size)
        self._places: dict[str, tuple[int, int, bool]] = marshal.loads(index)

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Say whether the module is here, as `sys.meta_path` wants to know."""
        place = self._places.get(name)
        if place is None:
            return None
        # NOTE: to inherit from the abstract class that is meant would load a dozen modules.
        loader: Any = self
        return importlib.machinery.ModuleSpec(name, loader, is_package=place[2])

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """An ordinary module will do."""

    def exec_module(self, module: types.ModuleType) -> None:
        """Run the module's code."""
        start, size, _ = self._places[module.__name__]
        exec(marshal.loads(self._memory.read(start, size)), module.__dict__)


def _fill(file: BinaryIO) -> None:
    places: dict[str, tuple[int, int, bool]] = {}
    for name, is_package, code in _standard_library():
        places[name] = (file.tell(), len(code), is_package)
        file.write(code)
    index = marshal.dumps(places)
    file.write(index + _INDEX_SIZE.pack(len(index)))


def _standard_library() -> Iterator[tuple[str, bool, bytes]]:
    """Name, whether it is a package, and compiled code of what is offered in Python."""
    folder = os.path.dirname(os.__file__)
    for name in sys.stdlib_module_names.difference(NOT_OFFERED.split()):
        yield from _compiled(folder, name)


def _compiled(folder: str, name: str) -> Iterator[tuple[str, bool, bytes]]:
    spec = importlib.machinery.PathFinder.find_spec(name, [folder])
    if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
        return
    inner = next(iter(spec.submodule_search_locations or ()), None)
    if name not in sys.modules:
        yield name, inner is not None, marshal.dumps(spec.loader.get_code(name))
    for entry in os.listdir(inner) if inner is not None else ():
        part = entry.removesuffix(".py")
        if part.isidentifier() and part not in ("__init__", "__pycache__", "test"):
            yield from _compiled(str(inner), f"{name}.{part}")


def _load_extra(names: Sequence[str], folders: Sequence[str]) -> None:
    sys.path += filter(None, dict.fromkeys(folders))
    for name in names:
        try:
            module = importlib.import_module(name)
        except Exception as error:
            # A package can raise whatever it likes; no work may begin without it.
            raise StepFailed("modules", f"{name} cannot be imported: {error!r}") from error
        # NOTE: some packages load a part when its name is first used; then it is too late.
        for part in getattr(module, "__all__", ()):
            with contextlib.suppress(AttributeError, ImportError):
                getattr(module, part)
    if names and len(os.listdir("/proc/self/task")) > 1:
        started = ", ".join(names)
        raise StepFailed("modules", f"a thread runs, which no fork can copy, after {started}")
