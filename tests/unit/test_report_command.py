"""`python -m gdpo_tune.report`: which sweep it draws, and the trial that it marks."""

from __future__ import annotations

import pytest
from tuning_support import outcome, spec_in

from gdpo_tune import report
from gdpo_tune.errors import PickError, UsageError
from gdpo_tune.ledger import Ledger


@pytest.fixture
def searched(tmp_path):
    spec = spec_in(tmp_path)
    with Ledger.open(spec) as ledger:
        for number, (correct, form) in enumerate([(0.9, 0.2), (0.7, 0.7), (0.2, 0.9)]):
            params = spec.space.baseline({"reward_weights.format": 0.1 * (number + 1)})
            ledger.start(params, "search", "model", seed=70 + number)
            ledger.complete(number, outcome(correct, form, 0.5))
    return spec.directory


def test_a_choice_is_marked_and_told(searched, capsys):
    choice = "max correctness where format >= 0.5"
    assert report.main([str(searched), "--pick", choice]) == 0
    page = (searched / "report.html").read_text()
    told = "trial 1: correctness 0.700 ± 0.010, format 0.700 ± 0.010"
    assert told in page
    assert '<span class="badge chosen">chosen</span>' in page
    printed = capsys.readouterr().out
    assert told in printed
    assert f"python -m gdpo_tune.train --from {searched}:1" in printed
    assert f"python -m gdpo_tune.export {searched}:1 --to trl" in printed
    assert (searched / "front.png").stat().st_size > 0


def test_without_a_choice_nothing_is_marked(searched, capsys):
    assert report.main([str(searched)]) == 0
    assert "badge chosen" not in (searched / "report.html").read_text()
    assert "chosen" not in capsys.readouterr().out


def test_a_choice_behind_a_colon(searched):
    assert report.main([f"{searched}:max_format"]) == 0
    assert "trial 2: correctness" in (searched / "report.html").read_text()


def test_what_cannot_be_drawn(searched, tmp_path):
    with pytest.raises(PickError, match="did you mean 'knee'"):
        report.main([f"{searched}:kne"])
    with pytest.raises(UsageError, match="there is no sweep in"):
        report.main([str(tmp_path / "nowhere")])
