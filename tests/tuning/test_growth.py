"""Sweeps with a budget: which trainings go on, where they end, and restarts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from gdpo_tune.core.events import TrialPaused
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.core.trials import Cost, TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.spec import SweepSpec
from gdpo_tune.spec.first_trials import list_growth_levels
from gdpo_tune.training.checkpoints import write_checkpoint
from gdpo_tune.tuning.attempts import HALT
from gdpo_tune.tuning.plan import is_finished
from tests.support.search_driver import Killed, SteppedDriver
from tests.support.tuning import build_measurement, build_outcome, load_code_spec

GROWTH = (
    "search.plan=auto",
    "search.scheduler={type: growth}",
    "search.replicates.max_runs=0",
    "search.sampler=random",
    "training.evaluate_every=240",
)
STEP = 64
"""Completions of a step."""
Curve = Callable[[float, int], dict[str, float]]
"""Weight of the length reward, as a share, and step -> values."""


class GrowthDriver(SteppedDriver):
    """A driver whose trials follow curves, stop at a halt request, and resume."""

    def __init__(
        self, ledger: Ledger, curve: Curve, slots: int = 1, dies_after: int = 10**9
    ) -> None:
        super().__init__(ledger, slots, dies_after)
        self._curve = curve
        self.tested: list[str] = []

    def advance(self, trial_id: str) -> None:
        """Advance one trial to its next evaluation, or to its end."""
        config = self.in_flight[trial_id]
        if config.parts:
            self._evaluate_merge(trial_id, config)
            return
        if not config.train:
            self.end(trial_id, outcome=build_outcome(0.6, 0.5, 0.3))
            return
        progress = config.directory / "checkpoint"
        at = int(progress.read_text()) if progress.exists() else 0
        step = min([s for s in config.evaluate_at if s > at], default=config.training.steps)
        step = min(step, config.training.steps)
        values = self._curve(get_length_share(config), step)
        cost = Cost(completions=STEP * step)
        self.tick()
        self.report(trial_id, build_measurement(step, cost, **values))
        self.tick()
        config.directory.mkdir(parents=True, exist_ok=True)
        progress.write_text(str(step))
        if step == config.training.steps:
            path = write_checkpoint(config.directory, step, cost, lambda path: None).path
            outcome = replace(build_outcome(**values), cost=cost, checkpoint=path)
            self.end(trial_id, outcome=outcome)
        elif (config.directory / HALT).exists():
            self.end(trial_id, interrupted=True)

    def _evaluate_merge(self, trial_id: str, config: TrialConfig) -> None:
        """Give a merge its parents' weighted mean and a little more, or less near one of them."""
        bump = 0.02 if min(part.weight for part in config.parts) > 0.1 else -0.05
        values = dict.fromkeys(("correctness", "format", "length"), bump)
        for part in config.parts:
            parent = self.searcher._ledger.get_record(int(part.checkpoint.parent.name))
            for name in values:
                values[name] += part.weight * parent.validation[name].mean
        self.tick()
        self.report(trial_id, build_measurement(0, Cost(), **values))
        self.tick()
        if (config.directory / HALT).exists():
            self.end(trial_id, interrupted=True)
        else:
            self.tested.append(f"merge-{config.directory.name}")
            self.end(trial_id, outcome=build_outcome(**values))


def get_length_share(config: TrialConfig) -> float:
    weights = [float(config.params[f"reward_weights.{n}"]) for n in ("format", "length")]
    return weights[1] / sum(weights)


def rise(share: float, step: int) -> dict[str, float]:
    """Rise with every doubling, the more in an objective the larger its weight."""
    learned = step / (step + 240)
    return {
        "correctness": 0.6,
        "format": 0.5 + 0.5 * learned * (1 - share),
        "length": 0.3 + 0.7 * learned * share,
    }


def load_growing(directory: Path, steps: int = 960, *overrides: str) -> SweepSpec:
    budget = f"search.budget.completions={STEP * steps}"
    return load_code_spec(directory, [*GROWTH, "training.steps=240", budget, *overrides])


def run(spec: SweepSpec, curve: Curve, **options: Any) -> list[TrialRecord]:
    with Ledger.open(spec) as ledger:
        GrowthDriver(ledger, curve, **options).run()
        assert is_finished(spec, ledger.get_records())
        return list(ledger.get_records())


def list_lengths(records: list[TrialRecord]) -> dict[int, int | None]:
    return {r.number: r.last_step for r in records if r.is_training}


def test_the_steps_double_and_the_first_ones_take_their_share_of_the_budget(tmp_path: Path):
    levels = list_growth_levels(load_growing(tmp_path))
    assert levels == (30, 60, 120, 240)
    assert 5 * levels[0] <= 0.16 * 960 < 5 * levels[1]  # four configurations and the published one


def test_what_rises_goes_on_until_the_budget_is_spent(tmp_path: Path):
    records = run(load_growing(tmp_path), rise)
    trained = [r for r in records if r.is_training]
    assert {r.state for r in records} == {"complete"}
    assert all(record.test for record in records), "each one was evaluated where it ended"
    assert set(list_lengths(records).values()) <= {30, 60, 120, 240}
    spent = sum(record.cost.completions for record in trained) / STEP
    assert 960 / 2 < spent <= 960


def test_trainings_grow_together(tmp_path: Path):
    with Ledger.open(load_growing(tmp_path)) as ledger:
        driver = GrowthDriver(ledger, rise)
        driver.run()
        waits = [e.record for e in driver.events if isinstance(e, TrialPaused)]
        lengths = list_lengths(list(ledger.get_records()))
    steps = [record.rungs[-1].step for record in waits if record.is_training]
    assert steps == sorted(steps), "the shortest goes on first"
    assert {s for s in lengths.values() if s} == {120, 240}, "about equally long"


@pytest.mark.parametrize("slots", [1, 2])
def test_a_sweep_killed_at_a_write_ends_as_if_it_had_not_been(tmp_path: Path, slots: int):
    expected = summarise(run(load_growing(tmp_path / "whole"), rise, slots=slots))
    for writes in count(1, 4):
        spec = load_growing(tmp_path / str(writes))
        try:
            records = run(spec, rise, slots=slots, dies_after=writes)
        except Killed:
            records = run(spec, rise, slots=slots)
        else:
            break
        if slots == 1:  # else the order of ends differs
            assert summarise(records) == expected
        assert {record.state for record in records} == {"complete"}
        assert sum(record.cost.completions for record in records) <= 960 * STEP
    assert writes > 10


def summarise(records: list[TrialRecord]) -> list[tuple[Any, ...]]:
    return [(r.role, r.params, r.state, r.last_step, r.ends_at) for r in records]


def test_trials_wait_without_a_process(tmp_path: Path):
    with Ledger.open(load_growing(tmp_path)) as ledger:
        driver = GrowthDriver(ledger, rise)
        driver.run()
        waits = [event for event in driver.events if isinstance(event, TrialPaused)]
    assert len(waits) >= 8


def test_only_candidates_on_the_front_are_tested_and_only_at_the_end(tmp_path: Path):
    spec = load_growing(tmp_path, 960, "search.merges.budget=40")
    with Ledger.open(spec) as ledger:
        driver = GrowthDriver(ledger, rise)
        driver.run()
        records = list(ledger.get_records())
    merges = [record for record in records if record.role == "merge"]
    tested = [record for record in merges if record.state == "complete"]
    assert 0 < len(tested) < len(merges)
    assert {record.state for record in merges} == {"complete", "pruned"}
    assert driver.tested != sorted(driver.tested), "the best first"
    assert {*driver.tested} == {record.name for record in tested}
    for record in merges:
        if record.state == "pruned":
            assert "on validation prompts" in record.reason
    first = min(record.started or 0.0 for record in merges)
    assert all(record.finished and record.finished >= first for record in tested)


def test_no_candidate_ends_while_a_proposal_is_awaited(tmp_path: Path):
    spec = load_growing(tmp_path, 1440, "search.merges.budget=12")
    with Ledger.open(spec) as ledger:
        driver = GrowthDriver(ledger, rise)
        poll, asked = driver.searcher._proposals.poll, count()

        def think(*, idle: bool) -> object:
            return poll(idle=idle) if next(asked) % 3 == 2 else None

        driver.searcher._proposals.poll = think
        driver.run()
        records = list(ledger.get_records())
    trainings = [record.started for record in records if record.is_training]
    assert next(asked) >= 3, "further configurations were proposed"
    assert min(record.finished for record in records if record.name in driver.tested) > max(
        trainings
    )


@pytest.mark.parametrize("slots", [1, 2])
def test_no_more_merges_are_tested_than_the_file_allows(tmp_path: Path, slots: int):
    records = run(load_growing(tmp_path, 960, "search.merges.budget=2"), rise, slots=slots)
    merges = [record for record in records if record.role == "merge"]
    assert [record.state for record in merges].count("complete") == 2 < len(merges)
    assert "search.merges.budget is spent" in {record.reason for record in merges}


def test_replicates_train_as_long_as_the_first_and_have_their_part_of_the_budget(tmp_path: Path):
    replicates = "search.replicates={per_point: 1, max_runs: 3}"
    records = run(load_growing(tmp_path, 1920, replicates), rise)
    by_role = {role: [r for r in records if r.role == role] for role in ("search", "replicate")}
    assert len(by_role["replicate"]) == 3
    for record in by_role["replicate"]:
        assert record.state == "complete"
        assert record.replicate_of is not None
        assert record.last_step == records[record.replicate_of].last_step
    searched = sum(r.cost.completions for r in records if r.role in ("search", "published"))
    assert (1920 - 3 * 240) * STEP / 2 < searched <= (1920 - 3 * 240) * STEP
