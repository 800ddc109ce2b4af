"""Search spaces as recipes, from which a candidate takes what does not carry over."""

import pytest

from gdpo_tune.core.errors import SpecError
from gdpo_tune.ledger import Ledger
from gdpo_tune.results.transfer import list_fitting_spaces
from gdpo_tune.spec import load_spec
from tests.support.paths import ROOT
from tests.support.transfers import POLICY, refuse, split_fix, store_sweep, transfer
from tests.support.tuning import build_outcome, load_code_spec


@pytest.fixture
def sweep(tmp_path):
    return store_sweep(tmp_path)


def test_a_recipe_gives_policy_data_lengths_batch_and_learning_rate(sweep):
    before, request = transfer(sweep), transfer(sweep, recipe="code_qwen")
    recipe = load_spec(ROOT / "search_spaces" / "code_qwen.yaml", to_run=False)
    for section in ("policy", "data", "model", "rollout", "training", "sandbox"):
        assert getattr(request.spec, section) == getattr(recipe, section), section
    assert request.spec.resources.gpus == 1
    assert request.spec.name == before.spec.name
    # 1e-6, the default, is outside of the recipe's domain; 0 and .28 are in it.
    middle = recipe.space.domains["learning_rate"].find_middle()
    taken = {"learning_rate": middle, "beta": 0.0, "epsilon_high": 0.28}
    assert request.params == {**before.params, **taken}


def test_options_beat_a_recipe(sweep):
    own = [POLICY, "space.learning_rate=2e-5", "training.steps=7", "training.evaluate_every=5"]
    request = transfer(sweep, *own, recipe="code_qwen")
    assert request.spec.policy == "Qwen/Qwen2.5-7B-Instruct"
    assert request.params["learning_rate"] == 2e-5
    assert (request.spec.training.steps, request.spec.training.length_limit) == (7, 200)
    sources = {each.key: each.source for each in request.transfer.moved}
    assert sources["training.steps"] == sources["space.learning_rate"] == "`--set`"
    assert sources["training.length_limit"] == "`--recipe code_qwen`"


def write_recipe(tmp_path, text, base="code.yaml"):
    file = tmp_path / "mine.yaml"
    file.write_text(f"extends: {ROOT / 'search_spaces' / base}\n{text}")
    return str(file)


@pytest.mark.parametrize(
    ("domain", "value", "source"),
    [
        ("2.0e-5", 2e-5, ""),
        ("{log: [1.0e-7, 1.0e-5]}", 1e-6, ": that of its published baseline, of {log: [1e-07"),
        ("[3.0e-6, 1.0e-6]", 1e-6, ": that of its published baseline, of [3e-06, 1e-06]"),
        ("{log: [1.0e-5, 1.0e-3]}", 1e-4, ": the middle, of {log: [1e-05, 0.001]}"),
        ("{value: 4.0e-5, when: {normalization: [grpo]}}", 4e-5, ""),
    ],
)
def test_the_page_says_which_value_of_a_range_was_taken(tmp_path, domain, value, source):
    recipe = write_recipe(tmp_path, f"policy: a/b\nspace: {{learning_rate: {domain}}}\n")
    request = transfer(store_sweep(tmp_path), recipe=recipe)
    assert request.params["learning_rate"] == pytest.approx(value)
    (moved,) = [each for each in request.transfer.moved if each.key == "space.learning_rate"]
    assert moved.source.startswith(f"`--recipe {recipe}`{source}")


def test_a_learning_rate_for_adapters_is_not_taken_for_every_weight(sweep):
    message = refuse(sweep, "model.lora_rank=0", recipe="code_qwen")
    assert "space.learning_rate = 1.73e-5: --recipe code_qwen has it for adapters" in message
    assert split_fix(message) == ["space.learning_rate=1e-06"]
    request = transfer(sweep, "model.lora_rank=0", *split_fix(message), recipe="code_qwen")
    assert request.params["learning_rate"] == 1e-6


def test_a_recipe_has_the_task_of_the_sweep(sweep):
    message = refuse(sweep, recipe="tools_qwen")
    assert "its task is tools, and the sweep's is code" in message
    assert "write code_qwen" in message


def test_a_recipe_has_the_rewards_of_the_candidate(tmp_path):
    bug_free = ["space.reward_weights.bug_free=[0, 1]"]
    spec = store_sweep(tmp_path, {"reward_weights.bug_free": 1.0}, bug_free)
    recipe = write_recipe(tmp_path, "policy: a/b\n")
    assert "it has no reward_weights.bug_free" in refuse(spec, recipe=recipe)
    assert transfer(spec, recipe="code_qwen").params["reward_weights.bug_free"] == 1


@pytest.mark.parametrize(
    ("recipe", "message"),
    [("code_qwne", "did you mean 'code_qwen'"), ("absent.yaml", "no such file")],
)
def test_a_recipe_that_does_not_exist(sweep, recipe, message):
    assert message in refuse(sweep, recipe=recipe)


@pytest.mark.parametrize(
    ("task", "policy", "names"),
    [
        ("tools", "", ["tools_qwen", "tools_3b_qwen"]),
        ("tools", "Qwen/Qwen2.5-3B-Instruct", ["tools_3b_qwen", "tools_qwen"]),
        ("gsm8k", "", []),
    ],
)
def test_recipes_of_the_task_are_suggested_those_of_the_policy_first(task, policy, names):
    assert list_fitting_spaces(task, policy) == names


def test_the_problems_of_a_recipe_have_its_lines(tmp_path):
    recipe = write_recipe(tmp_path, "training: {stepz: 3}\n")
    with pytest.raises(SpecError, match=r"mine\.yaml:2: training\.stepz"):
        transfer(store_sweep(tmp_path), recipe=recipe)


@pytest.fixture
def tools(tmp_path):
    return store_task(tmp_path, "tools")


def store_task(tmp_path, task):
    """Store a sweep of one trial of a shipped search space."""
    spec = load_code_spec(tmp_path, ["constraints={}"], ROOT / "search_spaces" / f"{task}.yaml")
    with Ledger.open(spec) as ledger:
        ledger.start(spec.space.complete_baseline({}), "search", "model", seed=70)
        ledger.complete(0, build_outcome())
    return spec


@pytest.mark.parametrize(("task", "has_weight"), [("math", True), ("tools", False)])
def test_a_recipe_in_which_the_length_has_no_weight_is_named(tmp_path, task, has_weight):
    request = transfer(store_task(tmp_path, task), recipe=f"{task}_qwen")
    assert request.spec.policy == "Qwen/Qwen2.5-1.5B-Instruct"
    (moved,) = [each for each in request.transfer.moved if each.key == "training.length_limit"]
    assert (", in which the length has no weight" not in moved.source) == has_weight


def test_the_scoring_is_that_for_which_the_weights_were_found(tools):
    request = transfer(tools, recipe="tools_qwen")
    assert request.spec.scoring == "strict"
    assert "scoring strict, unlike the recipe" in request.transfer.carried
    request = transfer(tools, "scoring=released", recipe="tools_qwen")
    assert request.spec.scoring == "released"
    assert not [each for each in request.transfer.carried if "scoring" in each]


def test_another_scoring_alone_is_said(tools):
    request = transfer(tools, "scoring=released")
    assert request.note.endswith("with other scoring")
    assert [each.key for each in request.transfer.moved] == ["scoring"]
    assert (
        "does not carry over to other scoring: scoring released (was strict)" in request.lines[-1]
    )
