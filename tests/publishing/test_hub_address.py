"""`hf://USER/NAME` is no sweep: every command says so in one line."""

from __future__ import annotations

import pytest

from gdpo_tune import compare, load_sweep, report, steer, sweep, watch
from gdpo_tune.core.errors import UsageError
from tests.support.paths import ROOT

ADDRESS = "hf://me/front"


@pytest.mark.parametrize(
    "run",
    [
        lambda: load_sweep(ADDRESS),
        lambda: report.main([f"{ADDRESS}:knee"]),
        lambda: compare.main([ADDRESS, ADDRESS]),
        lambda: steer.main([ADDRESS, "pause"]),
        lambda: watch.find_spec(ADDRESS),
        lambda: sweep.main(
            [str(ROOT / "search_spaces" / "code.yaml"), "--set", "storage=hf://me", "--dry-run"]
        ),
    ],
)
def test_an_address_of_the_hub_is_refused(run):
    with pytest.raises(UsageError, match=r"the Hub holds no sweeps: .*\n    fix: name a directory"):
        run()
