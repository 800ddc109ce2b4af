"""The unsafe sandbox: nothing is isolated, yet limits hold and no candidate grades itself."""

import os
from dataclasses import replace

import pytest

from gdpo_tune.sandbox import Call, Job, Limits
from gdpo_tune.sandbox.local_sandbox import UnsafeNoIsolationSandbox

pytestmark = pytest.mark.integration

LIMITS = Limits(cpu_seconds=0.25, wall_seconds=60, memory_bytes=256 << 20)
SLEEP = "import time\ndef f(x): time.sleep(60)"
ONE = (Call("f", (1,), 17.25),)


@pytest.fixture(scope="module")
def sandbox():
    with UnsafeNoIsolationSandbox() as sandbox:
        yield sandbox


def status(sandbox, code, **tests):
    limits = replace(LIMITS, wall_seconds=0.5) if code == SLEEP else LIMITS
    [result] = sandbox.run_batch([Job(code, **(tests or {"calls": ONE}), limits=limits)])
    return result.status


def test_it_reports_its_layers(sandbox):
    assert sandbox.info.tier == "unsafe"
    assert sandbox.info.layers == ("limits",)


def test_code_has_the_rights_of_the_trainer(sandbox, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("17.25")
    assert status(sandbox, f"def f(x): return float(open({str(secret)!r}).read())") == "passed"
    tests = {"calls": (Call("f", (), os.getuid()),)}
    assert status(sandbox, "import os\ndef f(): return os.getuid()", **tests) == "passed"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def f(x): return 17.25 * x", "passed"),
        ("def f(x):\n    while True: pass", "timeout"),
        (SLEEP, "timeout"),
        ("def f(x): return bytearray(1 << 30)", "memory"),
        ("def f(x): print('x' * (1 << 22))", "output"),
    ],
)
def test_limits_clocks_and_statuses_are_those_of_every_sandbox(sandbox, code, expected):
    assert status(sandbox, code) == expected


@pytest.mark.parametrize(
    "code",
    [
        "class E:\n    def __eq__(self, other): return True\ndef f(x): return E()",
        "import builtins\nbuiltins.float.__eq__ = lambda a, b: True\ndef f(x): return 0.0",
        "import os\nos.write(3, b'\\x00\\x00\\x00\\x08\"passed\"')\ndef f(x): return 0.0",
    ],
)
def test_no_candidate_grades_itself(sandbox, code):
    assert status(sandbox, code) != "passed"
    tests = {"asserts": ("assert f(1) > 17 and f(1) < 18",)}
    assert status(sandbox, code, **tests) != "passed"
