"""A sweep whose task, data, policy or versions changed between two starts.

Source: open-r1#450, cookbook#172, wandb#544: trials of one front measure the same. A change is
refused, or accepted by a word, recorded, and kept off the front of what came before.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gdpo_tune.analysis.front import build_front
from gdpo_tune.core.content import Fact
from gdpo_tune.core.errors import IdentityError
from gdpo_tune.core.trials import TrialRecord
from gdpo_tune.figures.report_page import build_report
from gdpo_tune.ledger import Ledger
from gdpo_tune.results.open_sweep import Sweep
from gdpo_tune.results.picks import parse_pick, pick_trial
from gdpo_tune.results.wording import list_result_warnings
from gdpo_tune.spec import SweepSpec, load_spec
from gdpo_tune.tracking.run_content import build_trial_content
from gdpo_tune.tuning import runner
from gdpo_tune.tuning.plan import count_planned, find_next_trial
from gdpo_tune.tuning.proposals import SamplerView, load_earlier_trials, refuse_other_content
from gdpo_tune.tuning.retention import select_kept_trials
from tests.support.tuning import build_measurement, build_outcome, load_code_spec

BEFORE = {"task mine.py": Fact("a" * 32), "version torch": Fact("2.9")}
AFTER = BEFORE | {"task mine.py": Fact("b" * 32)}


@pytest.fixture
def spec(tmp_path: Path) -> SweepSpec:
    return load_code_spec(tmp_path, ["search.trials=4"])


def run_trial(ledger: Ledger, correctness: float, role="search", **params) -> TrialRecord:
    complete = {**ledger.spec.space.complete_baseline({}), **params}
    number = ledger.start(complete, role, "model", seed=7).number
    return ledger.complete(number, build_outcome(correctness))


def run_before(spec: SweepSpec) -> None:
    """Run both baselines, one search trial, and one that is interrupted after a rung."""
    with Ledger.open(spec) as ledger:
        ledger.compare_content(BEFORE)
        run_trial(ledger, 0.2, "untrained")
        run_trial(ledger, 0.3, "published")
        run_trial(ledger, 0.9, learning_rate=1e-4)
        ledger.start(spec.space.complete_baseline({}), "search", "model", seed=8)
        ledger.record_rung(3, build_measurement(30, correctness=0.9, format=0.5, length=0.5))


def test_a_change_is_refused_with_what_changed_since_when_and_the_ways_on(spec):
    run_before(spec)
    with Ledger.open(spec) as ledger, pytest.raises(IdentityError) as caught:
        ledger.compare_content(AFTER)
    first, fix = str(caught.value).splitlines()
    assert f"task mine.py: {'a' * 12}, now {'b' * 12}" in first
    assert "in " + spec.location + " on 20" in first
    assert "--fresh" in fix
    assert "--accept-changes" in fix
    with Ledger.open(spec) as ledger:
        ledger.compare_content(BEFORE)  # restored
        assert ledger.get_record(3).state == "running"


def test_a_sweep_of_an_earlier_version_is_recorded_at_its_next_start(spec):
    with Ledger.open(spec) as ledger:
        run_trial(ledger, 0.5)
    with Ledger.open(spec) as ledger:
        ledger.compare_content(BEFORE)
    with Ledger.open(spec) as ledger, pytest.raises(IdentityError):
        ledger.compare_content(AFTER)


def test_what_becomes_known_later_is_compared_from_then_on(spec):
    commit = {"hub org/name": Fact("1" * 40)}
    for content in (BEFORE, BEFORE | commit, BEFORE):
        with Ledger.open(spec) as ledger:
            ledger.compare_content(content)
    with Ledger.open(spec) as ledger, pytest.raises(IdentityError, match="hub org/name"):
        ledger.compare_content(BEFORE | {"hub org/name": Fact("2" * 40)})


def test_after_an_accepted_change_only_later_trials_are_on_the_front(spec):
    run_before(spec)
    with Ledger.open(spec) as ledger:
        ledger.compare_content(AFTER, accept=True)
        interrupted = ledger.get_record(3)
        assert (interrupted.state, interrupted.reason.partition(",")[0]) == (
            "pruned",
            "task mine.py changed",
        )
        assert find_next_trial(spec, ledger.get_records()).role == "untrained"  # measured anew
        planned = count_planned(spec, ledger.get_records()[:0])
        assert count_planned(spec, ledger.get_records()) == planned + 2
        run_trial(ledger, 0.1, "untrained")
        run_trial(ledger, 0.2, "published")
        later = run_trial(ledger, 0.4, learning_rate=1e-4)
    with Ledger.open(spec) as ledger:
        ledger.compare_content(AFTER)
        records = ledger.get_records()
        kept = select_kept_trials(ledger, records)
    front = build_front(records, spec.list_objectives())
    assert [member.numbers for member in front.members] == [(later.number,)]
    assert [point.hypervolume for point in front.hypervolume_over_trials][-1] == front.hypervolume
    assert {r.content.partition(" ")[0] for r in records[:4]} == {"before"}
    assert {r.content.partition(" ")[0] for r in records[4:]} == {"after"}
    assert kept == {later.number}
    page = build_report(Sweep(spec, records))
    assert page.count("<small>before task mine.py changed") == 4
    assert page.count("<small>after task mine.py changed") == 3
    tags = build_trial_content(records[2], "sweep", []).tags
    assert (tags["comparable"], tags["content"][:6]) == ("false", "before")
    warning = str(list_result_warnings(spec, front)[0])
    assert "4 trials before task mine.py changed" in warning
    assert "on no front" in warning


def test_a_sampler_learns_nothing_from_trials_before_a_change(spec):
    run_before(spec)
    with Ledger.open(spec) as ledger:
        ledger.compare_content(AFTER, accept=True)
        projection = SamplerView(spec)
        projection.load(ledger.get_records())
    assert projection.record_count == 0
    assert projection.study.get_trials() == []


def test_one_front_keeps_all_trials_together_and_marks_them(spec):
    run_before(spec)
    with Ledger.open(spec) as ledger:
        ledger.compare_content(AFTER, accept=True, one_front=True)
        run_trial(ledger, 0.4, learning_rate=2e-4)
        records = ledger.get_records()
    assert records[3].state == "running"
    assert all(record.is_comparable for record in records)
    assert [r.content.partition(" ")[0] for r in records] == [*["before"] * 4, "after"]
    front = build_front(records, spec.list_objectives())
    assert [member.numbers for member in front.members] == [(2,)]


def test_the_first_of_two_accepted_changes_still_separates(spec):
    run_before(spec)
    with Ledger.open(spec) as ledger:
        ledger.compare_content(AFTER, accept=True)
        run_trial(ledger, 0.4)
        newer = {"version torch": Fact("2.10")}
        ledger.compare_content(AFTER | newer, accept=True, one_front=True)
        run_trial(ledger, 0.5)
        records = ledger.get_records()
    assert [r.is_comparable for r in records] == [*[False] * 4, True, True]
    assert records[4].content.count("after task mine.py changed") == 1
    assert records[4].content.count("before version torch changed") == 1


def test_no_sweep_is_warm_started_from_another_content(spec, tmp_path):
    run_before(spec)
    warm = load_code_spec(tmp_path, [f'search.warm_start=["{spec.directory}"]', "name=next"])
    with pytest.raises(IdentityError, match=r"search.warm_start: .*mine.py.*\n.*take that"):
        refuse_other_content(warm, AFTER)
    refuse_other_content(warm, BEFORE | {"version torch": Fact("2.10")})
    assert [record.number for record in load_earlier_trials(warm)] == [1, 2]
    with Ledger.open(spec) as ledger:
        ledger.compare_content(AFTER, accept=True)
    refuse_other_content(warm, AFTER)
    assert load_earlier_trials(warm) == []


def test_a_trial_before_a_change_can_be_picked_only_with_the_reason(spec):
    run_before(spec)
    with Ledger.open(spec) as ledger:
        ledger.compare_content(AFTER, accept=True)
        run_trial(ledger, 0.4)
        records = ledger.get_records()
    assert "not comparable" not in pick_trial(Sweep(spec, records), parse_pick("4")).lines[0]
    (line,) = pick_trial(Sweep(spec, records), parse_pick("2")).lines
    assert "not comparable with newer trials: before task mine.py changed" in line


def test_a_sweep_is_refused_before_any_work_and_goes_on_by_an_explicit_word(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("scoring.py").write_text("ONE = 1\n")
    Path("mine.py").write_text(
        "import sys\nsys.path.insert(0, '.')\n"
        "from gdpo_tune.tasks.custom import RewardFunctionTask\nfrom scoring import ONE\n"
        "def right(completions, **_): return [ONE for _ in completions]\n"
        "class Mine(RewardFunctionTask):\n"
        "    reward_funcs = [right]\n    ranges = {'right': (0, 1)}\n"
        "    def rows(self): return [{'prompt': 'a'}]\n"
    )
    Path("s.yaml").write_text(
        "task: mine.py:Mine\nobjectives: {right: {direction: maximize, reference: 0}}\n"
        "space: {group_size: 4, learning_rate: {log: [1.0e-5, 1.0e-4]}, reward_weights.right: 1}\n"
        "search: {trials: 1, budget: {trials: 1}, checkpoints: {budget: 0}, merges: {budget: 0}}\n"
    )
    spec = load_spec("s.yaml")
    monkeypatch.setattr(runner, "check_resources", lambda spec: None)
    monkeypatch.setattr(runner, "_with_ray", lambda ledger, train, emit: True)
    assert runner.run_sweep(spec).exit_status
    Path("scoring.py").write_text("ONE = 0\n")
    with pytest.raises(IdentityError, match=r"task scoring.py: \w+, now \w+ \(written 20"):
        runner.run_sweep(spec)
    assert runner.run_sweep(spec, accept_changes=True).exit_status
    assert runner.run_sweep(spec).exit_status
