"""Sweep files of a temporary directory, loaded with overrides, or refused."""

import importlib.util

import pytest

from gdpo_tune.core.errors import SpecError
from gdpo_tune.spec import load_spec
from tests.support.spec_cases import GOOD


@pytest.fixture
def load(tmp_path):
    """Load `GOOD`, or another text, with overrides."""

    def load(*overrides, text=GOOD, name=None, **options):
        path = tmp_path / "sweep.yaml"
        path.write_text(text, encoding="utf-8")
        return load_spec(path, overrides, name, **options)

    return load


@pytest.fixture
def refuse(load):
    """Load what is not accepted, and return its problems."""

    def refuse(*overrides, **options):
        with pytest.raises(SpecError) as caught:
            load(*overrides, **options)
        return caught.value.problems

    return refuse


@pytest.fixture
def installed(monkeypatch):
    """Package -> whether it is installed, instead of what is true of this machine."""
    find, known = importlib.util.find_spec, {}

    def find_spec(name):
        return (find("json") if known[name] else None) if name in known else find(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    return known
