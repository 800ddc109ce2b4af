"""Checks of `sandbox:`, and of the address of a service."""

from __future__ import annotations

import importlib.util
import keyword

from gdpo_tune.core.addresses import split_service_url
from gdpo_tune.core.settings import SandboxSettings
from gdpo_tune.spec.problems import Problems

EXAMPLE = "http://HOST:PORT"


def check_sandbox(settings: SandboxSettings, problems: Problems) -> None:
    """Refuse keys that do not fit together, and modules that have no name."""
    if settings.type == "external":
        reason = "no service runs the code of a sweep any more"
        fix = "write type: local, and no url; only exports still take SANDBOX_FUSION_URL"
        problems.refuse("sandbox.type", reason, fix)
        return
    if settings.url:
        reason = f"a sandbox of type {settings.type} has no address"
        problems.refuse("sandbox.url", reason, "remove the key", "sandbox.type")
    for index, module in enumerate(settings.modules):
        if not _is_module_name(module):
            path, fix = ("sandbox", "modules", index), "write names as after import, such as numpy"
            problems.refuse(path, "not a name that can be imported", fix, "sandbox.type")
    cpu, wall = settings.cpu_seconds, settings.wall_seconds
    if wall < cpu:
        reason = f"below cpu_seconds = {cpu:g}, which could never be used up"
        fix = f"write at least {cpu:g}, better {4 * cpu:g}: a busy machine is slower"
        inputs = ("sandbox.cpu_seconds", "sandbox.type")
        problems.refuse("sandbox.wall_seconds", reason, fix, *inputs, value=wall)


def check_modules(settings: SandboxSettings, problems: Problems) -> None:
    """Refuse modules that are not installed."""
    for index, module in enumerate(settings.modules):
        top = module.partition(".")[0]
        if _is_module_name(module) and not _is_installed(top):
            path = ("sandbox", "modules", index)
            fix = "install the package that has it, or remove the name"
            problems.refuse(path, f"no module {top} is installed", fix, "sandbox.type")


def check_address(url: str, key: str, reason: str, problems: Problems) -> None:
    """Refuse a missing or malformed address of a web service."""
    if not url:
        problems.refuse(key, f"missing: {reason}", f"add {key.rpartition('.')[2]}: {EXAMPLE}")
        return
    try:
        split_service_url(url)
    except ValueError as error:
        fix = f"write {EXAMPLE}, where the service listens"
        problems.refuse(key, f"not the address of a web service: {error}", fix)


def _is_module_name(module: str) -> bool:
    return all(part.isidentifier() and not keyword.iskeyword(part) for part in module.split("."))


def _is_installed(top: str) -> bool:
    try:
        return importlib.util.find_spec(top) is not None
    except ValueError:  # It is loaded already, and has no file.
        return False
