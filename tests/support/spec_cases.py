"""A good sweep file and every way to break it, for `test_spec_bad_input`."""

from ruamel.yaml import YAML

from tests.support.paths import ROOT

_READ = YAML(typ="safe").load(ROOT / "tests" / "data" / "bad_sweeps.yaml")
GOOD: str = _READ["good"]
CASES: dict[str, list] = _READ["bad"]
