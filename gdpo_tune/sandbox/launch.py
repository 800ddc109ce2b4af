"""First line of every process of the sandbox: `launch.py ROLE DESCRIPTOR PARENT`.

It makes the folder `inside` importable on its own, so that no process of the sandbox ever
loads the package around it, nor what that package imports.
"""

from __future__ import annotations

import importlib
import os
import sys

if __name__ == "__main__":
    # NOTE: at the end, so that no file of this folder can hide one of the standard library.
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    role = importlib.import_module(f"inside.{sys.argv[1]}")
    role.main(int(sys.argv[2]), int(sys.argv[3]))
