"""What `sandbox:` can get wrong, and what in it is probably not what was meant."""

from __future__ import annotations

import importlib.util
import keyword
import os
from collections.abc import Iterator, Mapping

from gdpo_tune.core.memory import SHARE_FOR_CANDIDATES, candidates_at_once, machine_memory
from gdpo_tune.core.service_url import split_service_url
from gdpo_tune.core.settings import SandboxSettings
from gdpo_tune.spec.model import SweepSpec
from gdpo_tune.spec.problems import Node, Problems

EXAMPLE = "http://HOST:PORT"
UNUSED: Mapping[str, Mapping[str, str]] = {
    "external": {
        "modules": "an external service has the packages that were installed there",
        "cpu_seconds": "an external service is told wall_seconds alone",
    }
}
"""Type -> settings that a sandbox of this type does not ask for, and why."""


def check_sandbox(settings: SandboxSettings | None, root: Node, problems: Problems) -> None:
    """The keys of the section fit together, and every module is installed."""
    if settings is None:
        return
    if not problems.about("sandbox.type"):
        _check_url(settings, root, problems)
        _refuse_unused(settings, root, problems)
    _check_modules(settings, root, problems)
    _check_clocks(settings, root, problems)


def _check_url(settings: SandboxSettings, root: Node, problems: Problems) -> None:
    path = ("sandbox", "url")
    if problems.about("sandbox.url"):
        return
    if settings.type != "external":
        if settings.url:
            reason = f"a sandbox of type {settings.type} has no address"
            problems.at(root.find(path), path, reason, "write type: external, or remove the key")
    elif not settings.url:
        reason = "missing: a sandbox of type external is a service"
        problems.add(root.find(path).mark, "sandbox.url", None, reason, f"add url: {EXAMPLE}")
    else:
        try:
            split_service_url(settings.url)
        except ValueError as error:
            reason = f"not the address of a web service: {error}"
            fix = f"write {EXAMPLE}, where the service listens"
            problems.at(root.find(path), path, reason, fix)


def _refuse_unused(settings: SandboxSettings, root: Node, problems: Problems) -> None:
    """Refuse what is written and would have no effect, whatever its value."""
    written = root.find(("sandbox",)).entries or {}
    for name, reason in UNUSED.get(settings.type, {}).items():
        if name in written:
            fix = "remove the key, or write type: local"
            problems.at(written[name], ("sandbox", name), reason, fix)


def _check_modules(settings: SandboxSettings, root: Node, problems: Problems) -> None:
    if settings.type == "external":
        return
    for index, module in enumerate(settings.modules):
        path = ("sandbox", "modules", index)
        top = module.partition(".")[0]
        if not all(
            part.isidentifier() and not keyword.iskeyword(part) for part in module.split(".")
        ):
            fix = "write names as after import, such as numpy"
            problems.at(root.find(path), path, "not a name that can be imported", fix)
        elif not _is_installed(top):
            fix = "install the package that has it, or remove the name"
            problems.at(root.find(path), path, f"no module {top} is installed", fix)


def _is_installed(top: str) -> bool:
    """Whether a module could be imported, without doing so."""
    try:
        return importlib.util.find_spec(top) is not None
    except ValueError:
        # It is loaded already, and was not found in any place.
        return False


def _check_clocks(settings: SandboxSettings, root: Node, problems: Problems) -> None:
    clocks = ("sandbox.cpu_seconds", "sandbox.wall_seconds")
    if settings.type == "external" or any(map(problems.about, clocks)):
        return
    cpu, wall = settings.cpu_seconds, settings.wall_seconds
    if wall < cpu:
        mark = root.find(("sandbox", "wall_seconds")).mark
        reason = f"below cpu_seconds = {cpu:g}, which could never be used up"
        fix = f"write at least {cpu:g}, better {4 * cpu:g}: a busy machine is slower"
        problems.add(mark, "sandbox.wall_seconds", wall, reason, fix)


def sandbox_doubts(spec: SweepSpec, environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Settings that run but should be seen: no isolation, and workers that would have to wait."""
    settings = spec.sandbox
    if settings.type == "unsafe_no_isolation":
        yield (
            "sandbox.type = unsafe_no_isolation: code that the policy writes runs with all the "
            "rights of your user: it can read and delete files, reach the network and leave "
            "processes behind. Write local, or external with the url of a service."
        )
    memory = _memory_here(settings, environment)
    needed = settings.memory_mb << 20
    if memory is None or needed > memory:
        return
    together = candidates_at_once(memory, needed)
    if settings.workers > together:
        yield (
            f"sandbox.workers = {settings.workers}: {together} at a time will run, because each "
            f"may use {settings.memory_mb} MiB and candidates get {SHARE_FOR_CANDIDATES:.0%} of "
            f"the {memory >> 20} MiB that this machine has. Write workers: {together}, or lower "
            "sandbox.memory_mb."
        )


def lacking_memory(spec: SweepSpec, environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Why this machine could not run any code, if that is so, and what to write instead."""
    memory = _memory_here(spec.sandbox, environment)
    if memory is not None and spec.sandbox.memory_mb << 20 > memory:
        room = memory >> 20
        yield (
            f"sandbox.memory_mb = {spec.sandbox.memory_mb}: this machine has {room} MiB\n"
            f"    fix: --set sandbox.memory_mb={room // 2}"
        )


def _memory_here(settings: SandboxSettings, environment: Mapping[str, str]) -> int | None:
    """Bytes that code can share, where it will run on this machine."""
    if settings.type == "external" or environment.get("RAY_ADDRESS"):
        return None
    return machine_memory()
