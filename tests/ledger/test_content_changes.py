"""A sweep whose task, data, policy or versions changed between two starts.

Source: open-r1#450, cookbook#172, wandb#544: trials of one front measure the same. A change is
refused, or accepted by a word where it decides no value, recorded and marked.
"""

from pathlib import Path

import pytest

from gdpo_tune.analysis.front import build_front
from gdpo_tune.core.content import Fact
from gdpo_tune.core.errors import IdentityError
from gdpo_tune.figures.report_page import build_report
from gdpo_tune.ledger import Ledger
from gdpo_tune.results.open_sweep import Sweep
from gdpo_tune.results.wording import list_result_warnings
from gdpo_tune.spec import load_spec
from gdpo_tune.tracking.run_content import build_trial_content
from gdpo_tune.tuning import runner
from gdpo_tune.tuning.proposals import load_earlier_trials, refuse_other_content
from tests.support.tuning import build_measurement, build_outcome, load_code_spec

BEFORE = {"task mine.py": Fact("a" * 32), "version torch": Fact("2.9")}
AFTER = BEFORE | {"task mine.py": Fact("b" * 32)}


@pytest.fixture
def spec(tmp_path):
    return load_code_spec(tmp_path, ["search.trials=4"])


def run_trial(ledger, correctness, role="search", **params):
    complete = {**ledger.spec.space.complete_baseline({}), **params}
    number = ledger.start(complete, role, "model", seed=7).number
    return ledger.complete(number, build_outcome(correctness))


def run_before(spec):
    """Run both baselines, one search trial, and one that is interrupted after a rung."""
    with Ledger.open(spec) as ledger:
        ledger.compare_content(BEFORE)
        run_trial(ledger, 0.2, "untrained")
        run_trial(ledger, 0.3, "published")
        run_trial(ledger, 0.9, learning_rate=1e-4)
        ledger.start(spec.space.complete_baseline({}), "search", "model", seed=8)
        ledger.record_rung(3, build_measurement(30, correctness=0.9, format=0.5, length=0.5))


def compare(spec, content, **options):
    """Compare the content at the start of a sweep."""
    with Ledger.open(spec) as ledger:
        ledger.compare_content(content, **options)


def test_a_change_is_refused_with_what_changed_since_when_and_the_ways_on(spec):
    run_before(spec)
    with pytest.raises(IdentityError) as caught:
        compare(spec, AFTER)
    first, fix = str(caught.value).splitlines()
    assert f"task mine.py: {'a' * 12}, now {'b' * 12}" in first
    assert "in " + spec.location + " on 20" in first
    assert "--fresh" in fix
    assert "--accept-changes" in fix
    compare(spec, BEFORE)  # restored
    with Ledger.open(spec) as ledger:
        assert ledger.get_record(3).state == "running"


def test_a_sweep_of_an_earlier_version_is_recorded_at_its_next_start(spec):
    with Ledger.open(spec) as ledger:
        run_trial(ledger, 0.5)
    compare(spec, BEFORE)
    with pytest.raises(IdentityError):
        compare(spec, AFTER)


def test_what_becomes_known_later_is_compared_from_then_on(spec):
    for content in (BEFORE, BEFORE | {"hub org/name": Fact("1" * 40)}, BEFORE):
        compare(spec, content)
    with pytest.raises(IdentityError, match="hub org/name"):
        compare(spec, BEFORE | {"hub org/name": Fact("2" * 40)})


def test_after_an_accepted_change_all_trials_share_a_front_and_are_marked(spec):
    run_before(spec)
    with Ledger.open(spec) as ledger:
        ledger.compare_content(AFTER, accept=True)
        run_trial(ledger, 0.4, learning_rate=2e-4)
        ledger.compare_content(AFTER)
        newer = {"version torch": Fact("2.10")}
        ledger.compare_content(AFTER | newer, accept=True)
        later = run_trial(ledger, 0.95, learning_rate=3e-4)
        records = ledger.get_records()
    assert records[3].state == "running"
    front = build_front(records, spec.list_objectives())
    assert [member.numbers for member in front.members] == [(later.number,)]
    assert [r.content.partition(" ")[0] for r in records] == [*["before"] * 4, "after", "after"]
    assert records[4].content.count("after task mine.py changed") == 1
    assert records[4].content.count("before version torch changed") == 1
    page = build_report(Sweep(spec, records))
    assert page.count("<small>before task mine.py changed") == 4
    assert page.count("<small>after task mine.py changed") == 2
    assert build_trial_content(records[2], "sweep", []).tags["content"][:6] == "before"
    assert "4 trials before task mine.py changed" in str(list_result_warnings(spec, front)[0])


def test_no_sweep_is_warm_started_from_another_content(spec, tmp_path):
    run_before(spec)
    warm = load_code_spec(tmp_path, [f'search.warm_start=["{spec.directory}"]', "name=next"])
    with pytest.raises(IdentityError, match=r"search.warm_start: .*mine.py.*\n.*take that"):
        refuse_other_content(warm, AFTER)
    refuse_other_content(warm, BEFORE | {"version torch": Fact("2.10")})
    assert [record.number for record in load_earlier_trials(warm)] == [1, 2]
    compare(spec, AFTER, accept=True)
    refuse_other_content(warm, AFTER)


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
