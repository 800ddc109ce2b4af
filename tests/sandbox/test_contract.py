"""What holds for every sandbox, whether it isolates or not."""

import os
import struct
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from gdpo_tune.sandbox import Call, CodeSandbox, Job, Limits
from gdpo_tune.sandbox.guest import lockdown
from gdpo_tune.sandbox.local_sandbox import UnsafeNoIsolationSandbox
from tests.support.tables import read_named

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module", params=[CodeSandbox, UnsafeNoIsolationSandbox])
def sandbox(request):
    with request.param() as sandbox:
        yield sandbox


@pytest.mark.parametrize(("code", "status", "verdicts"), read_named("sandbox_jobs", "wrong"))
def test_a_wrong_program_gets_its_reason(run, code, status, verdicts):
    calls = (Call("f", (1,), 2), Call("f", (2,), 3))
    # Only a program that sleeps ends by the wall clock, on however busy a machine.
    limits = Limits(0.25, 0.5 if "time.sleep" in code else 60, memory_bytes=256 << 20)
    result = run(code, calls=calls, limits=limits)
    assert (result.status, " ".join(result.verdicts)) == (status, verdicts)


def test_waiting_takes_no_cpu_time(run):
    """Source: clock_gettime(2): CLOCK_PROCESS_CPUTIME_ID counts what the process has computed."""
    limits = Limits(cpu_seconds=1, wall_seconds=60)
    code = "import time\ndef f(x):\n    time.sleep(1.2)\n    return x"
    assert run(code, calls=(Call("f", (1,), 1),), limits=limits).passed


@pytest.mark.parametrize(
    "code",
    [
        "class E:\n    def __eq__(self, other): return True\ndef f(x): return E()",
        "import builtins\nbuiltins.float.__eq__ = lambda a, b: True\ndef f(x): return 0.0",
        "import os\nos.write(3, b'\\x00\\x00\\x00\\x08\"passed\"')\ndef f(x): return 0.0",
    ],
)
def test_no_candidate_grades_itself(run, code):
    assert not run(code, calls=(Call("f", (1,), 17.25),)).passed
    assert not run(code, "assert f(1) > 17 and f(1) < 18").passed
    assert run("def f(x): return 17.25 * x", "assert f(1) > 17 and f(1) < 18").passed


def test_the_tier_and_the_rights_of_code_are_told(sandbox, run, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("17.25")
    read = run(
        f"def f(): return float(open({str(secret)!r}).read())", calls=(Call("f", (), 17.25),)
    )
    user = run("import os\ndef f(): return os.getuid()", calls=(Call("f", (), os.getuid()),))
    if isinstance(sandbox, CodeSandbox):
        assert "seccomp" in sandbox.info.layers
        assert sandbox.info.tier.startswith(("full", "seccomp"))
        assert not read.passed
    else:
        assert (sandbox.info.tier, sandbox.info.layers) == ("unsafe", ("limits",))
        assert read.passed
        assert user.passed


def read_table_of(process, name):
    """Read `status` or `limits` of a process: first words of each line -> its other words."""
    lines = Path(f"/proc/{process.pid}/{name}").read_text().splitlines()
    pairs = [line.split(":", 1) if ":" in line else (line[:25], line[25:]) for line in lines]
    return {key.strip(): value.split() for key, value in pairs}


@pytest.mark.parametrize(("version", "rights"), {1: 13, 2: 14, 3: 15, 4: 15, 5: 16, 6: 16}.items())
def test_every_right_of_a_version_of_landlock_is_refused(monkeypatch, version, rights):
    """Source: landlock_ruleset_attr in include/uapi/linux/landlock.h of Linux 6.12."""
    asked = Mock(side_effect=OSError)
    monkeypatch.setattr(lockdown, "_create_landlock_rules", asked)
    with pytest.raises(OSError):  # noqa: PT011
        lockdown.deny_everything_by_landlock(version)
    attributes, size, flags = asked.call_args.args
    words = struct.unpack(f"={len(attributes) // 8}Q", attributes)
    assert words == ((1 << rights) - 1, 3, 3)[: 1 + (version >= 4) + (version >= 6)]
    assert (size, flags) == (len(attributes), 0)


@pytest.mark.parametrize("kind", [CodeSandbox, UnsafeNoIsolationSandbox])
def test_processes_have_no_rights_and_small_limits(kind):
    """Source: proc(5), getrlimit(2), capabilities(7), landlock(7)."""
    others = psutil.Process().children(recursive=True)
    with kind() as sandbox:
        sandbox.run_batch([Job("def f(x): return x", calls=(Call("f", (1,), 1),))])
        found = psutil.Process().children(recursive=True)
        check_processes(sandbox, [process for process in found if process not in others])


def check_processes(sandbox, processes):
    (zygote,) = [each for each in processes if not each.children()]
    limits = read_table_of(zygote, "limits")
    for name in ("Max core file size", "Max locked memory", "Max msgqueue size"):
        assert limits[name][:2] == ["0", "0"]
    assert limits["Max open files"][:2] == ["16", "16"]
    assert limits["Max file size"][0] == "0"
    if isinstance(sandbox, CodeSandbox):
        statuses = [read_table_of(process, "status") for process in processes]
        for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd"):
            assert [status[kind] for status in statuses] == [["0" * 16]] * len(statuses)
        assert all(process.uids().real != 0 for process in processes)
        assert read_table_of(zygote, "status")["NoNewPrivs"] == ["1"]
        version = lockdown._create_landlock_rules(None, 0, lockdown._LANDLOCK_VERSION)
        assert (f"landlock-{version}" in sandbox.info.layers) is (version > 0)
