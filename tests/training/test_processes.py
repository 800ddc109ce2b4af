"""Two processes give the same advantages as one, and train the same policy."""

from __future__ import annotations

import json

import pytest

from gdpo_tune.core.registry import NORMALIZATIONS
from gdpo_tune.core.trial_files import STEPS_FILE, read_steps
from tests.support.process_groups import launch
from tests.support.training import ToyTask, write_policy

pytestmark = [pytest.mark.integration, pytest.mark.system]


@pytest.mark.slow  # the next test would notice a difference, too, but not show its mode
def test_two_processes_give_the_advantages_of_one(tmp_path):
    for processes in (1, 2):
        launch("advantages", tmp_path, processes=processes)
    one, two = (json.loads((tmp_path / f"advantages-{n}.json").read_text()) for n in (1, 2))
    assert set(one) == set(NORMALIZATIONS)
    assert one == two
    for values in one.values():
        assert max(map(abs, values)) > 0.1


def assert_same_training(seen, name, others, other) -> None:
    """Compare the metrics of every step and the final policy, up to rounding."""
    for (step, ours), (_, theirs) in zip(seen[name][0], others[other][0], strict=True):
        assert set(ours) == set(theirs)
        for key in ours:
            if key.startswith("train/"):
                assert ours[key] == pytest.approx(theirs[key], rel=2e-4, abs=2e-6), (step, key)
    assert seen[f"{name}_weights"] == pytest.approx(others[f"{other}_weights"], rel=1e-5)


@pytest.mark.slow  # test_sharding trains in two processes in the quick suite
def test_two_processes_train_the_policy_of_one(tmp_path):
    policy = write_policy(tmp_path / "policy")
    for processes in (1, 2):
        (tmp_path / str(processes)).mkdir()
        launch("trials", tmp_path / str(processes), policy, processes=processes)
    alone = json.loads((tmp_path / "1" / "seen-0.json").read_text())
    first, second = (json.loads((tmp_path / "2" / f"seen-{r}.json").read_text()) for r in (0, 1))

    assert first == second, "both processes see the same figures and the same outcome"
    assert first["resumed"] == first["sampled"], "stopped after a step and gone on, bit by bit"
    folder = tmp_path / "2" / "cut"
    assert {path.name for path in (folder / "checkpoint-4").glob("rng_state*")} == {
        "rng_state_0.pth",
        "rng_state_1.pth",
    }
    assert [m.step for m in read_steps(folder)] == [1, 2, 3, 4]
    assert len((folder / STEPS_FILE).read_text().splitlines()) == 4, "one process writes"

    assert_same_training(first, "fixed", alone, "fixed")
    assert_same_training(first, "selected", alone, "selected")
    assert_same_training(first, "parts", alone, "fixed")
    assert_same_training(alone, "parts", alone, "fixed")
    assert_same_training(first, "auto_parts", alone, "fixed")
    assert_same_training(first, "each_parts", first, "each")
    assert [step for step, _ in first["minis"][0]] == [1, 2, 3, 4]
    for (step, ours), (_, theirs) in zip(first["minis"][0], alone["minis"][0], strict=True):
        assert ours["train/learning_rate"] == theirs["train/learning_rate"]
        if step == 1:  # later ones differ, because other completions share an optimizer step
            assert ours["train/rewards/hits/mean"] == theirs["train/rewards/hits/mean"]
    # Two processes that train as one give the same merge; each samples its part of the prompts.
    assert first["merged_weights"] != first["fixed_weights"]
    ((step, validation),), test = first["merged"]
    assert (step, set(validation)) == (0, {f"validation/{name}" for name in ToyTask.metrics})
    assert first["again"] == [[[0, {}]], test]
    folder = tmp_path / "2" / "merged"
    (measurement,) = read_steps(folder)
    assert measurement.cost.evaluation_completions == 12, "of both processes"
    assert (folder / STEPS_FILE).read_text().count("\n") == 1
    means = [theirs["train/rewards/hits/mean"] for _, theirs in alone["fixed"][0]]
    assert len(set(means)) > 1
    assert set(first["fixed"][1]) == set(ToyTask.metrics)
