"""Copy of the sandbox for an export, where this package may not be installed."""

from __future__ import annotations

from pathlib import Path

SANDBOX_COPY = "gdpo_sandbox"
"""Package of an export with the copy."""
_PACKAGE = Path(__file__).parents[1]
_CORE = ("__init__", "errors", "system", "service_url", "turns")
"""Modules of `core` that the sandbox imports; they import no others."""


def copy_sandbox() -> dict[str, bytes]:
    """Return name in the copy -> content of the modules of the sandbox, and the licence."""
    files = [
        *sorted(_PACKAGE.glob("sandbox/**/*.py")),
        *(_PACKAGE / "core" / f"{name}.py" for name in _CORE),
    ]
    copied = {str(file.relative_to(_PACKAGE)): file.read_bytes() for file in files}
    return {"__init__.py": b"", **copied}
