"""Candidates under another policy, data or lengths: what carries over, and what a recipe gives."""

import pytest

from gdpo_tune import export, train
from gdpo_tune.core.errors import SpecError, UsageError
from gdpo_tune.core.registry import POLICIES
from gdpo_tune.core.trials import Part
from gdpo_tune.exporters.page import PAGE
from gdpo_tune.ledger import Ledger
from gdpo_tune.results.transfer import SETTABLE, list_fitting_spaces
from gdpo_tune.spec import load_spec
from tests.support.paths import ROOT
from tests.support.tables import cases
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


@cases("results", "trainings like that of the sweep")
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
    assert request.transfer.carried == (
        *("normalization grpo", "group_size 8"),
        *("reward_weights.format 0.5", "reward_weights.length 0.25"),
    ), "what was searched or is no default"


@pytest.mark.parametrize(("rank", "subject"), [(8, "adapters of rank 8"), (0, "all weights")])
def test_a_change_between_adapters_and_all_weights_is_named(tmp_path, rank, subject):
    before = "all weights" if rank else "adapters of rank 16"
    sweep = store_sweep(tmp_path, overrides=[f"model.lora_rank={0 if rank else 16}"])
    request = transfer(sweep, f"model.lora_rank={rank}", "space.learning_rate=1e-5")
    assert request.note.endswith(f"with {subject} in place of {before}")


@pytest.mark.parametrize("name", SETTABLE[1:])
def test_a_parameter_that_does_not_carry_over_may_be_set(sweep, name):
    value = 2 if name == "num_iterations" else 0.5
    request = transfer(sweep, POLICY, *GIVEN, f"space.{name}={value}")
    assert request.params[name] == value
    assert request.transfer is not None
    (moved,) = [each for each in request.transfer.moved if each.key == f"space.{name}"]
    assert (moved.wanted, moved.source) == (str(value), "`--set`")


@cases("results", "parameters that carry over")
def test_a_parameter_that_carries_over_is_refused(sweep, override, message):
    assert message in refuse(sweep, POLICY, *GIVEN, override)


@pytest.mark.parametrize(
    "override", ["space.learning_rate=1e-5", "space={beta: 0.1}", " space.x=1"]
)
def test_no_parameter_may_be_set_for_the_policy_of_the_sweep(sweep, override):
    assert "--set space. has no effect" in refuse(sweep, override)


@cases("results", "bad values")
def test_a_bad_value_is_refused_as_in_a_file(sweep, override, message, is_first):
    """Some are refused before others are asked for."""
    with pytest.raises(SpecError, match=message) as caught:
        transfer(sweep, POLICY, *([] if is_first else GIVEN), override)
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


@cases("results", "values of a recipe")
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


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("tools_qwen", ["its task is tools, and the sweep's is code", "write code_qwen"]),
        ("code_qwne", ["did you mean 'code_qwen'"]),
        ("absent.yaml", ["no such file"]),
    ],
)
def test_a_recipe_of_another_task_or_of_no_file_is_refused(sweep, recipe, words):
    message = refuse(sweep, recipe=recipe)
    assert all(each in message for each in words)


def test_a_recipe_has_the_rewards_of_the_candidate(tmp_path):
    bug_free = ["space.reward_weights.bug_free=[0, 1]"]
    spec = store_sweep(tmp_path, {"reward_weights.bug_free": 1.0}, bug_free)
    recipe = write_recipe(tmp_path, "policy: a/b\n")
    assert "it has no reward_weights.bug_free" in refuse(spec, recipe=recipe)
    assert transfer(spec, recipe="code_qwen").params["reward_weights.bug_free"] == 1


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


def store_task(tmp_path, task, *overrides):
    """Store a sweep of one trial of a shipped search space."""
    overrides = ["constraints={}", *overrides]
    spec = load_code_spec(tmp_path, overrides, ROOT / "search_spaces" / f"{task}.yaml")
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


def test_the_scoring_is_that_for_which_the_weights_were_found(tmp_path):
    tools = store_task(tmp_path, "tools")
    request = transfer(tools, recipe="tools_qwen")
    assert request.spec.scoring == "strict"
    assert "scoring strict, unlike the recipe" in request.transfer.carried
    alike = transfer(store_task(tmp_path / "b", "tools", "scoring=released"), recipe="tools_qwen")
    assert "scoring released" in alike.transfer.carried
    request = transfer(tools, "scoring=released", recipe="tools_qwen")
    assert request.spec.scoring == "released"
    assert not [each for each in request.transfer.carried if "scoring" in each]
    request = transfer(tools, "scoring=released")
    assert request.note.endswith("with other scoring")
    assert [each.key for each in request.transfer.moved] == ["scoring"]
    assert (
        "does not carry over to other scoring: scoring released (was strict)" in request.lines[-1]
    )


# --- the commands ---------------------------------------------------------------------------------


def test_a_checkpoint_has_the_steps_that_are_asked_for(sweep):
    with Ledger.open(sweep) as ledger:
        params = ledger.get_records()[0].params
        ledger.start(params, "checkpoint", "candidate", 70, parts=[Part(0, 30, 1.0)])
        ledger.complete(1, build_outcome(0.9, 0.9, 0.5))
    assert transfer(sweep, which="0@30").spec.training.steps == 30
    assert transfer(sweep, POLICY, *GIVEN, which="0@30").spec.training.steps == 100
    limits = ["training.max_completion_length=128", "training.length_limit=50"]
    request = transfer(sweep, *limits, which="0@30")
    assert request.spec.training.steps == 30
    assert request.note.endswith("30 of 60 steps, with other lengths")


def test_mergekit_takes_no_recipe_and_no_parameters(sweep):
    with Ledger.open(sweep) as ledger:
        params = ledger.get_records()[0].params
        ledger.start(params, "search", "model", 71)
        ledger.complete(1, build_outcome(0.5, 0.9, 0.5))
        halves = [Part(0, 60, 0.5), Part(1, 60, 0.5)]
        ledger.start({}, "merge", "candidate", 72, parts=halves)
        ledger.complete(2, build_outcome(0.95, 0.95, 0.9))
    words = [f"{sweep.directory}:merge-2", "--to", "mergekit"]
    with pytest.raises(UsageError, match="a merge is no training"):
        export.main([*words, "--recipe", "code_qwen"])
    with pytest.raises(UsageError, match="has no effect"):
        export.main([*words, "--set", "space.beta=0"])


def test_nothing_is_written_before_the_refusal(sweep, tmp_path):
    out = tmp_path / "o"
    source = f"{sweep.directory}:0"
    with pytest.raises(UsageError, match="do not carry over"):
        export.main([source, "--to", "trl", "--out", str(out), "--set", POLICY])
    with pytest.raises(UsageError, match="do not carry over"):
        train.main(["--from", source, "--out", str(out), "--set", POLICY])
    assert not out.exists()


def test_the_page_begins_with_what_carries_over(sweep, tmp_path, capsys):
    out = tmp_path / "o"
    words = [word for each in (POLICY, *GIVEN) for word in ("--set", each)]
    assert export.main([f"{sweep.directory}:0", "--to", "verl", "--out", str(out), *words]) == 0
    page = (out / PAGE).read_text()
    head = page.partition("`verl.yaml` adapts")[0]
    assert "not what the sweep searched: another policy and other lengths" in head
    assert "measured on policy embedded, data the prompts that the task writes, 64 tokens" in head
    assert "`normalization grpo`, `group_size 8`" in head
    assert "`reward_weights.format 0.5`" in head
    assert "| `space.learning_rate` | 1e-4 | 1e-6 | `--set` |" in head
    assert "| `training.length_limit` | 26 | 200 | `--set` |" in head
    assert "Kept from the candidate, and perhaps wrong here: `beta 0`" in head
    assert "1 up to 26 tokens, else 0, in the sweep; 1 up to 200 tokens, else 0, here" in head
    printed = capsys.readouterr().out
    assert "carries over: normalization grpo, group_size 8" in printed
    assert "does not carry over to another policy and other lengths: policy" in printed
    assert "learning_rate 1e-6 (was 1e-4)" in printed


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"length_shape": "ramp"}, "falls from `training.length_limit` to the longest"),
        (
            {"length_shape": "overlong", "length_cache": 0.25},
            "1 up to 48 tokens, then in a line to 0 at 64, in the sweep; 1 up to 384 tokens, then "
            "in a line to 0 at 512, here. `length_cache` carries over as a share",
        ),
    ],
    ids=str,
)
def test_the_page_says_what_a_shape_in_tokens_means_now(tmp_path, shape, words):
    space = ["space.length_shape=[step, ramp, overlong]", "space.length_cache=[0.25]"]
    spec, out = store_sweep(tmp_path, shape, space), tmp_path / "o"
    words_of_command = ["--to", "trl", "--recipe", "code_qwen", "--reference-data"]
    export.main([f"{spec.directory}:0", *words_of_command, "--out", str(out)])
    assert words in (out / PAGE).read_text()


def test_a_page_without_a_transfer_says_nothing_of_it(sweep, tmp_path):
    export.main([f"{sweep.directory}:0", "--to", "trl", "--out", str(tmp_path / "o")])
    assert "carries over" not in (tmp_path / "o" / PAGE).read_text().lower()


def test_a_recipe_needs_a_sweep(tmp_path, capsys):
    file = str(ROOT / "search_spaces" / "code.yaml")
    with pytest.raises(UsageError, match="--recipe requires a sweep"):
        export.main([file, "--to", "trl", "--recipe", "code_qwen"])
    with pytest.raises(SystemExit):
        train.main([file, "--recipe", "code_qwen"])
    assert "--recipe requires --from" in capsys.readouterr().err
