import hashlib
import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gdpo_tune import rewards
from gdpo_tune.core import registry
from gdpo_tune.policies.load_policy import load_policy, resolve_policy
from gdpo_tune.spec import load_spec
from gdpo_tune.tasks.generation import choose_split
from gdpo_tune.tasks.programs import extract_program
from recipes.demonstrations import FORMAT_SHARE, MODES, draw_mode, render
from recipes.make_policy import RECIPES, build_task, list_demonstrations, main
from recipes.tokenizer import ANSWER_TAGS
from recipes.warm_start import Schedule
from tests.support.data import score_one
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def tokenizer():
    return load_policy("embedded")[1]


@pytest.fixture(scope="module")
def small_policy(tmp_path_factory):
    """Two runs of the recipe, a few steps each."""
    folders = [tmp_path_factory.mktemp("policy") / name for name in ("one", "two")]
    for folder in folders:
        arguments = ["--out", str(folder), "--steps", "4", "--prompts", "60", "--held-out", "0"]
        assert main(arguments) == 0
    return folders


def test_every_integer_up_to_99_is_one_token(tokenizer):
    for number in range(100):
        assert len(tokenizer(f"{number}")["input_ids"]) == 1
        assert tokenizer.tokenize(f"9+{number}=1")[2] == str(number)


@pytest.mark.parametrize("text", [*ANSWER_TAGS, *"-+*/()=:,.[]"])
def test_tags_and_operators_are_one_token(tokenizer, text):
    assert tokenizer.tokenize(f"7{text}7") == ["7", text, "7"]


@pytest.mark.parametrize("split", ["train", "validation", "test"])
@pytest.mark.parametrize("task", RECIPES)
def test_prompts_and_completions_come_back_as_they_were(task, split):
    tokenizer = load_policy(registry.describe_task(task).embedded)[1]
    rng = random.Random(0)
    for problem in build_task(task).problems(split, 200, 0):
        thought = problem.data["thoughts"][draw_mode(rng)]
        text = problem.prompt + render(thought, problem.data["solution"], rng, RECIPES[task].frame)
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        # Trainers decode this way; the tags must not be lost.
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize(
    "text", ["", " ", "  a  b ", "naïve ☃ 漢字 🙂", "a\tb\r\nc", "<pad", "1234567"]
)
def test_any_text_comes_back_as_it_was(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_no_token_is_added_to_a_text(tokenizer):
    assert tokenizer.tokenize("x") == ["x"]
    folder = resolve_policy("embedded")
    assert AutoTokenizer.from_pretrained(folder).tokenize("17+9") == ["17", "+", "9"]
    assert len(tokenizer("x")["input_ids"]) == 1


def test_demonstrations_are_imperfect_in_the_stated_shares():
    rng = random.Random(0)
    frame = RECIPES["code"].frame
    completions = [render("1+1=2", "def f(x): return x", rng, frame) for _ in range(4000)]
    share = sum(score_one(rewards.block_format, completion) for completion in completions) / 4000
    assert share == pytest.approx(FORMAT_SHARE, abs=0.03)
    modes = [draw_mode(rng) for _ in range(4000)]
    for mode, expected in MODES.items():
        assert modes.count(mode) / 4000 == pytest.approx(expected, abs=0.03)


def test_every_fault_still_holds_the_program():
    rng = random.Random(0)
    for thought in ("", "1+1=2"):
        frame = RECIPES["code"].frame
        completions = {render(thought, "def f(x): return x", rng, frame) for _ in range(200)}
        assert len(completions) == 5
        assert {extract_program(text, "f") for text in completions} == {"def f(x): return x"}


def test_every_fault_of_a_task_costs_the_format_and_most_keep_the_answer():
    rng = random.Random(0)
    for task in ("math", "tools"):
        problem = build_task(task).problems("warm_start", 1, 0)[0]
        solution, frame = problem.data["solution"], RECIPES[task].frame
        completions = sorted({render("1+1=2", solution, rng, frame) for _ in range(200)})
        scores = build_task(task).score([problem] * 5, completions, [9] * 5).rewards
        best = registry.describe_task(task).rewards["correctness"][1]
        assert sum(value == 1 for value in scores["format"]) == 1
        # A tool call without its tags is not found; an answer is.
        assert sum(value == best for value in scores["correctness"]) == 5 - (task == "tools")


def test_demonstrations_use_no_prompt_of_another_split():
    assert {choose_split(prompt) for prompt, _ in list_demonstrations("code", 200)} == {
        "warm_start"
    }


def test_demonstrations_of_code_are_those_that_the_shipped_policy_learnt():
    digest = hashlib.sha256(repr(list_demonstrations("code", 300)).encode()).hexdigest()
    assert digest.startswith("2f9b2a043209bda0")


def test_learning_rate_rises_holds_and_falls():
    schedule = Schedule(steps=1000, peak_lr=1.0, warmup_steps=50, decay_share=0.5, floor=0.1)
    assert schedule.get_lr(0) == pytest.approx(0.02)
    assert schedule.get_lr(49) == schedule.get_lr(499) == 1.0
    assert schedule.get_lr(750) == pytest.approx(0.5)
    assert schedule.get_lr(999) == pytest.approx(0.1)


def test_recipe_writes_a_policy_that_loads_and_speaks(small_policy):
    model, tokenizer = load_policy(str(small_policy[0]))
    ids = tokenizer("Write f(x): k is 11.\n", return_tensors="pt")
    spoken = model.generate(**ids, max_new_tokens=3, do_sample=False)
    assert spoken.shape[1] <= ids["input_ids"].shape[1] + 3


def test_recipe_keeps_what_it_measured(small_policy):
    facts = json.loads((small_policy[0] / "measured.json").read_text())
    assert facts["demonstrations"] == 180
    assert facts["schedule"]["steps"] == 4


def test_recipe_gives_the_same_weights_twice(small_policy):
    one, two = (AutoModelForCausalLM.from_pretrained(folder) for folder in small_policy)
    pairs = zip(one.parameters(), two.parameters(), strict=True)
    assert all(torch.equal(first, second) for first, second in pairs)


def test_the_recipe_measures_every_mode_and_family_of_a_task(tmp_path):
    task = "tools"
    arguments = ["--task", task, "--out", str(tmp_path), "--steps", "2", "--prompts", "60"]
    assert main([*arguments, "--held-out", "20"]) == 0
    facts = json.loads((tmp_path / "measured.json").read_text())
    families = {problem.family for problem in build_task(task).problems("validation", 20, 0)}
    for table in ("sampled", *(f"forced_{mode}" for mode in MODES)):
        assert facts[table].keys() == {"all", *families}
        assert facts[table]["all"].keys() == registry.describe_task(task).metrics.keys()
    assert load_policy(str(tmp_path))[0].num_parameters() == facts["parameters"]


def test_training_lowers_the_loss(tmp_path):
    losses = []
    for steps in (1, 25):
        main(["--out", str(tmp_path), "--steps", str(steps), "--prompts", "60", "--held-out", "0"])
        losses.append(json.loads((tmp_path / "measured.json").read_text())["loss"])
    assert losses[1] < 0.9 * losses[0]


@pytest.mark.parametrize(("task", "gain"), [("code", 0.2), ("math", 0.2), ("tools", 0.5)])
def test_shipped_policies_were_measured_and_show_the_trade_off(task, gain):
    with open(f"{resolve_policy(registry.describe_task(task).embedded)}/measured.json") as file:
        facts = json.load(file)
    direct, terse = facts["forced_none"]["all"], facts["forced_terse"]["all"]
    assert terse["correctness"] > direct["correctness"] + gain
    limit = RECIPES[task].settings.length_limit
    assert direct["mean_length"] < limit < terse["mean_length"]


@pytest.mark.parametrize("task", RECIPES)
def test_recipes_measure_with_the_lengths_of_the_shipped_sweep(task):
    spec = load_spec(ROOT / "search_spaces" / f"{task}.yaml")
    settings = RECIPES[task].settings
    assert spec.training.max_completion_length == settings.max_completion_length
    assert spec.training.length_limit == settings.length_limit


@pytest.mark.parametrize("task", registry.TASKS)
def test_shipped_policies_are_small_and_load(task):
    name = registry.describe_task(task).embedded
    model, tokenizer = load_policy(name)
    assert 400_000 < model.num_parameters() < 600_000
    assert (Path(resolve_policy(name)) / "model.safetensors").stat().st_size <= 2_000_000
    for text in ("0", "17", "99"):
        assert len(tokenizer(text)["input_ids"]) == 1
