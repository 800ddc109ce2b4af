"""Sweeps with a budget: a wide rung, a few long trainings, where they end, and restarts."""

from collections import Counter
from dataclasses import replace
from itertools import count

import pytest

from gdpo_tune.core.events import TrialFinished, TrialPaused
from gdpo_tune.core.trials import Cost
from gdpo_tune.ledger import Ledger
from gdpo_tune.spec.first_trials import count_wide, list_long_weights
from gdpo_tune.training.checkpoints import write_checkpoint
from gdpo_tune.tuning.attempts import Failed
from gdpo_tune.tuning.halving import END, STOPPED, Halving
from gdpo_tune.tuning.plan import is_finished
from tests.support.search_driver import Driver, Killed, SteppedDriver
from tests.support.tuning import (
    build_measurement,
    build_outcome,
    is_asked_to_stop,
    load_halving_spec,
)

STEP = 64
"""Completions of a step."""
STEPS = 1402
"""Steps that the budget pays for."""
FEW = "training.validation_prompts=512"
"""Makes rungs long and merges few, for sweeps that run many times."""
NAMES = ("correctness", "format", "length")


class CurveDriver(SteppedDriver):
    """A driver whose trials follow `rise`, stop at a halt request, and resume."""

    def __init__(self, ledger, slots=1, dies_after=10**9):
        super().__init__(ledger, slots, dies_after)
        self.ledger = ledger
        self.tested = []

    def advance(self, trial_id):
        """Advance one trial to its next evaluation, or to its end."""
        config = self.in_flight[trial_id]
        if config.parts:
            self._evaluate_merge(trial_id, config)
            return
        if not config.train:
            self.end(trial_id, outcome=replace(build_outcome(0.3, 0.3, 0.3), cost=Cost()))
            return
        progress, last = config.directory / "checkpoint", config.training.steps
        at = int(progress.read_text()) if progress.exists() else 0
        step = min([s for s in (*config.evaluate_at, last) if at < s <= last], default=last)
        values, cost = rise(config.params, step), Cost(completions=STEP * step)
        self.measure(trial_id, step, cost, values)
        config.directory.mkdir(parents=True, exist_ok=True)
        progress.write_text(str(step))
        if step == last:
            path = write_checkpoint(config.directory, step, cost, lambda path: None).path
            outcome = replace(build_outcome(**values), cost=cost, checkpoint=path)
            self.end(trial_id, outcome=outcome)
        elif is_asked_to_stop(config.directory):
            self.end(trial_id, interrupted=True)

    def measure(self, trial_id, step, cost, values):
        self.tick()
        self.report(trial_id, build_measurement(step, cost, **values))
        self.tick()

    def _evaluate_merge(self, trial_id, config):
        """Give a merge its parents' weighted mean and a little more, or less near one of them."""
        bump = 0.02 if min(part.weight for part in config.parts) > 0.1 else -0.05
        values = dict.fromkeys(NAMES, bump)
        for part in config.parts:
            parent = self.ledger.get_record(int(part.checkpoint.parent.name))
            for name in values:
                values[name] += part.weight * parent.validation[name].mean
        self.measure(trial_id, 0, Cost(), values)
        if is_asked_to_stop(config.directory):
            self.end(trial_id, interrupted=True)
        else:
            self.tested.append(f"merge-{config.directory.name}")
            self.end(trial_id, outcome=replace(build_outcome(**values), cost=Cost()))


def rise(params, step):
    """Rise with the steps, the more in an objective the larger its weight; grpo rises most."""
    weights = {"correctness": 1.0}
    weights |= {name: float(params[f"reward_weights.{name}"]) for name in ("format", "length")}
    learned = step / (step + 60) * (1.0 if params["normalization"] == "grpo" else 0.3)
    total = sum(weights.values())
    return {name: 0.3 + 0.7 * learned * weight / total for name, weight in weights.items()}


def load(directory, steps=STEPS, *overrides):
    return load_halving_spec(directory, steps, "search.sampler=random", *overrides)


def run(spec, kind=CurveDriver, **options):
    with Ledger.open(spec) as ledger:
        kind(ledger, **options).run()
        assert is_finished(spec, ledger.get_records())
        assert {trial.state.name for trial in ledger.study.trials} <= {"COMPLETE", "PRUNED", "FAIL"}
        return list(ledger.get_records())


def list_long(records):
    return [r for r in records if r.is_training and r.state == "complete"]


def sum_steps(records):
    return sum(record.cost.completions for record in records) / STEP


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Run a whole sweep, one trial at a time."""
    with Ledger.open(load(tmp_path_factory.mktemp("whole"))) as ledger:
        driver = CurveDriver(ledger)
        driver.run()
        return driver


@pytest.fixture
def records(whole):
    return list(whole.ledger.get_records())


@pytest.mark.parametrize("slots", [1, 2])
def test_many_begin_and_few_train_equally_long_within_the_budget(tmp_path, whole, records, slots):
    spec = load(tmp_path)
    found = records if slots == 1 else run(spec, slots=slots)
    trained = [record for record in found if record.is_training]
    wide = [r for r in trained if r.role == "search" and r.proposer != "corner"]
    assert len(wide) == count_wide(spec) == 12
    for name in ("normalization", "group_size"):
        begun = Counter(record.params[name] for record in wide)
        assert all(begun[choice] >= 2 for choice in spec.space.searched_domains[name].choices)
    long = list_long(found)
    assert len(long) == 4
    assert {record.last_step for record in long} == {272}
    assert all(record.test and record.reason == END for record in long)
    assert STEPS - 5 < sum_steps(trained) <= STEPS
    chosen, expected = (
        sorted(str(sorted(record.params.items())) for record in list_long(each))
        for each in (found, records)
    )
    assert chosen == expected


def test_corners_train_long_with_the_settings_that_the_rung_favours(whole, records):
    corners = [record for record in records if record.proposer == "corner"]
    assert [record.params["normalization"] for record in corners] == ["grpo"] * 3
    for corner in list_long_weights(whole.ledger.spec):
        assert any(corner.items() <= record.params.items() for record in corners)
    first = min(record.number for record in corners)
    assert first > max(r.number for r in records if r.proposer in ("startup", "model"))


def test_the_others_end_at_the_wide_rung_with_a_reason(records):
    stopped = [r for r in records if r.is_training and r.state == "pruned"]
    assert len(stopped) == 1 + 12 + 3 - 4
    for record in stopped:
        assert [rung.step for rung in record.rungs] == [26]
        assert record.reason == STOPPED
        assert record.cost == record.rungs[-1].cost
        assert not record.test


def test_trainings_grow_together_without_a_process_while_they_wait(whole, records):
    waits = [e.record for e in whole.events if isinstance(e, TrialPaused)]
    steps = [record.rungs[-1].step for record in waits if record.is_training]
    assert steps == sorted(steps), "the shortest goes on first"
    assert Counter(steps) == {26: 16, 68: 4, 136: 4, 272: 4}
    for record in list_long(records):
        trained = [rung.step for rung in record.rungs]
        assert trained == sorted({*trained, 26, 68, 136, 272}), "nothing was trained again"
    ended = [event.record.number for event in whole.events if isinstance(event, TrialFinished)]
    assert sorted(ended) == [record.number for record in records]


def test_only_candidates_on_the_front_are_tested_and_only_at_the_end(whole, records):
    merges = [record for record in records if record.role == "merge"]
    tested = [record for record in merges if record.state == "complete"]
    assert 0 < len(tested) < len(merges)
    assert {record.state for record in merges} == {"complete", "pruned"}
    assert whole.tested != sorted(whole.tested), "the best first"
    assert {*whole.tested} == {record.name for record in tested}
    pruned = [record for record in merges if record.state == "pruned"]
    assert all("on validation prompts" in record.reason for record in pruned)
    first = min(record.started or 0.0 for record in merges)
    assert all(record.finished and record.finished >= first for record in tested)


def summarise(records):
    return [
        (r.role, r.proposer, r.params, r.seed, r.state, r.reason, r.last_step, r.ends_at, r.rungs)
        for r in records
    ]


@pytest.mark.system
def test_a_sweep_killed_at_a_write_ends_as_if_it_had_not_been(tmp_path):
    expected = summarise(run(load(tmp_path / "whole", STEPS, FEW)))
    for writes in count(1, 17):
        spec = load(tmp_path / str(writes), STEPS, FEW)
        try:
            records = run(spec, dies_after=writes)
        except Killed:
            records = run(spec)
        else:
            break
        assert summarise(records) == expected
    assert writes > 60


@pytest.mark.system
@pytest.mark.parametrize("slots", [1, 2])
def test_a_sweep_killed_again_and_again_trains_nothing_twice(tmp_path, slots):
    expected = run(load(tmp_path / "whole", STEPS, FEW), slots=slots)
    spec, records = load(tmp_path / "killed", STEPS, FEW), None
    lives = count(1)
    while records is None:
        try:
            records = run(spec, slots=slots, dies_after=2 * slots + next(lives) % 2)
        except Killed:
            continue
    assert next(lives) > 11
    if slots == 1:  # else the order of ends differs
        assert summarise(records) == summarise(expected)
    ends = {record.last_step for record in list_long(expected)}
    assert len(ends) == 1
    assert {record.last_step for record in list_long(records)} == ends
    assert sum_steps(records) == sum_steps(expected) <= STEPS


def begin(ledger, slots=2):
    """Run the untrained policy."""
    driver = Driver(ledger, slots)
    driver.end(driver.ask())
    return driver


def report_rung(driver, trial, step=26):
    driver.report(trial, build_measurement(step, **rise(driver.in_flight[trial].params, step)))


def test_the_next_process_carries_out_a_pending_verdict(tmp_path):
    spec = load(tmp_path)
    with Ledger.open(spec) as ledger:
        driver = begin(ledger)
        first, second = driver.ask(), driver.ask()
        report_rung(driver, first)
        assert is_asked_to_stop(driver.in_flight[first].directory)
        assert not is_asked_to_stop(driver.in_flight[second].directory)
        assert ledger.get_record(1).state == "running"
    with Ledger.open(spec) as ledger:
        driver = Driver(ledger)
        assert (ledger.get_record(1).state, ledger.get_record(1).paused_at) == ("paused", 26 * STEP)
        assert not is_asked_to_stop(ledger.get_trial_directory(1))
        assert [event.record.number for event in driver.events] == [1]
        assert driver.in_flight[driver.ask()].directory.name == "2"


def test_verdicts_on_ended_trials_are_not_decided_again(tmp_path, monkeypatch):
    spec, decided, decide = load(tmp_path), set(), Halving.decide
    with Ledger.open(spec) as ledger, pytest.raises(Killed):
        CurveDriver(ledger, slots=3, dies_after=50).run()

    def note(scheduler, record, rung):
        decided.add(record.number)
        return decide(scheduler, record, rung)

    monkeypatch.setattr(Halving, "decide", note)
    with Ledger.open(spec) as ledger:
        before = [record for record in ledger.get_records() if record.rungs]
        Driver(ledger)
    assert decided == {record.number for record in before if record.is_open}
    assert any(not record.is_open for record in before)


def test_a_trial_that_fails_after_it_was_asked_to_stop_waits(tmp_path):
    with Ledger.open(load(tmp_path)) as ledger:
        driver = begin(ledger, slots=3)
        first, second = driver.ask(), driver.ask()
        for trial in (first, second):
            report_rung(driver, trial)
        driver.end(first, failure="the disk is on fire")
        driver.in_flight.pop(second)
        driver.searcher.on_end(second, Failed("the trial's process died"))
        assert [ledger.get_record(number).state for number in (1, 2)] == ["paused", "paused"]
        assert not is_asked_to_stop(ledger.get_trial_directory(1))


def test_measurements_after_a_verdict_are_ignored(tmp_path):
    with Ledger.open(load(tmp_path)) as ledger:
        driver = begin(ledger)
        trial = driver.ask()
        report_rung(driver, trial)
        report_rung(driver, trial, 30)  # its workers came so far before they heard of it
        driver.end(trial, interrupted=True)
        late = ledger.get_record(1)
    assert (late.state, late.paused_at) == ("paused", 26 * STEP)
    assert [rung.step for rung in late.rungs] == [26]


@pytest.mark.parametrize("number", [1, 4])
def test_a_configuration_that_fails_holds_nothing_up(tmp_path, number):
    class FailingDriver(CurveDriver):
        def advance(self, trial_id):
            if self.in_flight[trial_id].directory.name == str(number):
                self.end(trial_id, failure="loss is nan at step 1")
            else:
                super().advance(trial_id)

    records = run(load(tmp_path, STEPS, FEW), FailingDriver)
    assert records[number].state == "failed"
    assert len(list_long(records)) == 4
    assert len({record.last_step for record in list_long(records)}) == 1
    assert sum_steps(records) <= STEPS


def test_a_larger_budget_goes_on_from_the_end_of_a_smaller_one(tmp_path):
    before = run(load(tmp_path, STEPS, FEW))
    (end,) = {record.last_step for record in list_long(before)}
    after = run(load(tmp_path, 2 * STEPS, FEW))
    assert summarise(after)[: len(before)] == summarise(before)
    added = [record for record in after[len(before) :] if record.is_training]
    assert added
    assert {record.last_step for record in list_long(added)} <= {end}
    assert sum_steps(after) <= 2 * STEPS


def test_no_candidate_ends_while_a_proposal_is_awaited(tmp_path):
    spec = load(tmp_path, STEPS, "training.steps=60", "search.merges.budget=12")
    with Ledger.open(spec) as ledger:
        driver, asked = CurveDriver(ledger), count()
        poll = driver.searcher._proposals.poll
        driver.searcher._proposals.poll = lambda idle: (
            poll(idle=idle) if next(asked) % 3 == 2 else None
        )
        driver.run()
        records = list(ledger.get_records())
    trainings = [record.started for record in records if record.is_training]
    assert next(asked) >= 3, "further configurations were proposed"
    assert driver.tested
    tested = [record.finished for record in records if record.name in driver.tested]
    assert min(tested) > max(trainings)


@pytest.mark.parametrize("slots", [1, 2])
def test_no_more_merges_are_tested_than_the_file_allows(tmp_path, slots):
    records = run(load(tmp_path, STEPS, "search.merges.budget=2"), slots=slots)
    merges = [record for record in records if record.role == "merge"]
    assert [record.state for record in merges].count("complete") == 2 < len(merges)
    assert "search.merges.budget is spent" in {record.reason for record in merges}


def test_replicates_train_as_long_as_the_first_and_have_their_part_of_the_budget(tmp_path):
    spec = load(tmp_path, STEPS, "search.replicates={per_point: 1, max_runs: 3}")
    records = run(spec)
    again = [record for record in records if record.role == "replicate" and record.is_training]
    assert [record.state for record in again] == ["complete"] * 3
    assert all(r.last_step == records[r.replicate_of].last_step for r in again)
    searched = [r for r in records if r.role in ("search", "published")]
    part = STEPS - 3 * spec.training.steps
    assert 0.9 * part < sum_steps(searched) <= part
