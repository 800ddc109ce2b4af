"""Check what a pod needs besides a GPU: a C compiler that Triton can use, and every extra.

make image-check IMAGE=registry.example.org/search:1     in an image
python docker/check_image.py                             on this machine
"""

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

PROGRAM = "#include <stdint.h>\n#include <Python.h>\nint main(void) { return 0; }\n"
"""Headers that Triton's launchers include."""
MODULES = {
    "gdpo_tune": "gdpo-tune",
    "vllm": "gdpo-tune[vllm]",
    "peft": "gdpo-tune[peft]",
    "pynvml": "gdpo-tune[gpu]",
    "s3fs": "gdpo-tune[s3]",
    "psycopg2": "gdpo-tune[postgres]",
    "aiohttp_cors": "gdpo-tune[cluster]",
}
"""Module -> package that brings it."""


def check_compiler() -> str:
    """Return why no C program of Triton's kind can be compiled; empty if one can."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        return "no C compiler: apt-get install gcc libc6-dev"
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory, "program.c")
        source.write_text(PROGRAM)
        include = f"-I{sysconfig.get_paths()['include']}"
        words = [compiler, include, "-shared", "-fPIC", "-o", str(source.with_suffix(".so"))]
        done = subprocess.run([*words, str(source)], capture_output=True, text=True, check=False)
    lines = done.stderr.strip().splitlines()
    return f"{compiler} fails: {lines[0]}" if done.returncode and lines else ""


def main() -> int:
    """Print what is missing; return 1 if anything is."""
    missing = [check_compiler()]
    for module, package in MODULES.items():
        if importlib.util.find_spec(module) is None:
            missing.append(f"no module {module}: pip install '{package}'")
    problems = [problem for problem in missing if problem]
    print("\n".join(problems) or "a C compiler and every package are here")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
