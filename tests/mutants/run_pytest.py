"""Tests of a copy of the tree, in a process that has the libraries already."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_pytest(copy: Path, tests: list[str]) -> None:
    """Run the tests of the copy in this process, which has the libraries alone."""
    os.setsid()
    os.chdir(copy)
    sys.path[:] = [str(copy), *(entry for entry in sys.path if Path(entry).resolve() != ROOT)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    output = os.open(copy / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
    ignore = "ignore::pytest.PytestAssertRewriteWarning"  # of plugins that the libraries import
    sys.exit(pytest.main([*options, "-W", ignore, *tests]))
