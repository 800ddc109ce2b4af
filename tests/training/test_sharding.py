"""Processes that share a policy train it as one process does, and write the same files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support import process_groups
from tests.support.process_groups import launch
from tests.support.training import write_policy

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("toy")]


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


@pytest.mark.system
@pytest.mark.slow
def test_two_processes_share_a_policy_and_go_on_with_it(tmp_path):
    policy, one, two = write_policy(tmp_path / "policy"), tmp_path / "1", tmp_path / "2"
    alone = run_trials("full", policy, one, 1)
    shared = run_trials("full", policy, two, 2, two)
    assert_same_steps(shared["full"], alone["full"])
    assert_resumed(shared, "full", two, shared)
    for name in ("full", "full-after-2"):
        assert_same_weights(two / name / "checkpoint-4", one / "full" / "checkpoint-4")
    files = {path.name for path in (two / "full" / "checkpoint-2").iterdir()}
    assert files - {"rng_state_0.pth", "rng_state_1.pth"} == {
        path.name for path in (one / "full" / "checkpoint-2").iterdir()
    } - {"rng_state.pth"}


@pytest.mark.system
@pytest.mark.slow
def test_any_number_of_processes_shares_a_policy_and_goes_on_with_it(tmp_path):
    policy, names = write_policy(tmp_path / "policy"), "full,parts,adapters"
    alone = run_trials(names, policy, tmp_path / "1", 1)
    for count in (2, 4):
        directory = tmp_path / str(count)
        all_names = f"fast_cpu,transformers,{names}"
        shared = run_trials(all_names, policy, directory, count, directory)
        for name in names.split(","):
            assert_same_steps(shared[name], alone[name])
            assert_resumed(shared, name, directory, shared)
            assert_same_weights(
                directory / name / "checkpoint-4", tmp_path / "1" / name / "checkpoint-4"
            )
        for engine in ("fast_cpu", "transformers"):
            assert shared[f"{engine}-cut"] == shared[engine]
            means = [step["train/rewards/hits/mean"] for _, step in shared[engine][0]]
            assert len(set(means)) > 1
