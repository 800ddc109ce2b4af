"""Candidates under another policy, data or lengths: what carries over, and what a recipe gives."""

import pytest

from gdpo_tune.core.errors import SpecError
from gdpo_tune.core.registry import POLICIES
from gdpo_tune.ledger import Ledger
from gdpo_tune.results.transfer import SETTABLE, list_fitting_spaces
from gdpo_tune.spec import load_spec
from tests.support.paths import ROOT
from tests.support.transfers import (
    DATA,
    GIVEN,
    NEEDED,
    POLICY,
    list_missing,
    refuse,
    split_fix,
    store_sweep,
    transfer,
)
from tests.support.tuning import build_outcome, load_code_spec


@pytest.fixture
def sweep(tmp_path):
    return store_sweep(tmp_path)


# --- what is asked for ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "missing"),
    [
        ([POLICY], {*NEEDED}),
        ([*DATA], {*list(NEEDED)[1:], "data.max_prompt_length"}),
        (["data={source: my.jsonl, layout: mbpp}", POLICY], {*NEEDED, "data.max_prompt_length"}),
        (["training.max_completion_length=128"], {"training.length_limit"}),
        (["model.lora_rank=8"], {"space.learning_rate"}),
        ([POLICY, *GIVEN[1:]], {"space.learning_rate"}),
        ([POLICY, *GIVEN[:1], "training={steps: 9}"], {*NEEDED} - {*list(NEEDED)[:2]}),
    ],
    ids=lambda value: " ".join(sorted(value)),  # a set has another order in each process
)
def test_every_missing_value_is_listed_and_the_suggested_options_work(sweep, overrides, missing):
    message = refuse(sweep, *overrides)
    assert list_missing(message) == missing
    request = transfer(sweep, *overrides, *split_fix(message))
    assert request.transfer is not None


def test_the_refusal_names_values_reasons_and_a_recipe(sweep):
    message = refuse(sweep, POLICY)
    assert "measured on policy embedded" in message
    assert "policy = Qwen/Qwen2.5-7B-Instruct" in message
    assert "space.learning_rate = 1e-4: the best one differs by policy" in message
    assert "training.max_completion_length = 64: " in message
    assert "or: --recipe code_qwen" in message


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["training.steps=500"],
        ["policy=embedded"],
        ["model.lora_rank=0", "data.source="],
        ["training.max_completion_length=64"],
    ],
    ids=str,
)
def test_a_training_like_that_of_the_sweep_needs_nothing(sweep, overrides):
    request = transfer(sweep, *overrides)
    assert request.transfer is None
    assert request.trial_lines == transfer(sweep).trial_lines


def test_a_limit_is_not_asked_for_if_the_length_has_no_weight(tmp_path):
    spec = store_sweep(tmp_path, {"reward_weights.length": 0.0})
    assert list_missing(refuse(spec, POLICY)) == {*NEEDED} - {"training.length_limit"}


def test_suggested_values_fit_the_group_size_and_the_lengths(tmp_path):
    batch = ["space.group_size=[4, 12]", "training.completions_per_step=96"]
    spec = store_sweep(tmp_path, {"group_size": 12}, [*batch, "training.mini_batch_size=48"])
    message = refuse(spec, POLICY, "training.max_completion_length=100")
    suggested = dict(each.split("=") for each in split_fix(message))
    assert suggested["training.completions_per_step"] == "528"
    assert suggested["training.length_limit"] == "41"


def test_a_group_size_that_carries_over_has_to_divide_a_step(sweep):
    values = [POLICY, *GIVEN, "training.completions_per_step=500"]
    message = refuse(sweep, *values)
    assert "training.completions_per_step = 500: group_size 8" in message
    assert "496 or 504 would do" in message
    assert split_fix(message) == ["training.completions_per_step=496"]
    request = transfer(sweep, *values, *split_fix(message))
    assert request.spec.training.completions_per_step == 496


def test_only_the_group_size_of_the_candidate_has_to_divide_a_step(tmp_path):
    spec = store_sweep(tmp_path, {"group_size": 4}, ["space.group_size=[4, 8]"])
    request = transfer(spec, POLICY, *GIVEN, "training.completions_per_step=84")
    assert request.params["group_size"] == 4


# --- what is taken from where ---------------------------------------------------------------------


def test_rewards_carry_over_and_the_rest_is_that_of_the_options(sweep):
    before, request = transfer(sweep), transfer(sweep, POLICY, *GIVEN, "space.beta=0.01")
    assert request.spec.policy == "Qwen/Qwen2.5-7B-Instruct"
    assert request.params == {**before.params, "learning_rate": 1e-6, "beta": 0.01}
    assert (request.seed, request.label, request.name) == (before.seed, before.label, before.name)
    training = request.spec.training
    assert (training.steps, training.length_limit) == (100, 200)
    assert training.micro_batch_size == "auto", "the policy decides how many fit"
    assert request.note == f"{before.note}, with another policy and other lengths"


@pytest.mark.parametrize("name", SETTABLE[1:])
def test_a_parameter_that_does_not_carry_over_may_be_set(sweep, name):
    value = 2 if name == "num_iterations" else 0.5
    request = transfer(sweep, POLICY, *GIVEN, f"space.{name}={value}")
    assert request.params[name] == value
    assert request.transfer is not None
    (moved,) = [each for each in request.transfer.moved if each.key == f"space.{name}"]
    assert (moved.wanted, moved.source) == (str(value), "`--set`")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("space.group_size=4", "export takes it from the trial: what a sweep finds about rewards"),
        ("space={normalization: gdpo}", "--set space.normalization: export takes it"),
        ("space.reward_weights.format=1", "--set space.reward_weights: export takes it"),
        ("space.learning_rat=1e-5", "did you mean 'learning_rate'"),
        ("space=3", "--set space.3"),
    ],
)
def test_a_parameter_that_carries_over_is_refused(sweep, override, message):
    assert message in refuse(sweep, POLICY, *GIVEN, override)


@pytest.mark.parametrize(
    "override", ["space.learning_rate=1e-5", "space={beta: 0.1}", " space.x=1"]
)
def test_no_parameter_may_be_set_for_the_policy_of_the_sweep(sweep, override):
    assert "--set space. has no effect" in refuse(sweep, override)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("space.learning_rate=0", "too small"),
        ("space.learning_rate={log: [1e-6, 1e-5]}", "several values are possible"),
        ("training.length_limit=600", "not below max_completion_length = 512"),
        ("training.steps=many", "not a whole number"),
    ],
)
def test_a_bad_value_is_refused_as_in_a_file(sweep, override, message):
    with pytest.raises(SpecError, match=message):
        transfer(sweep, POLICY, *GIVEN, override)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("policy=embedded_math", "made for math"),
        ("training.stepz=3", "did you mean 'steps'"),
        ("training.max_completion_length=long", "not a whole number"),
        ("data.source=a/b", "the meaning of the columns is not guessed"),
    ],
)
def test_a_bad_value_is_refused_before_others_are_asked_for(sweep, override, message):
    with pytest.raises(SpecError, match=message) as caught:
        transfer(sweep, POLICY, override)
    assert len(caught.value.problems) == 1


def test_an_example_that_does_not_fit_is_no_mistake_of_the_user(sweep):
    message = refuse(sweep, f"policy={POLICIES['embedded']}")  # which has 512 positions
    assert list_missing(message) == {*NEEDED}


def test_points_and_a_scheduler_of_the_file_do_not_matter(tmp_path):
    more = ["enqueue=[{learning_rate: 1e-4}]", "search={budget: {completions: 64000}}"]
    request = transfer(store_sweep(tmp_path, (), more), POLICY, *GIVEN)
    assert request.params["learning_rate"] == 1e-6


@pytest.mark.parametrize("recipe", list_fitting_spaces("code", ""))
def test_every_recipe_takes_a_candidate_of_a_divided_budget(tmp_path, recipe):
    search = "search={budget: {completions: 64000}}"
    request = transfer(store_sweep(tmp_path, (), [search]), recipe=recipe)
    assert (request.spec.search.trials, request.spec.search.scheduler.type) == (1, "fifo")
    assert not request.spec.search.budget.completions


def test_a_parameter_with_a_condition_may_be_set(tmp_path):
    condition = "space.beta={choices: [0, 0.01], when: {normalization: [gdpo]}}"
    request = transfer(store_sweep(tmp_path, (), [condition]), POLICY, *GIVEN, "space.beta=0.02")
    assert request.params["beta"] == 0.02


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
