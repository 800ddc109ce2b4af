"""First line of every process of the sandbox: `launch.py ROLE DESCRIPTOR PARENT`.

It makes the folder `inside` importable on its own, so that no process of the sandbox ever
loads the package around it, nor what that package imports.
"""

from __future__ import annotations

import importlib
import os
import sys


def _ignore_hooks(**hooks: object) -> None:
    """Replaces `os.register_at_fork`."""


if __name__ == "__main__":
    # NOTE: at the end, so that no file of this folder can hide one of the standard library.
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    # NOTE: the hooks of random, threading and logging would run in every fork, where they cost
    # a fifth of a trivial candidate's time, and mend nothing: there are no threads, and the
    # candidate's seed is set.
    os.register_at_fork = _ignore_hooks
    role = importlib.import_module(f"inside.{sys.argv[1]}")
    role.main(int(sys.argv[2]), int(sys.argv[3]))
