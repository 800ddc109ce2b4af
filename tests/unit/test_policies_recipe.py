import json
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gdpo_tune.policies.demonstrations import FORMAT_SHARE, MODES, draw_mode, render
from gdpo_tune.policies.load import embedded_folder, load_policy
from gdpo_tune.policies.recipe import demonstrations, main
from gdpo_tune.policies.tokenizer import TAGS
from gdpo_tune.policies.warm_start import Schedule
from gdpo_tune.tasks.code_problems import generate, split_of
from gdpo_tune.tasks.rewards import extract_code, format_reward


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


@pytest.mark.parametrize("text", [*TAGS, *"-+*/()=:,.[]"])
def test_tags_and_operators_are_one_token(tokenizer, text):
    assert tokenizer.tokenize(f"7{text}7") == ["7", text, "7"]


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_prompts_and_completions_come_back_as_they_were(tokenizer, split):
    rng = random.Random(0)
    for problem in generate(split, 200, 0):
        thought = problem.data["thoughts"][draw_mode(rng)]
        text = problem.prompt + render(thought, problem.data["solution"], rng)
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        # Trainers decode this way; the tags must not be lost.
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize(
    "text", ["", " ", "  a  b ", "naïve ☃ 漢字 🙂", "a\tb\r\nc", "<pad", "1234567"]
)
def test_any_text_comes_back_as_it_was(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_auto_tokenizer_reads_the_folder_alike(tokenizer):
    text = (
        "Write f(x): k is 17, plus 9.\n<think>17+9=26</think><answer>def f(x): return x+26</answer>"
    )
    assert AutoTokenizer.from_pretrained(embedded_folder()).tokenize(text) == tokenizer.tokenize(
        text
    )
    assert "17" in tokenizer.tokenize(text)


def test_no_token_is_added_to_a_text(tokenizer):
    assert tokenizer.tokenize("x") == ["x"]
    assert len(tokenizer("x")["input_ids"]) == 1


def test_demonstrations_are_imperfect_in_the_stated_shares():
    rng = random.Random(0)
    completions = [render("1+1=2", "def f(x): return x", rng) for _ in range(4000)]
    share = sum(format_reward(completion) for completion in completions) / 4000
    assert share == pytest.approx(FORMAT_SHARE, abs=0.03)
    modes = [draw_mode(rng) for _ in range(4000)]
    for mode, expected in MODES.items():
        assert modes.count(mode) / 4000 == pytest.approx(expected, abs=0.03)


def test_every_fault_still_holds_the_program():
    rng = random.Random(0)
    for thought in ("", "1+1=2"):
        completions = {render(thought, "def f(x): return x", rng) for _ in range(200)}
        assert len(completions) == 5
        assert {extract_code(text, "f") for text in completions} == {"def f(x): return x"}


def test_demonstrations_use_no_prompt_of_another_split():
    assert {split_of(prompt) for prompt, _ in demonstrations(200)} == {"warm_start"}


def test_learning_rate_rises_holds_and_falls():
    schedule = Schedule(steps=1000, peak_lr=1.0, warmup_steps=50, decay_share=0.5, floor=0.1)
    assert schedule.lr(0) == pytest.approx(0.02)
    assert schedule.lr(49) == schedule.lr(499) == 1.0
    assert schedule.lr(750) == pytest.approx(0.5)
    assert schedule.lr(999) == pytest.approx(0.1)


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


def test_training_lowers_the_loss(tmp_path):
    losses = []
    for steps in (1, 40):
        main(["--out", str(tmp_path), "--steps", str(steps), "--prompts", "60", "--held-out", "0"])
        losses.append(json.loads((tmp_path / "measured.json").read_text())["loss"])
    assert losses[1] < 0.9 * losses[0]


def test_shipped_policy_was_measured_and_shows_the_trade_off():
    with open(f"{embedded_folder()}/measured.json") as file:
        facts = json.load(file)
    direct, terse = facts["forced_none"]["all"], facts["forced_terse"]["all"]
    assert terse["correctness"] > direct["correctness"] + 0.2
    assert direct["mean_length"] < 26 < terse["mean_length"]
