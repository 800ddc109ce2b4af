"""How many workers a batch gets; a worker that does not start leaves nothing behind."""

import threading
from contextlib import suppress

import pytest

from gdpo_tune.core.errors import SandboxUnavailable
from gdpo_tune.sandbox import Call, CodeSandbox, Job, Limits, local_sandbox
from gdpo_tune.sandbox.local_sandbox import UnsafeNoIsolationSandbox, count_workers_in_memory

GIB = 1 << 30


def take_all(waiting):
    """Take jobs as a worker does: others may take some of them meanwhile."""
    with suppress(IndexError):
        while True:
            yield waiting.popleft()


class ScriptedWorker:
    """Counts the open workers; runs nothing."""

    layers = ("seccomp",)
    open = 0
    isolated: list[bool] = []
    failing: str | None = None
    """Name of the thread whose worker does not start."""

    def __init__(self, modules=(), *, isolated=True):
        if self.failing and threading.current_thread().name.startswith(self.failing):
            raise SandboxUnavailable("start: no room")
        ScriptedWorker.open += 1
        self.isolated.append(isolated)
        self.modules = modules

    def run(self, waiting, results):
        for job in take_all(waiting):
            results[job.index] = (threading.current_thread().name, self.modules)

    def interrupt(self):
        """It does not wait for anything."""

    def close(self):
        ScriptedWorker.open -= 1


@pytest.fixture
def scripted(monkeypatch):
    monkeypatch.setattr(local_sandbox, "Worker", ScriptedWorker)
    for name, value in (("open", 0), ("isolated", []), ("failing", None)):
        monkeypatch.setattr(ScriptedWorker, name, value)
    return ScriptedWorker


def job(memory=GIB, **tests):
    tests = tests or {"calls": (Call("f", (), 1),)}
    return Job("", **tests, limits=Limits(memory_bytes=memory))


CHECKED = job(asserts=("assert f() == 1",))


@pytest.mark.parametrize(
    ("jobs", "memory", "expected"),
    [
        ([job()], 8 * GIB, 4), ([job()], 6 * GIB, 3), ([job()], 7 * GIB, 3), ([job()], None, 4),
        ([job(GIB // 2), job(2 * GIB), job(GIB // 4)], 8 * GIB, 2), ([CHECKED], 8 * GIB, 2),
        # One worker works even where its limit is more than the share, or all there is.
        ([job()], GIB + GIB // 2, 1), ([job()], GIB, 1), ([CHECKED], GIB, 1), ([], GIB, 4),
    ],
)  # fmt: skip
def test_a_batch_gets_the_workers_that_fit_into_memory(jobs, memory, expected):
    assert count_workers_in_memory(4, jobs, memory) == expected


def test_a_job_that_the_machine_cannot_hold_is_refused():
    with pytest.raises(ValueError, match=r"limit is 1025 MiB .* this machine has 1024 MiB"):
        count_workers_in_memory(1, [job(), job(GIB + (1 << 20))], GIB)


@pytest.mark.parametrize(("memory", "most"), [(64 * GIB, 4), (4 * GIB, 2), (GIB, 1)])
def test_no_more_workers_are_asked_than_fit(scripted, monkeypatch, memory, most):
    monkeypatch.setattr(local_sandbox, "read_machine_memory", lambda: memory)
    together, ready = [], threading.Condition()

    def run(worker, waiting, results):
        with ready:
            together.append(worker)
            ready.notify_all()
            # Each waits for all that may come, so that no worker serves a batch alone.
            ready.wait_for(lambda: len(together) >= most)
        for job in take_all(waiting):
            results[job.index] = job.index

    monkeypatch.setattr(ScriptedWorker, "run", run)
    with CodeSandbox(workers=4) as sandbox:
        assert sandbox.run_batch([job() for _ in range(20)]) == list(range(20))
    assert len(together) == most


@pytest.mark.parametrize("jobs", [[], [job()]])
def test_a_closed_sandbox_runs_nothing(scripted, jobs):
    with CodeSandbox() as sandbox:
        pass
    sandbox.close()
    with pytest.raises(ValueError, match="this sandbox is closed"):
        sandbox.run_batch(jobs)


def test_a_fork_cannot_use_its_parents_sandbox_and_does_not_close_it(scripted, monkeypatch):
    with CodeSandbox() as sandbox:
        with monkeypatch.context() as fork:
            fork.setattr("gdpo_tune.sandbox.local_sandbox.os.getpid", lambda: -1)
            with pytest.raises(RuntimeError, match="belongs to process"):
                sandbox.run_batch([job()])
            sandbox.close()
        assert len(sandbox.run_batch([job()])) == 1


def test_modules_reach_every_worker(scripted):
    with CodeSandbox(2, modules=("numpy",)) as sandbox:
        results = sandbox.run_batch(job() for _ in range(8))
    assert {modules for _, modules in results} == {("numpy",)}


def fail_unforeseen(monkeypatch):
    def broken(worker, modules, *, isolated):
        raise MemoryError("no room for a worker")

    monkeypatch.setattr(ScriptedWorker, "__init__", broken)


def fail_one_worker(monkeypatch):
    monkeypatch.setattr(ScriptedWorker, "failing", "sandbox-2")


def fail_one_thread(monkeypatch):
    start = threading.Thread.start

    def refuse(thread):
        if thread.name.startswith("sandbox-2"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)


@pytest.mark.parametrize(
    ("fail", "reason", "cause"),
    [
        (fail_unforeseen, "no room for a worker", MemoryError),
        (fail_one_worker, "start: no room", type(None)),
        (fail_one_thread, "2 of 4 workers, then: can't start new thread", RuntimeError),
    ],
)
def test_a_worker_that_does_not_start_ends_the_others(scripted, monkeypatch, fail, reason, cause):
    fail(monkeypatch)
    with pytest.raises(SandboxUnavailable, match=reason) as caught:
        CodeSandbox(workers=4)
    assert isinstance(caught.value.__cause__, cause)
    assert scripted.open == 0
    assert not [each for each in threading.enumerate() if each.name.startswith("sandbox-")]


@pytest.mark.parametrize("kind", [CodeSandbox, UnsafeNoIsolationSandbox])
@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_another_system_is_refused_and_told_what_it_can_have(kind, platform, monkeypatch):
    monkeypatch.setattr(local_sandbox.sys, "platform", platform)
    with pytest.raises(SandboxUnavailable) as caught:
        kind()
    message = str(caught.value)
    assert message.startswith(f"platform: the sandbox needs Linux, this is {platform}")
    assert "docs/sandbox.md lists causes" in message
    assert "\n" not in message


@pytest.mark.parametrize("workers", [0, -1])
def test_a_sandbox_without_workers_is_refused(workers):
    with pytest.raises(ValueError, match=f"{workers} workers"):
        CodeSandbox(workers)


def test_only_the_unsafe_sandbox_asks_for_no_isolation(scripted, caplog):
    with CodeSandbox() as sandbox:
        assert sandbox.info.tier == "seccomp"
    assert not caplog.records
    with UnsafeNoIsolationSandbox() as sandbox:
        assert sandbox.info.tier == "unsafe"
        assert not isinstance(sandbox, CodeSandbox)
    assert scripted.isolated == [True, False]
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "unsafe_no_isolation" in record.getMessage()


@pytest.mark.parametrize(
    ("layers", "tier"),
    [
        (("namespaces", "landlock-5", "seccomp"), "full"),
        (("namespaces", "seccomp"), "seccomp+namespaces"),
        (("landlock-1", "seccomp"), "seccomp+landlock"),
    ],
)
def test_a_tier_is_named_by_its_layers(scripted, monkeypatch, layers, tier):
    monkeypatch.setattr(ScriptedWorker, "layers", layers)
    with CodeSandbox() as sandbox:
        assert (sandbox.info.tier, sandbox.info.layers) == (tier, layers)
