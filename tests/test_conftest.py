"""No test finds a registry that another one has changed."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).with_name("conftest.py")
CHANGE = "registry.SAMPLERS['mine'] = parameters.FAMILIES['mine'] = None"
LEAVES = f"""
from gdpo_tune.core import parameters, registry

def test_first():
    {CHANGE}

def test_second():
    assert "mine" not in {{**registry.SAMPLERS, **parameters.FAMILIES}}

def test_third(monkeypatch):
    monkeypatch.setitem(registry.SAMPLERS, "mine", None)
"""
IMPORTS = f"""
from gdpo_tune.core import parameters, registry
{CHANGE}

def test_nothing():
    pass
"""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            LEAVES,
            ["left gdpo_tune.core.registry.SAMPLERS, gdpo_tune.core.parameters.FAMILIES changed"],
        ),
        (IMPORTS, ["changed gdpo_tune.core.registry.SAMPLERS, gdpo_tune.core.parameters.FAMILIES"]),
    ],
    ids=["in a test", "at import"],
)
def test_a_registry_that_is_left_changed_is_told_and_mended(text, told, tmp_path):
    shutil.copy(CONFTEST, tmp_path)
    (tmp_path / "test_tables.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    output = done.stdout + done.stderr
    assert all(message in output for message in told)
    if text is LEAVES:
        assert "3 passed, 1 error" in output
