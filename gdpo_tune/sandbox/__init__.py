"""Sandbox for Python that a model wrote; no candidate can touch its own grade.

    with CodeSandbox() as sandbox:
        [result] = sandbox.run_batch([Job("def f(x): return x + 1", (Call("f", (1,), 2),))])

Every candidate runs in a locked fork of a warm process, unless you write `unsafe_no_isolation`;
the expected values stay outside of its process. `guest/lockdown.py` isolates a process,
`guest/seccomp.py` lists what it may ask of the kernel, and `guest/protocol.py` defines which
values cross between processes.
"""

from .jobs import Call, Job, Limits, Result, Stream
from .local_sandbox import CodeSandbox, Sandbox

__all__ = ["Call", "CodeSandbox", "Job", "Limits", "Result", "Sandbox", "Stream"]
