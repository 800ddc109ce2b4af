"""What a locked process can import: the standard library, from memory, and nothing else."""

import pytest

from gdpo_tune.sandbox import Call, Job

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


def test_the_standard_library_can_be_imported(sandbox):
    jobs = []
    for name in OFFERED.split():
        expected = "posixpath" if name == "os.path" else name
        code = f"import {name} as module\ndef f(): return module.__name__"
        jobs.append(Job(code, (Call("f", (), expected),)))
    results = dict(zip(OFFERED.split(), sandbox.run_batch(jobs), strict=True))
    assert {name: result for name, result in results.items() if not result.passed} == {}


def test_what_is_not_offered_is_not_found(sandbox):
    names = ("subprocess", "multiprocessing", "asyncio", "ssl", "numpy", "pytest", "gdpo_tune")
    jobs = [Job(f"import {name}", (Call("f", (), 1),)) for name in names]
    for name, result in zip(names, sandbox.run_batch(jobs), strict=True):
        found = f"ModuleNotFoundError: No module named '{name}'"
        assert (result.status, result.untrusted_detail) == ("error", found)


PROGRAMS = {
    "dataclass": (
        "from dataclasses import dataclass, field\n@dataclass(order=True)\nclass P:\n    x: int\n"
        "    y: list = field(default_factory=list)\ndef f(): return P(1) < P(2)",
        True,
    ),
    "codec": ("def f(): return 'é€'.encode('cp1252').hex() + b'eA'.decode('utf-7')", "e980eA"),
    "source_coding": ("# -*- coding: latin-1 -*-\ndef f(): return 'é'", "é"),
    "pickle": (
        "import pickle\ndef f(): return pickle.loads(pickle.dumps({'a': (1, {2})}))",
        {"a": (1, {2})},
    ),
    "late_import": ("def f():\n    from statistics import stdev\n    return stdev([1, 3])", 2**0.5),
    "named_character": (r"def f(): return '\N{GREEK SMALL LETTER ALPHA}'", "\u03b1"),
    "unittest": (
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(1, 1)\n"
        "def f(): return unittest.TestLoader().loadTestsFromTestCase(T).countTestCases()",
        1,
    ),
    "logging": ("import logging\nlogging.warning('x')\ndef f(): return logging.WARNING", 30),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_modules_from_memory_do_their_work(sandbox, name):
    code, expected = PROGRAMS[name]
    (result,) = sandbox.run_batch([Job(code, (Call("f", (), expected),))])
    assert result.status == "passed", result


def test_a_candidate_that_overwrites_the_modules_in_memory_meets_no_other(sandbox):
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
    first, second = sandbox.run_batch(
        [Job(overwrite, (Call("f", (), "over"),)), Job(after, (Call("f", (), "a"),))]
    )
    assert first.status == "passed", first
    assert second.status == "passed", second
