"""Programs that attack the sandbox, and what runs them all.

    python -m tests.support.sandbox_attacks [POVERTY]...

They lie in `attacks/CATEGORY.txt`, in sections

    ## name: statuses when asked by calls | statuses when asked by free-form tests

with the second list left out where it is the first. None of them knows what `f(1)` should
return, so none may pass. Some try in the call, some at import; most return a wrong value
afterwards, as a policy under optimisation would, so "failed" and "error" also mean that the
attempt had no effect.

The tests start this file as another user too, and as poor as a container (the functions of
`sandbox_containers` that its arguments name), so it needs nothing but the standard library and
the package.
"""

import json
import os
import re
import socket
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from gdpo_tune.core.errors import SandboxInfraError
from gdpo_tune.sandbox import Call, CodeSandbox, Job, Limits
from gdpo_tune.sandbox.inside.syscalls import MACHINES
from tests.support import sandbox_containers

ATTACKS = Path(__file__).parents[1] / "sandbox" / "attacks"
LIMITS = Limits(cpu_seconds=0.2, wall_seconds=0.6, memory_bytes=128 << 20)
# Memory is to run out before these clocks do, however slowly a loaded machine hands it out.
PATIENT = Limits(cpu_seconds=4.0, wall_seconds=20.0, memory_bytes=LIMITS.memory_bytes)
# The expected values are unlike anything that an attack returns or finds lying about.
CALLS = (Call("f", (1,), 17.25), Call("f", (2,), 34.5))
TESTS = ("assert f(1) == 17.25 and f(2) > f(1)", "assert not f(2) != 34.5")
HONEST = "def f(x): return 17.25 * x"


class Attack(NamedTuple):
    """A program and the statuses that are as expected."""

    code: str
    by_calls: frozenset[str]
    by_tests: frozenset[str]

    @property
    def limits(self) -> Limits:
        """Under which it runs."""
        return PATIENT if self.by_calls | self.by_tests == {"memory"} else LIMITS


def attacks() -> dict[str, Attack]:
    """`CATEGORY/name` -> attack; without those of system calls that this machine has not."""
    numbers = MACHINES[os.uname().machine].numbers
    found = {}
    for path in sorted(ATTACKS.glob("*.txt")):
        for section in path.read_text().removeprefix("## ").split("\n## "):
            head, _, code = section.partition("\n")
            name, _, statuses = head.partition(": ")
            by_calls, _, by_tests = statuses.partition(" | ")
            if set(re.findall(r"NR_(\w+)", code)) <= numbers.keys():
                code = re.sub(r"NR_(\w+)", lambda match: str(numbers[match[1]]), code)
                expected = frozenset(by_calls.split()), frozenset((by_tests or by_calls).split())
                found[f"{path.stem}/{name}"] = Attack(code, *expected)
    return found


def run_all() -> dict[str, object]:
    """Run every attack by calls and by tests, an honest program with it, and look for harm."""
    outcomes: dict[str, object] = {}
    harmed: list[str] = []
    with (
        socket.create_server(("127.0.0.1", 0)) as loopback,
        socket.socket(socket.AF_UNIX) as abstract,
        tempfile.TemporaryDirectory() as folder,
        CodeSandbox(workers=2) as sandbox,
    ):
        abstract.bind(f"\0sandbox-{os.getpid()}")
        abstract.listen()
        victim = Path(folder, "victim")
        victim.write_text("untouched")
        places = {
            "@FOLDER@": folder,
            "@PORT@": str(loopback.getsockname()[1]),
            "@ABSTRACT@": f"sandbox-{os.getpid()}",
            "@ROOT@": str(Path(__file__).parents[2]),
        }
        for name, attack in attacks().items():
            code = re.sub("@[A-Z]+@", lambda match: places[match[0]], attack.code)
            outcomes[name] = _run(sandbox, code, attack.limits)
            if os.listdir(folder) != ["victim"] or victim.read_text() != "untouched":
                harmed.append(name)
        loopback.setblocking(False)
        abstract.setblocking(False)
        visitors = [visitor for server in (loopback, abstract) for visitor in _visitors(server)]
        return {
            "tier": sandbox.info.tier,
            "layers": sandbox.info.layers,
            "visitors": len(visitors),
            "harmed": harmed,
            "outcomes": outcomes,
        }


def _run(sandbox: CodeSandbox, code: str, limits: Limits) -> list[object]:
    honest = Job(HONEST, CALLS, asserts=TESTS)
    # NOTE: a worker takes two jobs at once, so each attack has one of its own.
    jobs = [
        Job(code, CALLS, limits=limits),
        honest,
        Job(code, asserts=TESTS, limits=limits),
        honest,
    ]
    try:
        results = sandbox.run_batch(jobs)
    except SandboxInfraError as error:
        return [["infra", [], str(error)]] * len(jobs)
    return [[r.status, r.verdicts, r.untrusted_detail] for r in results]


def _visitors(server: socket.socket) -> list[socket.socket]:
    try:
        return [server.accept()[0]]
    except BlockingIOError:
        return []


if __name__ == "__main__":
    for poverty in sys.argv[1:]:
        getattr(sandbox_containers, poverty)()
    json.dump(run_all(), sys.stdout)
