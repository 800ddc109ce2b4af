"""The faults that `make mutants` puts into the package."""

from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests.mutants.__main__ import HERE, PACKAGE
from tests.mutants.faults import list_faults

SOURCE = '''
"""Text with 1 < 2."""
from typing import Literal
LIMIT: Literal[3] = 3
def choose(values: list[int], least=-0.5):
    """Return 4."""
    if not values and least < 0:
        values.clear()
    return f"{5}" if min(v for v in values if v in (6,)) else least + True
'''
EXPECTED = [
    "rooms/x.py:: 3 -> 4",
    "rooms/x.py:choose: -0.5 -> 0.5",
    "rooms/x.py:choose: 0.5 -> 1.0",
    "rooms/x.py:choose: not values and least < 0 -> not (not values and least < 0)",
    "rooms/x.py:choose: not values and least < 0 -> not values or least < 0",
    "rooms/x.py:choose: not values and least < 0 -> not values",
    "rooms/x.py:choose: not values -> values",
    "rooms/x.py:choose: least < 0 -> least <= 0",
    "rooms/x.py:choose: 0 -> 1",
    "rooms/x.py:choose: values.clear() -> pass",
]


def test_faults_are_changes_of_code_that_compile(tmp_path):
    file = tmp_path / "rooms" / "x.py"
    file.parent.mkdir()
    file.write_text(SOURCE)
    faults = list_faults(file, tmp_path)
    names = [fault.name for fault in faults]
    assert set(EXPECTED) <= set(names)
    assert len(set(names)) == len(names)
    assert not any(name.endswith((": 4 -> 5", ": 5 -> 6", "2 -> 3")) for name in names)
    for fault in faults:
        compile(fault.source, "x.py", "exec")
        assert fault.source != SOURCE
    boundary = next(fault for fault in faults if fault.name.endswith("least <= 0"))
    assert boundary.source == SOURCE.replace("least < 0", "(least <= 0)")


def test_what_is_named_as_equivalent_is_a_fault_of_today():
    named = YAML(typ="safe").load(HERE / "equivalent.yaml") or {}
    files = {PACKAGE / name.partition(":")[0] for name in named}
    known = {fault.name for file in files for fault in list_faults(file, PACKAGE)}
    assert set(named) <= known
    assert all(named.values())


@pytest.mark.parametrize("room", [path.stem for path in HERE.glob("*.txt")])
def test_what_became_of_faults_is_kept_for_rooms_of_today(room):
    assert Path(PACKAGE, room).is_dir()
