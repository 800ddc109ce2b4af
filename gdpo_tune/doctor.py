"""Show on one page what this machine can do, and how to mend what it cannot.

    gdpo-tune doctor mine.yaml    without a file: the machine alone

Exit status 0: nothing is a problem. 1: something is. No password is shown. --json may be passed on:
it has no paths, hosts or values, and quotes no error.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from urllib.request import getproxies

from gdpo_tune import cli
from gdpo_tune.core import addresses, engines, system
from gdpo_tune.core.errors import GdpoTuneError, SpecProblem
from gdpo_tune.core.redaction import redact_passwords

FIX = " " * 26 + "fix: "
GIB = 2**30
EXTRAS = ("vllm", "peft", "adam8bit", "gpu", "s3")
"""Extras of the package that a sweep may need."""
DRIVER = Path("/proc/driver/nvidia/version")
COMPUTE = """import torch
for index in range(torch.cuda.device_count()):
    ones = torch.ones(256, 256, device=index, dtype=torch.bfloat16)
    assert (ones @ ones).sum().item() == 256**3, "wrong product"
    print(torch.cuda.get_device_name(index), torch.cuda.mem_get_info(index)[1] >> 30, "GiB")
assert torch.cuda.device_count(), "PyTorch sees no GPU"
"""
"""Program that multiplies matrices on every GPU: a driver may list one that computes nothing."""
PUBLIC = re.compile(
    r"^(?:[\d.]+(?:(?:a|b|rc|\.post|\.dev)\d+)*(?:\+(?:cpu|cu\d+))?|not installed); tested "
    r"[\d.,<>=!~]*$|^[\d.]+ of \d+, by affinity and quotas|[\d.]+ GiB(?: to write|, with .*)$"
    r"|^none(?:: trainings use CPUs)?$|^works$|^starts on this machine, with a token$"
    r"| could start(?=,|$)"
)
"""Parts of texts that --json prints."""
Row = dict[str, str]
"""`name`, `state` (ok, warning or problem), `text` and `fix` of one check."""


def main(arguments: Sequence[str]) -> int:
    """Print the page and return the exit status."""
    options = build_parser().parse_args(arguments)

    from gdpo_tune.display.tables import build_console

    rows = [*_check_versions(), *_check_machine()]
    rows += _check_file(options.space, options.overrides) if options.space else ()
    pairs = ((f"{r['name']:<15}  {r['state']:<7}  {r['text']}", FIX + r["fix"]) for r in rows)
    lines = (line for pair in pairs for line in pair if line != FIX)
    for row in rows if options.json else ():
        if row["state"] != "ok" or row["name"] not in ("GPUs", "sandbox"):
            row["text"] = "; ".join(PUBLIC.findall(row["text"])).strip()
            row["fix"] = "" if row["name"] in ("file", "sandbox", "Ray") else row["fix"]
    page = json.dumps(rows, indent=1) if options.json else "\n".join(lines)
    build_console().print(page, markup=False, highlight=False, soft_wrap=True)
    return int(any(row["state"] == "problem" for row in rows))


def build_parser() -> cli.Parser:
    """Build the command line."""
    parser = cli.Parser(__name__, abbreviations=True)
    parser.prog = "gdpo-tune doctor"
    parser.file("space", "check a sweep, too", metavar="FILE.yaml", nargs="?")
    parser.overrides()
    parser.flag("--json", "print a list of objects instead")
    return parser


def _build_row(name: str, text: str, fix: str = "", *, fine: bool, state: str = "problem") -> Row:
    text, _, own = redact_passwords(text.strip()).partition("\n    fix: ")
    state, fix = ("ok", "") if fine else (state, own or fix)
    return {"name": name, "state": state, "text": text, "fix": fix}


def _check_versions() -> Iterator[Row]:
    from packaging.requirements import Requirement

    python = f"python{metadata.metadata('gdpo-tune')['Requires-Python']}"
    for need in map(Requirement, (python, *(metadata.requires("gdpo-tune") or ()))):
        if need.marker and not any(need.marker.evaluate({"extra": extra}) for extra in EXTRAS):
            continue
        version = next((each.version for each in metadata.distributions(name=need.name)), "")
        version = platform.python_version() if need.name == "python" else version
        fine = need.specifier.contains(version, True) if version else need.marker is not None
        text = f"{version or 'not installed'}; tested {need.specifier}"
        fix, state = f"pip install '{need.name}{need.specifier}'", "problem"
        yield _build_row(need.name, text, fix, fine=fine, state="warning" if need.marker else state)


def _check_machine() -> Iterator[Row]:
    from gdpo_tune.sandbox import CodeSandbox
    from gdpo_tune.spec.machine import count_visible_gpus, list_other_sweeps
    from gdpo_tune.spec.model import Tracking
    from gdpo_tune.tracking.server import find_problem
    from gdpo_tune.tuning.ray.cluster import describe_access, find_cluster, find_thread_problem

    others, memory = [*list_other_sweeps()], (system.read_machine_memory() or 0) / GIB
    cpus = f"{system.count_local_cpus()} of {os.cpu_count()}, by affinity and quotas"
    yield _build_row("CPUs", "; ".join((cpus, *others[:1])), fine=not others, state="warning")
    fix = "raise the limit of this machine, container or job"
    yield _build_row("memory", f"{memory:.1f} GiB, with all limits", fix, fine=memory >= 2)
    temporary = os.environ.get("TMPDIR") or tempfile.gettempdir()
    for name, place, least, fix in (
        ("shared memory", "/dev/shm", 0.25, "docker run --shm-size=2g"),
        ("TMPDIR", temporary, 1, "export TMPDIR=DIRECTORY with room that may be written"),
        ("disk", os.getcwd(), 1, "make room, or --set storage=DIRECTORY"),
    ):
        free = shutil.disk_usage(place).free / GIB if os.access(place, os.W_OK) else 0
        # Ray uses TMPDIR in place of a small /dev/shm, so a sweep runs
        state = "warning" if name == "shared memory" else "problem"
        text = f"{place}: {free:.1f} GiB to write"
        yield _build_row(name, text, fix, fine=free >= least, state=state)
    try:
        with CodeSandbox() as sandbox:
            yield _build_row("sandbox", sandbox.info.tier, fine=True)
    except GdpoTuneError as error:
        yield _build_row("sandbox", str(error), "see docs/sandbox.md", fine=False)
    if count_visible_gpus(os.environ):
        yield from check_gpus()
    else:
        yield _build_row("GPUs", "none: trainings use CPUs", fine=True)
    proxies = [f"{kind}: {url}" for kind, url in getproxies().items() if kind != "no"]
    yield _build_row("proxies", ", ".join(proxies) or "none", fine=True)
    uri = os.environ.get("MLFLOW_TRACKING_URI") or Tracking().uri
    problem, fix = (
        find_problem(uri),
        "mend that, or name another server: export MLFLOW_TRACKING_URI=...",
    )
    yield _build_row("MLflow", f"{uri} {problem}", fix, fine=not problem)
    if address := os.environ.get(addresses.RAY_ADDRESS, ""):
        try:
            find_cluster()
            text = f"{addresses.RAY_ADDRESS} = {address} {describe_access(address)}"
            yield _build_row("Ray", text, fine=True)
        except GdpoTuneError as error:
            yield _build_row("Ray", str(error), fine=False)
    else:
        problem = find_thread_problem()
        yield _build_row("Ray", problem or "starts on this machine, with a token", fine=not problem)


def check_gpus() -> Iterator[Row]:
    """Yield the GPUs of this process, after each has multiplied matrices, and the C compiler."""
    command = ["timeout", "120", sys.executable, "-c", COMPUTE]
    done = subprocess.run(command, capture_output=True, text=True)
    driver = DRIVER.read_text().splitlines()[0] if DRIVER.exists() else "unknown driver"
    error = (done.stderr.splitlines() or ["no answer"])[-1]
    said = error if done.returncode else ", ".join(done.stdout.splitlines())
    fix = "install the GPU's driver, and a PyTorch that was built for it"
    yield _build_row("GPUs", f"{driver}; {said}", fix, fine=not done.returncode)
    problem = engines.find_compiler_problem(os.environ.get("CC"), os.environ.get("PATH"))
    yield _build_row("compiler", problem or "works", engines.COMPILER_FIX, fine=not problem)


def _check_file(file: str, overrides: Sequence[str]) -> Iterator[Row]:
    from gdpo_tune.spec import load_spec

    needs: list[SpecProblem] = []
    try:
        spec = load_spec(file, overrides, needs=needs)
        cli.set_written_variables(spec)
        place = next(p for p in (spec.directory.absolute() / "x").parents if p.exists())
        problems = [*needs, *cli.find_problems(spec)]
        if not spec.address and not os.access(place, os.W_OK):
            problems += [f"{place} is not writable\n    fix: name another one with storage:"]
        if not problems:
            found = map(": ".join, cli.preflight(spec).items())
            yield _build_row("file", ", ".join((f"{file} could start", *found)), fine=True)
    except GdpoTuneError as error:
        problems = getattr(error, "problems", [error])
    yield from (_build_row("file", str(problem), fine=False) for problem in problems)


if __name__ == "__main__":
    cli.run_command(main)
