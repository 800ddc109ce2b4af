"""Start of a zygote: `launch.py DESCRIPTOR PARENT ISOLATED MODULES`.

It makes the directory `guest` importable on its own, so that no process of the sandbox ever
loads the package around it, or what that package imports.
"""

from __future__ import annotations

import importlib
import os
import resource
import sys

_STACK_BYTES = 256 << 20
"""For about 400,000 calls deep through C; the used part counts as memory."""


def _ignore_hooks(**hooks: object) -> None:
    """Take the place of `os.register_at_fork`."""


if __name__ == "__main__":
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    size = _STACK_BYTES if hard == resource.RLIM_INFINITY else min(_STACK_BYTES, hard)
    if soft != size:
        # NOTE: a stack for deep recursion, where the trainer's shell had set another size.
        resource.setrlimit(resource.RLIMIT_STACK, (size, hard))
        os.execv(sys.executable, sys.orig_argv)
    # NOTE: at the end, so that no file of this directory can hide one of the standard library.
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    # NOTE: the hooks of random, threading and logging would run in every fork, where they cost
    # a fifth of a trivial candidate's time, and repair nothing: there are no threads, and the
    # candidate's seed is set.
    os.register_at_fork = _ignore_hooks
    zygote = importlib.import_module("guest.zygote")
    descriptor, parent, isolated = map(int, sys.argv[1:4])
    zygote.serve_trainer(descriptor, parent, bool(isolated), sys.argv[4:])
