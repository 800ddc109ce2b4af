"""Opens the sandbox that a sweep asks for, by the name of its kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gdpo_tune.core.settings import SandboxSettings
from gdpo_tune.sandbox import CodeSandbox, Sandbox, UnsafeNoIsolationSandbox


def open_sandbox(settings: SandboxSettings) -> Sandbox:
    """Start the sandbox that `settings.type` names; the caller closes it.

    Raises:
        SandboxUnavailable: this machine, or the service, offers no such sandbox.
    """
    return _OPENERS[settings.type](settings)


def _open_local(settings: SandboxSettings) -> Sandbox:
    return CodeSandbox(settings.workers, modules=settings.modules)


def _open_external(settings: SandboxSettings) -> Sandbox:
    # Only who uses a service pays for importing an HTTP client.
    from gdpo_tune.sandbox.external import ExternalSandbox

    return ExternalSandbox(settings.url, workers=settings.workers)


def _open_unsafe(settings: SandboxSettings) -> Sandbox:
    return UnsafeNoIsolationSandbox(settings.workers, modules=settings.modules)


_OPENERS: Mapping[str, Callable[[SandboxSettings], Sandbox]] = {
    "local": _open_local,
    "external": _open_external,
    "unsafe_no_isolation": _open_unsafe,
}
