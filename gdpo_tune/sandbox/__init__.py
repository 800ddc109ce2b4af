"""Runs Python that a model wrote, and lets no candidate touch its own grade.

    with CodeSandbox() as sandbox:
        [result] = sandbox.run_batch([Job("def f(x): return x + 1", (Call("f", (1,), 2),))])

Every candidate runs in a locked fork of a warm process, unless you write `unsafe_no_isolation`;
another process alone holds what its functions should return. How a process is locked is in
`inside/enclosure.py`, what it may ask of the kernel in `inside/policy.py`, and what may cross
between processes in `inside/encoding.py`.
"""

from .jobs import Call, Job, Limits, Result, Sandbox, SandboxInfo, Status, Stream, Verdict
from .pool import CodeSandbox, UnsafeNoIsolationSandbox

__all__ = [
    "Call",
    "CodeSandbox",
    "Job",
    "Limits",
    "Result",
    "Sandbox",
    "SandboxInfo",
    "Status",
    "Stream",
    "UnsafeNoIsolationSandbox",
    "Verdict",
]
