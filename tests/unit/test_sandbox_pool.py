"""Threads of the sandbox answer for their workers, whatever happens to them."""

import threading

import pytest

from gdpo_tune.errors import SandboxUnavailable
from gdpo_tune.sandbox import CodeSandbox, pool


def test_an_error_that_nobody_foresaw_is_handed_over(monkeypatch):
    def broken(worker):
        raise MemoryError("no room for a worker")

    monkeypatch.setattr(pool.Worker, "__init__", broken)
    with pytest.raises(SandboxUnavailable, match="no room for a worker") as caught:
        CodeSandbox(workers=2)
    assert isinstance(caught.value.__cause__, MemoryError)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("sandbox-")]
