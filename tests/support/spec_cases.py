"""A good sweep file, every way to break it, and overrides of it, for the tests of the spec."""

from ruamel.yaml import YAML

from tests.support.paths import ROOT


def _read(name: str) -> dict:
    return YAML(typ="safe").load(ROOT / "tests" / "data" / name)


_BAD, _OVERRIDES = _read("bad_sweeps.yaml"), _read("sweep_overrides.yaml")
GOOD: str = _BAD["good"]
CASES: dict[str, list] = _BAD["bad"]
WARNINGS: dict[str, list] = _OVERRIDES["warnings"]
IDENTITY: dict[str, list[str]] = _OVERRIDES["identity"]
DRY_RUN: dict[str, list] = _OVERRIDES["dry run"]
