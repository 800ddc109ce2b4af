"""A population in a sweep: equal results for any number of slots and any kill."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from gdpo_tune.analysis.front import Training, trace_training
from gdpo_tune.core.events import Request
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.core.trials import Cost, Outcome, TrialRecord
from gdpo_tune.ledger import Ledger
from gdpo_tune.ledger.journal import JournalFile
from gdpo_tune.ledger.requests import leave_request
from gdpo_tune.spec import PbtSettings, SweepSpec
from gdpo_tune.training import checkpoints
from gdpo_tune.training.checkpoints import (
    find_checkpoint,
    find_newest_checkpoint,
    keep_newest,
    read_checkpoint,
    write_checkpoint,
)
from gdpo_tune.tuning import lifecycle, population
from gdpo_tune.tuning.attempts import Failed
from gdpo_tune.tuning.plan import is_finished
from tests.support.search_driver import Driver
from tests.support.tuning import build_measurement, build_outcome, load_code_spec

STEPS = 10
MEMBERS = 5
WRITES = 440
"""Writes of the population below from start to end, about."""
PBT = [
    f"training={{steps: {STEPS}, checkpoint_every: 3}}",
    f"search={{trials: {MEMBERS}, scheduler: {{type: pbt}}, replicates: {{max_runs: 2}}}}",
    "space.normalization=[gdpo, grpo]",
]
State = list[str]
"""A simulated policy: step, seed and values of every training step."""


class Killed(BaseException):
    """Simulated kill of the process."""


@pytest.fixture
def spec(tmp_path: Path) -> SweepSpec:
    return load_code_spec(tmp_path, PBT)


def describe_step(training: Training | TrialConfig, params: dict[str, object], step: int) -> str:
    moving = [params[name] for name in sorted(params) if name.startswith(("lear", "reward_w"))]
    return json.dumps([step, training.seed, params["normalization"], *moving])


def evaluate_state(state: State) -> Outcome:
    """Evaluate a simulated policy: a trade-off with noise."""
    noise = random.Random("".join(state)).uniform(0, 0.2)
    return build_outcome(0.15 + noise, 0.4 - noise / 2 + len(state) / 50, (len(state) % 7) / 10)


class Population(Driver):
    """A fake of Ray Tune and of all trainings, which depend on checkpoints alone."""

    def run(self) -> None:
        while True:
            answer = self.ask()
            if answer == self.searcher.FINISHED:
                return
            if answer is None:
                self.train(next(iter(self.in_flight)))

    def advance_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if self.ask() is None:
                self.train(next(iter(self.in_flight)))

    def train(self, trial_id: str) -> None:
        config, stop_steps = self.in_flight[trial_id], self.stop_steps[trial_id]
        resume = find_newest_checkpoint(config.directory)
        state: State = json.loads((resume / "state").read_text()) if resume else []
        if resume:
            checkpointed = read_checkpoint(resume)
            if checkpointed.validation and not self.report_evaluation(
                trial_id, checkpointed.step, state, stop_steps
            ):
                return
        for step in range(len(state) + 1, config.training.steps + 1):
            state.append(describe_step(config, config.get_params_at(step - 1), step))
            evaluated = step in config.evaluate_at or step == config.training.steps
            due = step % config.training.checkpoint_every == 0
            if due:
                save_checkpoint(config, state, evaluated)
            if evaluated and not self.report_evaluation(trial_id, step, state, stop_steps, due):
                return
        checkpoint = save_checkpoint(config, state, evaluated=True)
        measured = evaluate_state(state)
        self.end(
            trial_id, outcome=Outcome(measured.validation, measured.test, measured.cost, checkpoint)
        )

    def report_evaluation(
        self,
        trial_id: str,
        step: int,
        state: State,
        stop_steps: tuple[int, ...],
        saved: bool = True,
    ) -> bool:
        """Report an evaluation; return whether the trial continues."""
        config = self.in_flight[trial_id]
        values = {
            name: estimate.mean for name, estimate in evaluate_state(state).validation.items()
        }
        self.report(trial_id, build_measurement(step, **values))
        if step not in stop_steps and not (config.directory / "halt").exists():
            return True
        if not saved:
            save_checkpoint(config, state, evaluated=True)
        self.end(trial_id, interrupted=True)
        return False


def save_checkpoint(config: TrialConfig, state: State, evaluated: bool) -> Path:
    validation = evaluate_state(state).validation if evaluated else None
    cost = Cost(64 * len(state))
    written = write_checkpoint(
        config.directory,
        len(state),
        cost,
        lambda directory: (directory / "state").write_text(json.dumps(state)) and None,
        validation,
    )
    keep_newest(config.directory)
    return written.path


def run_population(spec: SweepSpec, slots: int = 2) -> None:
    with Ledger.open(spec) as ledger:
        Population(ledger, slots).run()


def list_members(records: list[TrialRecord]) -> list[TrialRecord]:
    return [record for record in records if record.role == "member"]


def collect_results(spec: SweepSpec) -> tuple[object, ...]:
    """Collect the results of a population.

    Replicates are left out: their choice depends on the order of ends.
    """
    with Ledger.open(spec, read_only=True) as ledger:
        records = [record for record in ledger.get_records() if record.role != "replicate"]
        states = [read_final_state(record) for record in records]
        return ledger.get_generations(), [(r.role, r.state, r.validation) for r in records], states


def read_final_state(record: TrialRecord) -> State | None:
    if record.checkpoint is None:
        return None
    state: State = json.loads((record.checkpoint / "state").read_text())
    return state


def simulate_training(training: Training) -> State:
    """Simulate one training from start to end."""
    config = TrialConfig(
        "code", "embedded", training.seed, training.params, None, Path(), schedule=training.schedule
    )
    return [
        describe_step(training, config.get_params_at(step - 1), step)
        for step in range(1, STEPS + 1)
    ]


def check_trainings(records: list[TrialRecord], some: list[TrialRecord]) -> None:
    """Check that the policy of each is that of one training."""
    for record in some:
        assert read_final_state(record) == simulate_training(trace_training(records, record.number))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> SweepSpec:
    """A population that ran to its end in one process with two slots, to read."""
    spec = load_code_spec(tmp_path_factory.mktemp("whole"), PBT)
    run_population(spec)
    return spec


def test_members_meet_at_every_interval_and_end_as_one_training_each(whole: SweepSpec):
    spec = whole
    with Ledger.open(spec, read_only=True) as ledger:
        records, generations = ledger.get_records(), ledger.get_generations()
        assert is_finished(spec, records)
    roles = [record.role for record in records]
    assert roles == ["untrained", "published", *["member"] * MEMBERS, "replicate", "replicate"]
    assert {record.proposer for record in list_members(records)} == {"startup"}
    assert all(record.state == "complete" for record in records)
    assert [generation.step for generation in generations] == [2, 4, 6, 8]
    numbers = tuple(record.number for record in list_members(records))
    assert all(generation.members == numbers for generation in generations)
    assert all(len(generation.exploits) == 1 for generation in generations)
    assert [e for g in generations for e in g.exploits] == sorted(
        (e for record in records for e in record.lineage), key=lambda e: e.step
    )
    assert len({record.params["learning_rate"] for record in list_members(records)}) == MEMBERS
    check_trainings(records, records[2:])


@pytest.mark.parametrize(
    ("interval", "steps", "expected"),
    [
        (0.2, 10, (2, 4, 6, 8)),
        (0.25, 60, (15, 30, 45)),
        (0.3, 10, (3, 6, 9)),
        (0.9, 10, (9,)),
        (0.2, 3, (1, 2)),
        (0.1, 2, (1,)),
        (0.9, 2, ()),
        (0.5, 1, ()),
    ],
)
def test_members_meet_between_the_first_step_and_the_last(
    interval: float, steps: int, expected: tuple[int, ...]
):
    assert PbtSettings(interval=interval).list_sync_steps(steps) == expected


def test_every_setting_reaches_the_decisions(tmp_path: Path):
    settings = "{type: pbt, interval: 0.5, quantile: 0.4, factors: [0.5], resample: 0}"
    spec = load_code_spec(tmp_path, [*PBT, f"search.scheduler={settings}"])
    run_population(spec)
    with Ledger.open(spec, read_only=True) as ledger:
        records, (generation,) = ledger.get_records(), ledger.get_generations()
    assert generation.step == 5
    assert len(generation.exploits) == 2
    for exploit in generation.exploits:
        for name, value in exploit.params.items():
            lowest = spec.space.domains[name].low
            assert value == max(records[exploit.donor].params[name] * 0.5, lowest)
    drawn = load_code_spec(tmp_path / "drawn", [*PBT, f"search.scheduler={settings[:-2]}1}}"])
    run_population(drawn)
    with Ledger.open(drawn, read_only=True) as ledger:
        (again,) = ledger.get_generations()
    assert [e.donor for e in again.exploits] == [e.donor for e in generation.exploits]
    assert [e.params for e in again.exploits] != [e.params for e in generation.exploits]


def test_the_schedule_of_a_member_is_in_its_directory(whole: SweepSpec):
    with Ledger.open(whole, read_only=True) as ledger:
        records = ledger.get_records()
        for record in list_members(records):
            file = ledger.get_trial_directory(record.number) / "schedule.json"
            schedule = json.loads(file.read_text())
            training = trace_training(records, record.number)
            assert schedule["params"] == training.params
            assert (schedule["seed"], schedule["began_as"]) == (training.seed, training.began_as)
            assert [s["step"] for s in schedule["schedule"]] == [s.step for s in training.schedule]
            steps = [(e.step, e.donor) for e in record.lineage]
            assert [(e["step"], e["donor"]) for e in schedule["lineage"]] == steps


@pytest.mark.parametrize("slots", [1, 8])
def test_the_result_does_not_depend_on_the_number_of_slots(
    spec: SweepSpec, whole: SweepSpec, slots: int
):
    run_population(spec, slots)
    assert collect_results(spec) == collect_results(whole)


@pytest.mark.parametrize("seed", range(3))
def test_a_sweep_that_is_killed_repeatedly_has_the_same_result(
    spec: SweepSpec, whole: SweepSpec, monkeypatch: pytest.MonkeyPatch, seed: int
):
    draw, killed, writes_left = random.Random(seed), 0, 0

    def count(original: Callable[..., object]) -> Callable[..., object]:
        def write(*arguments: object, **keywords: object) -> object:
            nonlocal writes_left
            writes_left -= 1
            if writes_left < 0:
                raise Killed
            return original(*arguments, **keywords)

        return write

    with monkeypatch.context() as patch:
        for owner, name in (
            (JournalFile, "append_logs"),
            (Path, "rename"),
            (checkpoints.shutil, "rmtree"),
            (checkpoints.os, "link"),
            (population, "write_atomically"),
        ):
            patch.setattr(owner, name, count(getattr(owner, name)))
        while True:
            writes_left = draw.randint(1, WRITES // 6)
            try:
                run_population(spec, slots=draw.choice([1, 2, 4]))
            except Killed:
                killed += 1
            else:
                break
    assert killed >= 3
    assert collect_results(spec) == collect_results(whole)


def test_a_failed_member_does_not_affect_the_others(spec: SweepSpec):
    with Ledger.open(spec) as ledger:
        driver = Population(ledger, 3)
        driver.advance_until(lambda: any(c.evaluate_at for c in driver.in_flight.values()))
        trial_id = next(id for id, config in driver.in_flight.items() if config.evaluate_at)
        number = int(driver.in_flight.pop(trial_id).directory.name)
        driver.searcher.on_end(trial_id, Failed("broken"))
        driver.run()
        records, generations = ledger.get_records(), ledger.get_generations()
    assert [r.state for r in list_members(records)].count("complete") == MEMBERS - 1
    assert records[number].state == "failed"
    assert [generation.step for generation in generations] == [2, 4, 6, 8]
    assert not any(number in generation.members for generation in generations)


def test_more_members_catch_up_before_they_meet_the_others(spec: SweepSpec, tmp_path: Path):
    with Ledger.open(spec) as ledger:
        Population(ledger, 2).advance_until(lambda: len(ledger.get_generations()) == 2)
    larger = load_code_spec(tmp_path, [*PBT, f"search.trials={MEMBERS + 2}"])
    run_population(larger)
    with Ledger.open(larger, read_only=True) as ledger:
        records, generations = ledger.get_records(), ledger.get_generations()
    assert [generation.step for generation in generations] == [2, 4, 2, 4, 6, 8]
    late = tuple(record.number for record in list_members(records))[MEMBERS:]
    assert [g.members for g in generations[2:4]] == [late, late]
    assert all(len(g.members) == MEMBERS + 2 for g in generations[4:])
    check_trainings(records, records[2:])


def test_under_another_scheduler_members_go_on_without_meeting(spec: SweepSpec, tmp_path: Path):
    with Ledger.open(spec) as ledger:
        Population(ledger, 2).advance_until(lambda: len(ledger.get_generations()) == 1)
    plain = load_code_spec(tmp_path, [*PBT, "search.scheduler={type: fifo}"])
    run_population(plain)
    with Ledger.open(plain, read_only=True) as ledger:
        records = ledger.get_records()
        assert len(ledger.get_generations()) == 1
    assert all(record.state == "complete" for record in records)
    check_trainings(records, list_members(records))


def test_a_donor_with_a_damaged_checkpoint_gives_the_previous_one(
    spec: SweepSpec, monkeypatch: pytest.MonkeyPatch
):
    adopted: list[int] = []

    def damaged_first(directory: Path) -> Path | None:
        newest = find_checkpoint(directory).newest
        assert newest is not None
        (newest / "state").write_text("torn")
        before = find_checkpoint(directory).newest
        adopted.append(0 if before is None else read_checkpoint(before).step)
        return before

    monkeypatch.setattr(population, "find_newest_checkpoint", damaged_first)
    run_population(spec)
    assert adopted[0] == 0
    assert any(adopted)
    with Ledger.open(spec, read_only=True) as ledger:
        records = ledger.get_records()
    check_trainings(records, list_members(records))


def test_the_others_of_a_population_meet_without_a_member_that_a_person_stops(
    spec: SweepSpec, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lifecycle, "POLL_SECONDS", 0.0)
    with Ledger.open(spec) as ledger:
        population = Population(ledger, slots=2)
        population.advance_until(lambda: any(r.state == "paused" for r in ledger.get_records()))
        waiting = next(r.number for r in ledger.get_records() if r.state == "paused")
        request = Request("a", "stop", {"trial": waiting}, "anna", 1.0)
        leave_request(ledger.directory, request)
        population.run()
        members = [record for record in ledger.get_records() if record.role == "member"]
        assert is_finished(ledger.spec, ledger.get_records())
    assert [r.number for r in members if r.reason == "stopped by anna"] == [waiting]
    assert sum(record.state == "complete" for record in members) == MEMBERS - 1
