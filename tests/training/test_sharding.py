"""Several processes train one policy as one process does, and write the same files.

Each has a whole policy, or they share one (FSDP2).
"""

import json
from pathlib import Path

import pytest
from torch import Tensor
from transformers import AutoModelForCausalLM

from gdpo_tune.core.registry import NORMALIZATIONS
from gdpo_tune.core.trial_files import STEPS_FILE, read_steps
from tests.support import process_groups
from tests.support.process_groups import launch
from tests.support.training import ToyTask

pytestmark = [
    pytest.mark.integration,
    pytest.mark.usefixtures("toy"),
    pytest.mark.system,
    pytest.mark.slow,
]


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


def test_two_processes_train_the_policy_of_one(tmp_path, policy):
    for processes in (1, 2):
        (tmp_path / str(processes)).mkdir()
        launch("trials", tmp_path / str(processes), policy, processes=processes)
    alone = json.loads((tmp_path / "1" / "seen-0.json").read_text())
    first, second = (json.loads((tmp_path / "2" / f"seen-{r}.json").read_text()) for r in (0, 1))

    assert first == second, "both processes see the same figures and the same outcome"
    assert first["resumed"] == first["sampled"], "stopped after a step and gone on, bit by bit"
    folder = tmp_path / "2" / "cut"
    states = {path.name for path in (folder / "checkpoint-4").glob("rng_state*")}
    assert states == {"rng_state_0.pth", "rng_state_1.pth"}
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


def run_trials(names: str, policy: str, directory: Path, processes: int, *others: Path):
    """Return what the processes reported, which is the same in all of them."""
    directory.mkdir()
    if processes == 1:
        process_groups.train_sharded_trials(directory, policy, names, *map(str, others))
    else:
        launch("sharded", directory, policy, names, *others, processes=processes)
    seen = [json.loads((directory / f"seen-{r}.json").read_text()) for r in range(processes)]
    assert all(other == seen[0] for other in seen)
    return seen[0]


def assert_same_steps(ours, theirs, first: int = 1, rel: float = 1e-5) -> None:
    """Compare the metrics of every step from the first one on, and the estimates at the end."""
    theirs = [theirs[0][first - 1 :], theirs[1]]
    assert [step for step, _ in ours[0]] == [step for step, _ in theirs[0]]
    for (step, own), (_, other) in zip(ours[0], theirs[0], strict=True):
        assert own == pytest.approx(other, rel=rel, abs=1e-6), step
    assert ours[1] == {name: pytest.approx(e, rel=rel) for name, e in theirs[1].items()}


def load_weights(checkpoint: Path) -> dict[str, Tensor]:
    return AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()


def assert_same_weights(checkpoint: Path, other: Path) -> None:
    ours, theirs = load_weights(checkpoint), load_weights(other)
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        # Where a gradient is next to 0, Adam makes much of its rounding.
        assert (weight - theirs[name]).norm() < 1e-4 * weight.norm(), name


def assert_resumed(result, name: str, other: Path, alone, rel: float = 1e-5) -> None:
    """Compare a trial that went on after two steps in other processes with one that did not stop.

    The first report repeats the evaluation of the step before.
    """
    repeated, *steps = result[f"{name}-after-{other.name}"][0]
    assert repeated == [2, {}]
    outcome = result[f"{name}-after-{other.name}"][1]
    assert_same_steps([steps, outcome], alone[name], first=3, rel=rel)


def test_two_processes_share_a_policy_and_go_on_with_it(policy, tmp_path):
    one, two = tmp_path / "1", tmp_path / "2"
    alone = run_trials("full", policy, one, 1)
    shared = run_trials("full", policy, two, 2, two)
    assert_same_steps(shared["full"], alone["full"])
    assert_resumed(shared, "full", two, shared)
    for name in ("full", "full-after-2"):
        assert_same_weights(two / name / "checkpoint-4", one / "full" / "checkpoint-4")
    ours, theirs = (
        {path.name for path in (each / "full" / "checkpoint-2").iterdir()} for each in (two, one)
    )
    assert ours - {"rng_state_0.pth", "rng_state_1.pth"} == theirs - {"rng_state.pth"}


def test_any_number_of_processes_shares_a_policy_and_goes_on_with_it(policy, tmp_path):
    names = "full,parts,adapters"
    alone = run_trials(names, policy, tmp_path / "1", 1)
    for count in (2, 4):
        directory = tmp_path / str(count)
        all_names = f"fast_cpu,transformers,{names}"
        shared = run_trials(all_names, policy, directory, count, directory)
        for name in names.split(","):
            assert_same_steps(shared[name], alone[name])
            assert_resumed(shared, name, directory, shared)
            other = tmp_path / "1" / name / "checkpoint-4"
            assert_same_weights(directory / name / "checkpoint-4", other)
        for engine in ("fast_cpu", "transformers"):
            assert shared[f"{engine}-cut"] == shared[engine]
            means = [step["train/rewards/hits/mean"] for _, step in shared[engine][0]]
            assert len(set(means)) > 1
