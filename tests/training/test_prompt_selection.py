"""Selection of prompts: what is learnt, what is sampled, and what a group has to have."""

import pytest
import torch

from gdpo_tune.core.parameters import CANDIDATES
from gdpo_tune.core.registry import NORMALIZATIONS
from gdpo_tune.core.task_info import order_prompts
from gdpo_tune.core.text import join_turns
from gdpo_tune.training.normalization import compute_advantages, find_informative_groups
from gdpo_tune.training.prompt_selection import PromptSelection
from gdpo_tune.training.trainer import GDPOTrainer
from tests.support.training import SETTINGS, have_same_weights, stop_after
from tests.support.trials import build_trial, run_metrics

PROMPTS = [f"{('easy', 'mixed')[i % 2]} sum {i}" for i in range(64)]


def build(prompts=PROMPTS, steps=8, per_step=4):
    return PromptSelection(prompts, steps, per_step, seed=0)


def teach(selection, steps):
    for step in steps:
        chosen = selection.select(step)
        selection.learn(chosen, ["mixed" in PROMPTS[i] for i in chosen])


def test_without_experience_prompts_come_in_turn():
    order = order_prompts(len(PROMPTS), 8 * 4 * CANDIDATES, 0)
    starts = range(0, len(order), 4 * CANDIDATES)
    assert [build().select(step) for step in range(8)] == [order[i : i + 4] for i in starts]


def test_informative_prompts_are_recognized_by_their_words():
    selection = build()
    teach(selection, range(3))
    for step in range(3, 8):
        first, *others = selection.select(step)
        assert first == build().select(step)[0], "a quarter is drawn in turn"
        assert all("mixed" in PROMPTS[i] for i in others)
        assert len({first, *others}) == 4


def test_a_prompt_without_common_words_is_remembered_itself():
    selection = build([f"p{i}" for i in range(16)], steps=2)
    selection.learn(range(16), [i == 5 for i in range(16)])
    assert 5 in selection.select(0)


def test_turns_are_selected_as_their_text_is():
    turns = [[{"role": "user", "content": text}] for text in PROMPTS]
    selections = build(turns), build([join_turns(each) for each in turns])
    for selection in selections:
        teach(selection, range(3))
    assert selections[0].select(3) == selections[1].select(3)
    assert selections[0].prompts[0] == turns[0], "what the trainer gets"


def test_every_prompt_is_a_candidate_once_in_each_pass():
    order = build()._order
    passes = [order[i : i + len(PROMPTS)] for i in range(0, len(order), len(PROMPTS))]
    assert all(sorted(one) == list(range(len(PROMPTS))) for one in passes)


def test_few_prompts_leave_no_choice():
    selection = build(PROMPTS[:3], steps=2)
    assert sorted(set(selection.select(1))) == [0, 1, 2]
    assert len(selection.select(1)) == 4


def test_the_state_is_saved_exactly(tmp_path):
    selection, other = build(), build()
    teach(selection, range(4))
    selection.save(tmp_path)
    other.load(tmp_path)
    teach(selection, range(4, 7))
    teach(other, range(4, 7))
    assert selection.select(7) == other.select(7) != build().select(7)
    assert (selection._state == other._state).all()


EQUAL, SPLIT = [[1.0, 0.1]] * 4, [[1.0, 0.0], [0.0, 0.1], [1.0, 0.0], [0.0, 0.1]]
CANCELLING, ONE_ALIVE = [[1.0, 0.0], [0.0, 1.0]] * 2, [[0.0, 0.0], *[[1.0, 0.0]] * 3]


def find(mode, rewards, weights):
    ranges = [(0.0, 1.0)] * 2
    rewards, weights = torch.tensor(rewards), torch.tensor(weights)
    advantages = compute_advantages(rewards, weights, 4, mode, ranges=ranges)
    return find_informative_groups(advantages, 4).tolist()


@pytest.mark.parametrize("mode", NORMALIZATIONS)
def test_a_group_is_informative_under_the_mode_and_weights(mode):
    rewards = [*EQUAL, *SPLIT, *ONE_ALIVE]
    assert find(mode, rewards, [1.0, 1.0]) == [False, mode != "gd2po", True]  # drops disagreements
    assert find(mode, rewards, [1.0, 0.0]) == [False, True, True]
    assert find(mode, rewards, [0.0, 1.0]) == [False, True, False]


# gd2po drops disagreements, and saw weights the two by their spread over the batch
@pytest.mark.parametrize("mode", [mode for mode in NORMALIZATIONS if mode not in ("gd2po", "saw")])
def test_rewards_that_cancel_teach_nothing_whatever_whitening_adds(mode):
    assert find(mode, [*CANCELLING, *ONE_ALIVE], [1.0, 1.0]) == [False, True]


@pytest.mark.system
@pytest.mark.parametrize("passes", [1, 2])
def test_a_resumed_trial_selects_the_same_prompts(toy, policy, tmp_path, passes):
    changes = {"prompt_selection": "informative", "num_iterations": passes}
    changes["training"] = SETTINGS.replace(steps=5)
    whole, expected = run_metrics(build_trial(policy, tmp_path / "a", **changes))
    config = build_trial(policy, tmp_path / "b", **changes)
    newest = stop_after(config, 3)
    assert newest.name == "checkpoint-3"
    rest, outcome = run_metrics(config, newest)
    assert rest == whole[3:]
    assert outcome.test == expected.test
    assert have_same_weights(outcome.checkpoint, expected.checkpoint)
    assert outcome.cost.completions == 5 * SETTINGS.completions_per_step


def test_the_groups_of_a_step_are_those_that_were_selected(toy, policy, tmp_path, monkeypatch):
    scored, selected = [], []

    class Recorder(PromptSelection):
        def learn(self, chosen, informative):
            selected.append((list(chosen), list(informative)))
            super().learn(chosen, informative)

    inner = GDPOTrainer._calculate_rewards

    def calculate(self, inputs, *others):
        scored.append(([row["problem"] for row in inputs], [row["prompt"] for row in inputs]))
        return inner(self, inputs, *others)

    monkeypatch.setattr("gdpo_tune.training.trial.PromptSelection", Recorder)
    monkeypatch.setattr(GDPOTrainer, "_calculate_rewards", calculate)
    steps, _ = run_metrics(build_trial(policy, tmp_path, prompt_selection="informative"))
    assert len(selected) == len(scored) == len(steps)
    for (chosen, informative), (problems, prompts) in zip(selected, scored, strict=True):
        assert problems == [index for index in chosen for _ in range(4)]
        assert len(set(prompts)) == len(informative) == len(set(chosen)) == 4
