"""What a locked process can import: the standard library, from memory, and nothing else."""

import pytest

from tests.support.tables import read_named

pytestmark = pytest.mark.integration

OFFERED = (
    "abc argparse ast base64 calendar collections.abc concurrent.futures configparser contextvars "
    "copy csv dataclasses datetime difflib dis doctest encodings.cp1252 encodings.idna fnmatch "
    "functools getopt glob graphlib hashlib hmac html html.parser importlib.util inspect ipaddress "
    "json.decoder linecache locale logging numbers operator optparse os.path pathlib pdb pickle "
    "platform pprint queue quopri secrets selectors shelve shlex shutil statistics string tempfile "
    "textwrap threading timeit token tokenize tomllib traceback types unittest urllib.parse uuid "
    "warnings"
)


def test_the_standard_library_can_be_imported_and_nothing_else(run):
    code = "import {} as module\ndef f(): return module.__name__"
    for name in OFFERED.split():
        expected = "posixpath" if name == "os.path" else name
        assert run(code.format(name), f"assert f() == {expected!r}").passed, name
    for name in ("subprocess", "multiprocessing", "asyncio", "ssl", "numpy", "pytest", "gdpo_tune"):
        result = run(f"import {name}", "assert f() == 1")
        found = f"ModuleNotFoundError: No module named '{name}'"
        assert (result.status, result.untrusted_detail) == ("error", found)


@pytest.mark.parametrize(("code", "expected"), read_named("sandbox_jobs", "modules"))
def test_modules_from_memory_do_their_work(run, code, expected):
    assert run(code, f"assert f() == {expected}").passed


def test_a_candidate_that_overwrites_the_modules_in_memory_meets_no_other(run):
    overwrite = """
import ctypes, sys
stored = next(finder for finder in sys.meta_path if type(finder).__name__ == "StoredModules")
memory = stored._memory
start = memory._address & ~4095
def f():
    changed = ctypes.CDLL(None).mprotect(ctypes.c_void_p(start), ctypes.c_size_t(len(memory)), 3)
    if changed == 0:
        ctypes.memset(start, 0, len(memory))
    return "over"
"""
    after = "import textwrap\ndef f(): return textwrap.dedent('  a')"
    assert run(overwrite, "assert f() == 'over'").passed
    assert run(after, "assert f() == 'a'").passed
