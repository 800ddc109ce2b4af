"""The sandbox that a name opens, and its arguments."""

import pytest

from gdpo_tune.core.settings import SandboxSettings
from gdpo_tune.tasks import execution


@pytest.fixture
def opened(monkeypatch):
    """Notes what would have been started."""
    calls = []

    def note(name):
        return lambda *args, **kwargs: calls.append((name, args, kwargs))

    monkeypatch.setattr(execution, "CodeSandbox", note("local"))
    monkeypatch.setattr(execution, "UnsafeNoIsolationSandbox", note("unsafe"))
    return calls


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ("local", (1,), {"modules": ()})),
        ({"workers": 3, "modules": ("numpy",)}, ("local", (3,), {"modules": ("numpy",)})),
        (
            {"type": "unsafe_no_isolation", "workers": 2, "modules": ("numpy",)},
            ("unsafe", (2,), {"modules": ("numpy",)}),
        ),
    ],
)
def test_settings_open_the_sandbox_that_they_name(opened, settings, expected):
    execution.open_sandbox(SandboxSettings(**settings))
    assert opened == [expected]
