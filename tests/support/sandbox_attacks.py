"""Programs that attack the sandbox, and a script that runs them all.

    python -m tests.support.sandbox_attacks [sample] [RESTRICTION]...

They are in `tests/sandbox/attacks/CATEGORY.txt`, in sections

    ## name: statuses of a job with calls | statuses of a job with free-form tests

where the second list is left out if it equals the first. None of them knows what `f(1)` should
return, so none may pass. Some attack in the call, some at import. Most return a wrong value
afterwards, as a policy under optimisation would, so "failed" and "error" also mean that the
attack had no effect.

The tests also run this script as another user, and as restricted as a container: each argument
names a function of `sandbox_containers`. So it needs nothing but the standard library and the
package.
"""

import json
import os
import re
import socket
import sys
import tempfile
from itertools import chain, groupby, islice
from pathlib import Path
from typing import NamedTuple

from gdpo_tune.core.errors import SandboxInfraError
from gdpo_tune.sandbox import Call, CodeSandbox, Job, Limits
from gdpo_tune.sandbox.guest.seccomp import MACHINES
from tests.support import sandbox_containers
from tests.support.paths import ROOT

ATTACKS = ROOT / "tests" / "sandbox" / "attacks"
LIMITS = Limits(cpu_seconds=0.2, wall_seconds=0.6, memory_bytes=128 << 20)
# An attack that should not end by a clock gets clocks that a slow or busy machine does not reach.
PATIENT = Limits(cpu_seconds=10.0, wall_seconds=60.0, memory_bytes=LIMITS.memory_bytes)
# The expected values are unlike anything that an attack returns or can find.
CALLS = (Call("f", (1,), 17.25), Call("f", (2,), 34.5))
TESTS = ("assert f(1) == 17.25 and f(2) > f(1)", "assert not f(2) != 34.5")
HONEST = "def f(x): return 17.25 * x"


class Attack(NamedTuple):
    """A program and its expected statuses."""

    code: str
    by_calls: frozenset[str]
    by_tests: frozenset[str]


def choose_limits(statuses: frozenset[str]) -> Limits:
    """Return short clocks only where a clock may end the attack."""
    return LIMITS if "timeout" in statuses else PATIENT


def load_attacks() -> dict[str, Attack]:
    """Load `CATEGORY/name` -> attack, without system calls that this machine does not have."""
    numbers = MACHINES[os.uname().machine].numbers
    attacks = {}
    for path in sorted(ATTACKS.glob("*.txt")):
        for section in path.read_text().removeprefix("## ").split("\n## "):
            head, _, code = section.partition("\n")
            name, _, statuses = head.partition(": ")
            by_calls, _, by_tests = statuses.partition(" | ")
            if set(re.findall(r"NR_(\w+)", code)) <= numbers.keys():
                code = re.sub(r"NR_(\w+)", lambda match: str(numbers[match[1]]), code)
                expected = frozenset(by_calls.split()), frozenset((by_tests or by_calls).split())
                attacks[f"{path.stem}/{name}"] = Attack(code, *expected)
    return attacks


def sample_attacks(of_each: int = 3) -> dict[str, Attack]:
    """Return the first attacks of each category."""
    groups = groupby(load_attacks().items(), lambda item: item[0].partition("/")[0])
    return dict(chain.from_iterable(islice(attacks, of_each) for _, attacks in groups))


def run_attacks(attacks: dict[str, Attack]) -> dict[str, object]:
    """Run attacks by calls and by tests, an honest program after each, and look for harm."""
    outcomes: dict[str, object] = {}
    harmed: list[str] = []
    with (
        socket.create_server(("127.0.0.1", 0)) as loopback,
        socket.socket(socket.AF_UNIX) as abstract,
        tempfile.TemporaryDirectory() as directory,
        CodeSandbox(workers=2) as sandbox,
    ):
        abstract.bind(f"\0sandbox-{os.getpid()}")
        abstract.listen()
        victim = Path(directory, "victim")
        victim.write_text("untouched")
        targets = {
            "@DIRECTORY@": directory,
            "@PORT@": str(loopback.getsockname()[1]),
            "@ABSTRACT@": f"sandbox-{os.getpid()}",
            "@ROOT@": str(ROOT),
        }
        for name, attack in attacks.items():
            code = re.sub("@[A-Z]+@", lambda match: targets[match[0]], attack.code)
            outcomes[name] = _run_attack(sandbox, attack._replace(code=code))
            if os.listdir(directory) != ["victim"] or victim.read_text() != "untouched":
                harmed.append(name)
        loopback.setblocking(False)
        abstract.setblocking(False)
        return {
            "tier": sandbox.info.tier,
            "layers": sandbox.info.layers,
            "visitors": sum(map(_has_connection, (loopback, abstract))),
            "harmed": harmed,
            "outcomes": outcomes,
        }


def _run_attack(sandbox: CodeSandbox, attack: Attack) -> list[object]:
    honest = Job(HONEST, CALLS, asserts=TESTS, limits=PATIENT)
    jobs = [
        Job(attack.code, CALLS, limits=choose_limits(attack.by_calls)),
        honest,
        Job(attack.code, asserts=TESTS, limits=choose_limits(attack.by_tests)),
        honest,
    ]
    try:
        results = sandbox.run_batch(jobs)
    except SandboxInfraError as error:
        return [["infra", [], str(error)]] * len(jobs)
    return [[r.status, r.verdicts, r.untrusted_detail] for r in results]


def _has_connection(server: socket.socket) -> bool:
    try:
        server.accept()[0].close()
        return True
    except BlockingIOError:
        return False


if __name__ == "__main__":
    chosen = load_attacks
    for argument in sys.argv[1:]:
        if argument == "sample":
            chosen = sample_attacks
        else:
            getattr(sandbox_containers, argument)()
    json.dump(run_attacks(chosen()), sys.stdout)
