"""A sandbox that does not start leaves no process and no thread behind."""

import shutil
import subprocess
import sys
import threading

import psutil
import pytest

from gdpo_tune.core.errors import SandboxUnavailable
from gdpo_tune.sandbox import CodeSandbox, local_sandbox, process
from tests.support.paths import ROOT

pytestmark = pytest.mark.integration


@pytest.fixture
def before():
    """Processes that there were; whatever starts during the test must be gone at its end."""
    children = set(psutil.Process().children(recursive=True))
    yield children
    assert set(psutil.Process().children(recursive=True)) == children
    assert not [t for t in threading.enumerate() if t.name.startswith("sandbox-")]


def fail_second(monkeypatch, module, name, error):
    """Let the second call of a function of the module raise."""
    function, calls = getattr(module, name), []

    def call(*arguments, **more):
        calls.append(arguments)
        if len(calls) == 2:
            raise error
        return function(*arguments, **more)

    monkeypatch.setattr(module, name, call)


@pytest.mark.parametrize(
    ("module", "name", "error", "reason"),
    [
        (
            *(process, "_launch", BlockingIOError(11, "Resource temporarily unavailable")),
            r"start: no zygote process: .*temporarily unavailable$",
        ),
        (
            *(process.socket, "socketpair", OSError(24, "Too many open files")),
            r"open files; write fewer sandbox\.workers",
        ),
        (local_sandbox, "SandboxProcess", MemoryError("no room"), "no room"),
    ],
)
def test_a_second_zygote_that_does_not_start(before, monkeypatch, module, name, error, reason):
    fail_second(monkeypatch, module, name, error)
    with pytest.raises(SandboxUnavailable, match=reason):
        CodeSandbox(workers=2)


def test_a_module_that_cannot_be_loaded(before, tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("raise OSError('half installed')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SandboxUnavailable, match=r"broken_module .*half installed"):
        CodeSandbox(workers=2, modules=("broken_module",))


TRAINER = """
import os, resource, sys
{preparation}
from gdpo_tune.sandbox import *
job = Job("def f(x): return [x] * x", (Call("f", (3,), [3, 3, 3]),))
tests = Job(job.code, asserts=("assert len(f(3)) == 3",))
stream = Job("print(input())", streams=(Stream("1", "1"),))
with CodeSandbox() as sandbox:
    results = sandbox.run_batch([job, tests, stream])
sys.exit(0 if all(result.passed for result in results) else str(results))
"""
SHELLS = {
    "closed_streams": "os.closerange(0, 3)",
    "less_address_space_than_a_job_may_have": (
        "resource.setrlimit(resource.RLIMIT_AS, (400 << 20, 400 << 20))"
    ),
    "less_cpu_time_than_a_job_may_have": (
        "import gdpo_tune.sandbox; used = int(sum(os.times()[:2])) + 2; "
        "resource.setrlimit(resource.RLIMIT_CPU, (used, used))"
    ),
}


@pytest.mark.parametrize("shell", SHELLS)
def test_the_trainers_own_limits_and_streams_do_not_matter(shell):
    program = TRAINER.format(preparation=SHELLS[shell])
    trainer = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert trainer.returncode == 0, trainer.stderr


def test_an_unforeseen_error_in_a_process_is_reported_with_its_step(before, tmp_path, monkeypatch):
    shutil.copy(process._LAUNCHER, tmp_path)
    shutil.copytree(process._LAUNCHER.parent / "guest", tmp_path / "guest")
    with (tmp_path / "guest/zygote.py").open("a") as zygote:
        zygote.write("def _prepare(): raise LookupError(3)\n")
    monkeypatch.setattr(process, "_LAUNCHER", tmp_path / "launch.py")
    with pytest.raises(SandboxUnavailable, match=r"prepare: LookupError\(3\)"):
        CodeSandbox()
