"""Sweeps that cannot be compared, because their objectives mean different things."""

import pytest

from gdpo_tune.core.content import Fact
from gdpo_tune.core.errors import UsageError
from gdpo_tune.ledger import Ledger
from gdpo_tune.results.comparison_report import compare_sweeps
from gdpo_tune.results.open_sweep import Sweep, read_sweep
from gdpo_tune.spec import load_spec
from tests.support.paths import ROOT
from tests.support.tuning import build_outcome


def load_sweep(name: str, *overrides: str) -> Sweep:
    """Return a sweep without trials."""
    spec = load_spec(ROOT / "search_spaces" / f"{name}.yaml", [*overrides, f"storage={name}"])
    return Sweep(spec, ())


@pytest.mark.parametrize(
    ("left", "right", "difference"),
    [
        (("tools",), ("math",), "task = tools, not math"),
        (("tools",), ("tools", "scoring=released", "name=other"), "scoring = strict, not released"),
    ],
)
def test_another_task_or_scoring_is_not_compared(left, right, difference):
    with pytest.raises(UsageError, match=difference):
        compare_sweeps(load_sweep(*left), load_sweep(*right))


def test_content_that_changed_between_two_sweeps_is_named_and_marks_the_verdict(tmp_path):
    """mteb#5228, genkit#2606: values of another evaluation on one leaderboard."""
    sweeps: list[Sweep] = []
    for index, name in enumerate(("before", "after")):
        file = ROOT / "search_spaces" / "code.yaml"
        spec = load_spec(file, [f"storage={tmp_path}", "search.budget.completions=0"], name)
        facts = {"data test.jsonl": Fact(f"{index}"), "version torch": Fact("2.13")}
        with Ledger.open(spec) as ledger:
            ledger.compare_content(facts)
            for number in range(8):
                rates = {"learning_rate": 1e-4 * (1 + number / 20)}
                params = spec.space.complete_baseline(rates)
                ledger.start(params, "search", "startup", seed=number)
                ledger.complete(number, build_outcome(0.1 + number / 50 + index / 2, 0.5, 0.5))
        sweeps.append(read_sweep(str(spec.directory), name))
    found = compare_sweeps(*sweeps)
    assert "after was run with another data test.jsonl" in found.notes
    assert found.verdict.winner == "right"
    assert found.verdict.headline.startswith("after beats before: its front covers more")
    assert found.verdict.headline.endswith("But data test.jsonl changed between them.")
    assert "torch" not in " ".join((*found.notes, found.verdict.headline))
