"""Put faults into a room, one at a time, and see whether a test notices.

    python -m tests.mutants ROOM

The faults are a sample by a seed. Each runs the tests that cover its line, in a copy of the tree.
What became of them is written to tests/mutants/ROOM.txt; those that no test can notice are named,
with the reason, in equivalent.yaml.
"""

import argparse
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from coverage import CoverageData
from ruamel.yaml import YAML

from tests.mutants.faults import Fault, list_faults
from tests.mutants.run_pytest import run_pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PACKAGE = ROOT / "gdpo_tune"
LEFT_OUT = ".git .coverage* .venv* .*cache .hypothesis runs build site __pycache__ *.egg-info"
SKIPPED = shutil.ignore_patterns(*LEFT_OUT.split())
MOST_TESTS = 60, 600
"""Tests of other rooms that a fault runs at most, and those that one runs which they miss."""
LONGEST = 900
"""Seconds after which a fault counts as noticed: it hangs."""
PROCESSES = multiprocessing.get_context("forkserver")
# What takes seconds to import, once; nothing of the package, which has the fault.
LIBRARIES = "mlflow optuna peft plotly.graph_objects pytest ray scipy.stats sklearn trl"
PROCESSES.set_forkserver_preload([*LIBRARIES.split(), "trl.trainer.grpo_trainer"])


def main() -> int:
    """Run the faults of a room; return 1 if one survives."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("room", help="a room of the package, such as analysis, or a file in one")
    parser.add_argument("-n", "--count", type=int, default=60, help="faults in the sample")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="faults at a time")
    parser.add_argument("--coverage", default=ROOT / ".coverage", type=Path)
    options = parser.parse_args()
    place = PACKAGE / options.room
    if not place.exists():
        parser.error(f"{options.room}: no such room, or file of one, below gdpo_tune")
    if options.coverage.stat().st_mtime < max(f.stat().st_mtime for f in PACKAGE.rglob("*.py")):
        parser.error(f"{options.coverage} is older than the package: delete it, and make it again")
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
    faults = [fault for file in files for fault in list_faults(file, PACKAGE)]
    chosen = random.Random(options.seed).sample(faults, min(options.count, len(faults)))
    chosen.sort(key=lambda fault: (fault.file, fault.line))
    equivalent = YAML(typ="safe").load(HERE / "equivalent.yaml") or {}
    tests = CoveringTests(options.coverage, files[0].relative_to(PACKAGE).parts[0])
    lines = []
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.jobs) as pool:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(options.jobs):
            copies.put(copy := Path(scratch, str(number)))
            shutil.copytree(ROOT, copy, ignore=SKIPPED)

        unchanged = chosen[0]._replace(source=chosen[0].file.read_text(encoding="utf-8"))
        if run_tests(unchanged, copy, tests.find(unchanged, MOST_TESTS[0])) == "killed":
            parser.error("the tests fail without a fault:\n" + (copy / "output.txt").read_text())

        def judge(fault: Fault) -> str:
            if fault.name in equivalent:
                return "equivalent"
            copy = copies.get()
            try:
                fates = (run_tests(fault, copy, tests.find(fault, n)) for n in MOST_TESTS)
                return "killed" if "killed" in fates else "survived"
            finally:
                copies.put(copy)

        for fault, fate in zip(chosen, pool.map(judge, chosen), strict=True):
            lines.append(f"{fate:<11}{fault.name}")
            print(f"{fate:<11}{fault.file.relative_to(ROOT)}:{fault.line} {fault.name}", flush=True)
    fates = Counter(line.split()[0] for line in lines)
    shares = ", ".join(f"{count} {fate}" for fate, count in sorted(fates.items()))
    title = (
        f"# {options.room}: {len(faults):,} faults, {len(chosen)} by seed {options.seed}: {shares}"
    )
    if place.is_dir():
        (HERE / f"{options.room}.txt").write_text("\n".join([title, *lines, ""]))
    print(title)
    return 1 if fates["survived"] else 0


class CoveringTests:
    """The tests that run a line, from a run of all tests under coverage with their names."""

    def __init__(self, file: Path, room: str) -> None:
        self._data = CoverageData(str(file))
        self._data.read()
        self._room = f"tests/{room}/"
        self._files = {Path(name).relative_to(ROOT): name for name in self._data.measured_files()}

    def find(self, fault: Fault, most: int) -> list[str]:
        """Return the identifiers of tests for pytest; those of the room, then `most` others.

        Where none is known to run the line, as in processes without coverage, it is those of the
        room.
        """
        name = self._files.get(fault.file.relative_to(ROOT))
        by_line = self._data.contexts_by_lineno(name) if name else {}
        found = _name_tests(by_line.get(fault.line, ()))
        if not found and ":: " in fault.name:  # of the module: it runs while that is imported
            found = _name_tests(name for names in by_line.values() for name in names)
        own = sorted(test for test in found if test.startswith(self._room))
        others = sorted(found.difference(own))
        chosen = own + random.Random(0).sample(others, min(len(others), most))
        return chosen or [name for name in [self._room] if (ROOT / name).exists()]


def _name_tests(contexts) -> set[str]:
    return {context.rpartition("|")[0] for context in contexts if context}


def run_tests(fault: Fault, copy: Path, tests: list[str]) -> str:
    """Return how the tests end with the fault in `copy`."""
    if not tests:
        return "survived"
    target = copy / fault.file.relative_to(ROOT)
    original = target.read_text(encoding="utf-8")
    target.write_text(fault.source, encoding="utf-8")
    run = PROCESSES.Process(target=run_pytest, args=(copy, tests))
    run.start()
    run.join(LONGEST)
    if run.is_alive():
        os.killpg(run.pid, signal.SIGKILL)
        run.join()
    target.write_text(original, encoding="utf-8")
    if "ERROR: not found" in (copy / "output.txt").read_text(errors="replace"):
        raise RuntimeError(f"{tests}: the coverage names tests that are not there")
    return "killed" if run.exitcode else "survived"


if __name__ == "__main__":
    sys.exit(main())
