"""Check what a pod needs besides a GPU: a C compiler that Triton can use, and every extra.

make image-check IMAGE=registry.example.org/search:1     in an image
python docker/check_image.py                             on this machine
"""

import importlib.util
import os
import sys

MODULES = {
    "gdpo_tune": "gdpo-tune",
    "vllm": "gdpo-tune[vllm]",
    "peft": "gdpo-tune[peft]",
    "torchao": "gdpo-tune[adam8bit]",
    "pynvml": "gdpo-tune[gpu]",
    "s3fs": "gdpo-tune[s3]",
    "aiohttp_cors": "gdpo-tune[cluster]",
    "wandb": "gdpo-tune[trackers]",
    "openai": "gdpo-tune[judge]",
}
"""Module -> package that brings it."""


def check_compiler() -> str:
    """Return why Triton could compile nothing here; empty if it could, or without this package."""
    if importlib.util.find_spec("gdpo_tune") is None:
        return ""
    from gdpo_tune.core.engines import find_compiler_problem

    problem = find_compiler_problem(os.environ.get("CC"), os.environ.get("PATH"))
    return f"{problem}: apt-get install gcc libc6-dev" if problem else ""


def main() -> int:
    """Print what is missing; return 1 if anything is."""
    problems = list(filter(None, [check_compiler()]))
    for module, package in MODULES.items():
        if importlib.util.find_spec(module) is None:
            problems.append(f"no module {module}: pip install '{package}'")
    print("\n".join(problems) or "a C compiler and every package are here")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
