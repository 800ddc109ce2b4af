"""The simulation of a large sweep: its processes and its clock."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import scale_executor
import scale_trials
from scale_executor import START, Clock, SimulatedActors, Tally

from gdpo_tune.core.object_store import SPEC
from gdpo_tune.tuning.ray.messages import (
    AttemptConfig,
    Interrupted,
    Setup,
    pack,
    unpack_message,
)
from gdpo_tune.tuning.ray.stopping import HALT
from tests.support.tuning import load_code_spec


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock to which the driver costs nothing."""
    monkeypatch.setattr(scale_executor.time, "process_time", lambda: 0.0)
    made = Clock()
    monkeypatch.setattr(scale_executor, "CLOCK", made)
    monkeypatch.setattr(scale_trials, "CLOCK", made)
    monkeypatch.setattr(scale_executor, "TALLY", Tally())
    return made


def three_steps(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for step in (1, 2, 3):
        yield {"step": (config["name"], step), "training_iteration": step, "time_this_iter_s": 1.0}
    yield {"__duplicate__": True}


def test_slots_are_held_until_a_process_has_stopped(clock: Clock, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(SimulatedActors, "slots", 2)
    monkeypatch.setattr(SimulatedActors, "make", staticmethod(three_steps), raising=False)
    actors = SimulatedActors(None)
    told: list[tuple[str, int]] = []

    def take(actor: Any, result: dict[str, Any]) -> None:
        if "step" not in result:
            actors.remove_actor(actor)
            return
        told.append(result["step"])
        actors.schedule_actor_task(actor, "train", on_result=take)

    def begin(actor: Any) -> None:
        actors.schedule_actor_task(actor, "train", on_result=take)

    for name in "abc":
        actors.add_actor(None, {"config": {"name": name}}, None, on_start=begin)
    assert actors.num_live_actors == 2
    assert actors.num_pending_actors == 1
    while actors.num_total_actors:
        actors.next(timeout=None)
    assert sorted(told[:6]) == [(name, step) for name in "ab" for step in (1, 2, 3)]
    assert told[6:] == [("c", 1), ("c", 2), ("c", 3)]
    assert clock.now == pytest.approx(2 * START + 6, abs=1)


def test_what_the_driver_spends_passes_for_trials_too(monkeypatch: pytest.MonkeyPatch):
    spent = iter([1.0, 3.5])
    monkeypatch.setattr(scale_executor.time, "process_time", lambda: next(spent))
    clock = Clock()
    clock.resume()
    clock.advance()
    assert clock.now == clock.driver == 2.5
    clock.wait_until(4.0)
    assert (clock.now, clock.driver) == (4.0, 2.5)


def test_a_simulated_trial_ends_where_it_is_halted(clock: Clock, tmp_path: Path):
    spec = load_code_spec(tmp_path)
    directory = tmp_path / "trials" / "0"
    trial = spec.build_trial_config(spec.space.complete_baseline({}), 0, directory)
    trial = SimpleNamespace(**{**vars(trial), "evaluate_at": (2,)})
    trial.get_reward_weights = lambda: {"correctness": 1.0, "format": 1.0}
    attempt = AttemptConfig(trial, Setup("none:none", tmp_path / SPEC))
    results = scale_trials.simulate_results(pack(attempt))
    assert [unpack_message(next(results)).measurement.step for _ in range(2)] == [1, 2]
    (directory / HALT).touch()
    assert unpack_message(next(results)) == Interrupted()
    assert next(results) == {"__duplicate__": True}
    assert next(results, None) is None
    assert len((directory / "steps.jsonl").read_text().splitlines()) == 2
