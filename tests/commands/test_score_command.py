"""`python -m gdpo_tune.score`: texts, references and samples, judged as a trial judges them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from gdpo_tune import score
from gdpo_tune.core.errors import DataError, PolicyError, SpecError, TaskFileError, UsageError
from gdpo_tune.policies.load_policy import load_policy
from gdpo_tune.spec import load_spec
from gdpo_tune.tasks import task_process
from gdpo_tune.training.evaluation import Evaluator
from gdpo_tune.training.rollout import choose_held_out_sampler
from gdpo_tune.training.worker_cache import build_worker_cache
from tests.support.paths import ROOT

DATA = ROOT / "tests" / "data"
SPACES = ROOT / "search_spaces"
GOALS = "objectives: {correctness: {direction: maximize, reference: -3}}\n"
SUMS = '''
"""A task whose rewards go wrong in every way that a trial survives."""
from gdpo_tune.tasks.custom import RewardFunctionTask

def right(completions, answer, **_):
    return [1.0 if int(text) == sum else 0.0 for text, sum in zip(completions, answer)]

def odd(completions, **_):
    return [float(text) if text == "nan" else None for text in completions]

class Sums(RewardFunctionTask):
    reward_funcs = [right, odd]
    ranges = {"right": (0, 1), "odd": (0, 1)}
    def rows(self):
        return [{"prompt": "1+2=", "answer": 3}]
'''


def write_space(directory, task, more="", goals=GOALS):
    file = directory / "space.yaml"
    space = "space: {normalization: [gdpo, grpo], group_size: 4}"
    file.write_text(f"task: {task}\n{goals}{space}\n{more}")
    return str(file)


def write_lines(directory, *lines):
    file = directory / "rows.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return str(file)


def score_lines(directory, *arguments):
    """Score and return the objects of `--json`."""
    output = directory / "scores.jsonl"
    assert score.main([*arguments, "--json", str(output)]) == 0
    return [json.loads(line) for line in output.read_text().split("\n")[:-1]]


def list_rewards(lines, name):
    return [line["rewards"][name] for line in lines]


def refuse(*arguments, error=UsageError):
    """Return the message of what is refused with status 2."""
    with pytest.raises(error) as caught:
        score.main([*arguments])
    assert caught.value.exit_status == 2
    return str(caught.value)


def use_data(source, layout):
    return f"data: {{source: {DATA / source}, layout: {layout}}}\n"


OWN = "objectives: {right: {direction: maximize, reference: 0}}\n"


@pytest.fixture
def own_space(tmp_path):
    (tmp_path / "sums.py").write_text(SUMS)
    return write_space(tmp_path, f"{tmp_path}/sums.py:Sums", goals=OWN)


# Source of the values: docs/data.md, "Scoring"; `open_r1/gsm8k.py` of github.com/NVlabs/GDPO.
def test_rows_are_scored_as_the_scoring_of_the_space_says(tmp_path):
    row = {"question": "How many?", "answer": "Many.\n#### 1,000", "idx": 7}
    text = "<think>x</think>\n<answer>{}</answer>"
    texts = (text.format("1,000"), text.format("1000"), "<answer>²</answer>")
    file = write_lines(tmp_path, *({"row": row, "completion": text} for text in texts))
    space = write_space(tmp_path, "gsm8k", use_data("gsm8k.jsonl", "gsm8k"))
    found = [line["rewards"] for line in score_lines(tmp_path, space, "--completions", file)]
    assert found == [
        {"correctness": 0.0, "integer": 0.0, "format": 1.0},
        {"correctness": 1.0, "integer": 1.0, "format": 1.0},
        {"correctness": 0.0, "integer": 0.0, "format": 0.0},
    ]
    released = score_lines(tmp_path, space, "--completions", file, "--set", "scoring=released")
    assert list_rewards(released, "correctness") == [1.0, 0.0, 0.0]
    assert released[2]["rewards"]["integer"] == 1.0
    assert set(released[0]) == {"rewards", "metrics", "detail"}


def test_a_line_may_state_the_problem_itself(tmp_path):
    problem = {"prompt": "2+2", "answer": "4"}
    right = {**problem, "completion": "<think></think><answer>4.0</answer>"}
    file = write_lines(tmp_path, right, "", {**problem, "completion": ""})
    Path(file).write_bytes(b"\xef\xbb\xbf" + Path(file).read_bytes())
    space = write_space(tmp_path, "math")
    found = score_lines(tmp_path, space, "--completions", file)
    assert list_rewards(found, "correctness") == [1.0, 0.0]
    assert found[1]["metrics"]["mean_length"] == 1.0, "the end token"
    assert score_lines(tmp_path, space, "--completions", file, "-n", "1") == found[:1]


def test_a_wrong_form_of_all_lines_is_told_once(tmp_path):
    file = write_lines(tmp_path, *[{"prompt": "2+2", "completion": "4"}] * 300)
    message = refuse(write_space(tmp_path, "math"), "--completions", file)
    assert "300 problems in --completions, of which the first 20\n" in message
    assert message.count("fix:") == 20


def test_calls_may_be_stated(tmp_path):
    call = {"name": "pay", "parameters": {"sum": 7}}
    text = f"<think></think>\n<tool_call>\n{json.dumps(call)}\n</tool_call>"
    file = write_lines(tmp_path, {"prompt": "Pay 7.", "calls": [call], "completion": text})
    (line,) = score_lines(tmp_path, write_space(tmp_path, "tools"), "--completions", file)
    assert line["rewards"] == {"correctness": 3.0, "format": 1.0, "length": 0.0}
    assert line["metrics"]["exact"] == 1.0


@pytest.mark.integration
def test_programs_come_with_the_verdict_of_the_sandbox(tmp_path):
    asserts = {"prompt": "Double it.", "function": "f", "asserts": ["assert f(2) == 4"]}
    streams = {"prompt": "Double it.", "streams": [["2\n", "4\n"], ["3\n", "6\n"]]}
    programs = [
        (asserts, "def f(x): return 2 * x"),
        (asserts, "def f(x): return x"),
        (asserts, "def f(x): return x.upper()"),
        (asserts, "no program at all"),
        (streams, "print(2 * int(input()))"),
        (streams, "print(4)"),
    ]
    file = write_lines(tmp_path, *[{**task, "completion": text} for task, text in programs])
    weights = ("--set", "space.reward_weights={bug_free: [0, 1]}")
    space = write_space(tmp_path, "code")
    found = score_lines(tmp_path, space, "--completions", file, *weights)
    assert list_rewards(found, "correctness") == [1, 0, 0, 0, 1, 0]
    assert list_rewards(found, "bug_free") == [1, 1, 0, 0, 1, 1]
    details = [line["detail"] for line in found]
    assert details[0] == "passed (1 of 1 tests)"
    assert details[1].startswith("failed (0 of 1 tests)")
    assert details[2].startswith("error (0 of 1 tests)")
    assert "upper" in details[2]
    assert details[3] == "no program"
    assert details[5].startswith("failed (1 of 2 tests)")


def test_a_reward_that_goes_wrong_says_so_in_its_line(own_space, tmp_path, monkeypatch):
    monkeypatch.setattr(task_process, "PATIENCE", 1.5)
    problem = {"prompt": "1+2=", "answer": 3}
    texts = ("3", "three", "nan", "4")
    file = write_lines(tmp_path, *({**problem, "completion": text} for text in texts))
    found = score_lines(tmp_path, own_space, "--completions", file)
    assert list_rewards(found, "right") == [1.0, None, None, 0.0]
    assert "reward right raised: ValueError" in found[1]["detail"]
    assert "sums.py, line 6" in found[1]["detail"]
    assert found[2]["rewards"]["odd"] is None, "JSON has no NaN"
    assert "odd is nan, which ends a trial" in found[2]["detail"]
    assert found[3]["detail"] == ""
    # A row with its prompt needs no other rows of the task.
    file = write_lines(tmp_path, {"row": problem, "completion": "3"})
    found = score_lines(tmp_path, own_space, "--completions", file)
    assert list_rewards(found, "right") == [1.0]


CHAT = """
from gdpo_tune.tasks.custom import RewardFunctionTask
def right(prompts, completions, completion_ids, answer, **_):
    texts = [one[0]['content'] + '/' + prompt[-1]['content']
             for prompt, one in zip(prompts, completions)]
    return [float(text == right and len(ids) > 1)
            for text, right, ids in zip(texts, answer, completion_ids)]
class Chat(RewardFunctionTask):
    reward_funcs = [right]
"""


# Source: docs.trl.dev, "Using a custom reward function": messages in, messages out, and the tokens.
def test_an_own_task_gets_messages_and_tokens_as_in_trl(tmp_path):
    (tmp_path / "chat.py").write_text(CHAT)
    space = write_space(tmp_path, f"{tmp_path}/chat.py:Chat", goals=OWN)
    line = {"prompt": [{"role": "user", "content": "1+2"}], "answer": "3/1+2", "completion": "3"}
    file = write_lines(tmp_path, line, {**line, "completion": "4"})
    assert list_rewards(score_lines(tmp_path, space, "--completions", file), "right") == [1.0, 0.0]
    bad = write_lines(tmp_path, line, {**line, "prompt": "x", "completion": ""})
    message = refuse(space, "--completions", bad)
    assert re.search(r":2: .*unlike the first line", message)


# Source: agent-eval-harness#182: a judge on 0 to 10 with the range (0, 1).
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("[8.0]", r"right \(sums.py, line 5\) is 8 .*range \(0, 1\)"),
        ("[]", "returned 0 values for 1"),
    ],
)
def test_values_that_end_a_trial_are_refused_with_their_function(own_space, tmp_path, body, reason):
    values = "[1.0 if int(text) == sum else 0.0 for text, sum in zip(completions, answer)]"
    (tmp_path / "sums.py").write_text(SUMS.replace(values, body))
    file = write_lines(tmp_path, {"prompt": "1+2=", "answer": 3, "completion": "3"})
    assert re.search(reason, refuse(own_space, "--completions", file, error=TaskFileError))


# Source: a reference solution is right by definition; the rows left out are those of docs/data.md.
@pytest.mark.integration
@pytest.mark.parametrize(
    ("task", "name", "layout", "right", "left_out"),
    [
        ("gsm8k", "gsm8k.jsonl", "gsm8k", {1.0}, 0),
        ("math", "gsm8k.jsonl", "gsm8k", {1.0}, 0),
        ("math", "math.jsonl", "math", {1.0}, 0),
        ("tools", "toolrl.jsonl", "toolrl", {3.0}, 0),
        ("code", "mbpp.jsonl", "mbpp", {1.0}, 0),
        ("code", "mbpp_sanitized.jsonl", "mbpp_sanitized", {1.0}, 0),
        ("code", "humaneval.jsonl", "humaneval", {1.0}, 0),
        ("code", "apps.jsonl", "apps", {1.0}, 0),
        ("code", "code_contests.jsonl", "code_contests", {1.0}, 1),
    ],
)
def test_references_of_data_sets_are_right(tmp_path, task, name, layout, right, left_out):
    space = write_space(tmp_path, task, use_data(name, layout))
    found = score_lines(tmp_path, space, "--reference")
    assert len(found) == len((DATA / name).read_text().splitlines())
    scored = [line for line in found if not line["detail"].startswith("not scored: ")]
    assert len(found) - len(scored) == left_out
    assert {line["metrics"]["correctness"] for line in scored} == right
    assert {line["rewards"]["format"] for line in scored} == {1.0}


# Source: arXiv 2203.07814 (AlphaCode); `Language` in contest_problem.proto of
# github.com/google-deepmind/code_contests: 1 Python 2, 2 C++, 3 Python 3.
@pytest.mark.integration
def test_rows_without_a_python_solution_say_so(tmp_path):
    lines = (DATA / "code_contests.jsonl").read_text().splitlines()[:4]
    rows = [json.loads(line) for line in lines]
    rows[0]["solutions"] = {"language": [2, 1], "solution": ["int main() {}", "print 1"]}
    rows[1]["solutions"] = {"language": [2, 3], "solution": ["int main() {}", "print(0)"]}
    rows[2]["solutions"] = {"language": [], "solution": []}
    del rows[3]["solutions"]
    file = write_lines(tmp_path, *rows)
    space = write_space(tmp_path, "code", use_data(file, "code_contests"))
    found = score_lines(tmp_path, space, "--reference")
    assert list_rewards(found, "correctness") == [None, 0.0, None, None]
    assert found[0]["detail"] == "not scored: column solutions: no solution in Python 3"
    assert found[1]["completion"].endswith("<answer>print(0)</answer>")
    assert found[3]["detail"] == "not scored: column solutions: not a mapping but nothing"


def test_calls_of_a_list_are_written_as_a_completion(tmp_path):
    calls = [{"name": "pay", "arguments": {"sum": 7}}, {"name": "ask", "parameters": {}}]
    row = {"prompt": [{"role": "user", "content": "Pay 7."}]}
    file = write_lines(tmp_path, {**row, "reward_model": {"ground_truth": json.dumps(calls)}})
    space = write_space(tmp_path, "tools", use_data(file, "toolrl"))
    (line,) = score_lines(tmp_path, space, "--reference")
    assert line["rewards"] == {"correctness": 3.0, "format": 1.0, "length": 0.0}


@pytest.mark.integration
@pytest.mark.parametrize("task", ["code", "math", "tools"])
def test_references_of_written_problems_are_right(tmp_path, task):
    found = score_lines(tmp_path, str(SPACES / f"{task}.yaml"), "--reference", "-n", "6")
    assert len(found) == 6
    assert set(list_rewards(found, "correctness")) == {3.0 if task == "tools" else 1.0}
    assert set(list_rewards(found, "format")) == {1.0}


def test_samples_are_those_of_an_evaluation(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    # Trials get a GPU, and a few samples need none.
    settings = "resources: {gpus: 1}\ntraining: {validation_prompts: 8, samples_per_prompt: 1}\n"
    space = write_space(tmp_path, "math", settings)
    lines = score_lines(tmp_path, space, "--policy", "embedded_math", "-n", "8")
    config = load_spec(space).build_trial_config({}, 0, tmp_path)
    cache = build_worker_cache(config)
    evaluator = Evaluator(config, cache, choose_held_out_sampler(config))
    estimates = evaluator.evaluate(cache.take_policy(), "validation", 0)
    for name, estimate in estimates.items():
        values = [line["metrics"][name] for line in lines]
        assert sum(values) / len(values) == pytest.approx(estimate.mean), name
    assert all(line["completion"] for line in lines)


def test_an_adapter_samples_as_the_whole_policy_that_it_makes(tmp_path, monkeypatch):
    peft = pytest.importorskip("peft")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    model, tokenizer = load_policy("embedded_math")
    options = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    config = peft.LoraConfig(r=4, init_lora_weights=False, **options)
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    load_policy(str(tmp_path / "adapter"))[0].save_pretrained(tmp_path / "whole")
    tokenizer.save_pretrained(tmp_path / "whole")
    training = "training: {validation_prompts: 8, samples_per_prompt: 1}\n"
    words = [write_space(tmp_path, "math", training), "-n", "8", "--policy"]
    adapter, whole, base = (
        [line["completion"] for line in score_lines(tmp_path, *words, str(name))]
        for name in (tmp_path / "adapter", tmp_path / "whole", "embedded_math")
    )
    assert adapter == whole != base


BESIDE = "beside completion stands row alone"
BAD_LINES = [
    ('{"completion": ', "not JSON"),
    ("[1]", "not a mapping but list"),
    ({"prompt": "x", "answer": "1"}, "completion: missing, or not a text"),
    ({"prompt": "x", "answer": "1", "completion": 3}, "completion"),
    ({"completion": "x"}, f"row: {BESIDE}, or prompt"),
    ({"completion": "x", "answer": "1"}, "prompt: missing; if it has another name"),
    ({"completion": "x", "row": {}, "prompt": "x"}, f"row, prompt: {BESIDE}, or prompt"),
    ({"completion": "x", "row": {"question": "q"}}, "answer: not a text but nothing"),
    ({"completion": "x", "row": {"question": "q", "answer": "18"}}, "answer = '18': no '####'"),
    ({"completion": "x", "row": [], "answer": "1"}, f"row, answer: {BESIDE}"),
    ({"completion": "x", "row": "q"}, "row = 'q': not a mapping but str"),
    ({"completion": "x", "prompt": "", "answer": "1"}, "prompt = '': empty"),
    ({"completion": "x", "prompt": "x", "answr": "1"}, "answr = '1': no column that the task"),
    ({"completion": "x", "prompt": "x"}, "answer: not a text but nothing"),
    ({"completion": "\ud800", "prompt": "x", "answer": "1"}, "not a text that a tokenizer reads"),
]


def test_all_lines_that_cannot_be_read_are_named_together(tmp_path):
    file = write_lines(tmp_path, *[line for line, _ in BAD_LINES])
    space = write_space(tmp_path, "gsm8k", use_data("gsm8k.jsonl", "gsm8k"))
    found = refuse(space, "--completions", file).split(f"{file}:")[1:]
    for number, (text, (_, reason)) in enumerate(zip(found, BAD_LINES, strict=True), 1):
        assert text.startswith(f"{number}: ")
        assert reason in text
        assert 'fix: write {"completion": "...", "prompt": "...", "answer": ...' in text


def test_a_row_has_the_columns_of_the_file(tmp_path):
    """As `data.columns` names them: a row in the names of the layout lacks them."""
    data = "data: {source: rows.jsonl, layout: question_answer, columns: {answer: Final}}\n"
    space = write_space(tmp_path, "math", data)
    line = {"completion": "<answer>18</answer>", "row": {"question": "q", "Final": "18"}}
    (scored,) = score_lines(tmp_path, space, "--completions", write_lines(tmp_path, line))
    assert scored["metrics"]["correctness"] == 1
    line["row"] = {"question": "q", "answer": "18"}
    message = refuse(space, "--completions", write_lines(tmp_path, line))
    assert "Final: this column of the data is missing; row has" in message


@pytest.mark.parametrize(
    ("task", "line", "reason"),
    [
        ("code", {"prompt": "x"}, "needs asserts, or streams"),
        ("code", {"prompt": "x", "asserts": ["f(1)"]}, "asserts"),
        ("code", {"prompt": "x", "streams": [["1"]]}, "not pairs of input and expected output"),
        ("code", {"prompt": "x", "streams": [["1", 2]]}, "streams"),
        ("code", {"prompt": "x", "streams": [["1", ""]]}, "passes this test"),
        ("tools", {"prompt": "x", "calls": [{"name": "f"}]}, "an object of parameters"),
        ("tools", {"prompt": "x"}, "calls: not a list but nothing"),
        ("math", {"prompt": "x"}, "answer: not a text but nothing"),
        ("gsm8k", {"prompt": "x", "answer": "1", "written_answer": 1}, "written_answer = 1: not a"),
        ("math", {"row": {"question": "q", "answer": "#### 1"}}, "no data.layout"),
    ],
)
def test_a_stated_problem_is_checked(tmp_path, task, line, reason):
    file = write_lines(tmp_path, {"completion": "x", **line})
    assert reason in refuse(write_space(tmp_path, task), "--completions", file)


def test_lines_of_an_own_task_have_the_same_columns(own_space, tmp_path):
    line = {"completion": "3", "prompt": "1+2=", "answer": 3}
    file = write_lines(tmp_path, line, {**line, "more": 1})
    message = refuse(own_space, "--completions", file)
    assert re.search(r":2: .*unlike the first line, which has a text, answer", message)


@pytest.mark.parametrize(
    ("words", "error", "reason"),
    [
        ("--completions nowhere.jsonl", UsageError, "cannot be read: No such file"),
        ("--completions empty.jsonl", UsageError, "it has no line"),
        ("--completions rows.jsonl --json no/out.jsonl", UsageError, "its directory is"),
        ("--completions rows.jsonl --json .", UsageError, "it is a directory"),
        ("--completions rows.jsonl --set policy=nobody/nothing", PolicyError,
         "not on this machine.*\n.*--set policy=embedded"),
        ("--policy nowhere", PolicyError, "policy 'nowhere': no such directory"),
        ("--reference --set task=nowhere.py:Task", SpecError, "there is no file"),
        ("--reference --set data={source:\\ none.jsonl,layout:\\ gsm8k}", SpecError,
         "data.source = none.jsonl: no such file"),
        ("--reference --set data={source:\\ empty.jsonl,layout:\\ gsm8k}", DataError,
         "data.source = empty.jsonl holds no row"),
        ("--reference --set data={source:\\ DATA/mbpp.jsonl,layout:\\ gsm8k}", DataError,
         "no column question"),
    ],
)  # fmt: skip
def test_a_request_that_cannot_be_read_ends_with_status_2(
    tmp_path, monkeypatch, words, error, reason
):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path, {"prompt": "x", "answer": "1", "completion": "x"})
    (tmp_path / "empty.jsonl").write_text("\n")
    words = words.replace("DATA", str(DATA))
    message = refuse(write_space(tmp_path, "math"), *shlex.split(words), error=error)
    assert re.search(reason, message)


def test_a_task_without_solutions_has_no_references(own_space):
    message = refuse(own_space, "--reference")
    assert re.search(r"states no solutions.*\n.*--completions FILE", message)


def test_the_table_shows_values_and_means(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    texts = ("<think></think><answer>4</answer>", "word " * 100)
    lines = ({"prompt": "2+2", "answer": "4", "completion": text} for text in texts)
    words = [write_space(tmp_path, "math"), "--completions", write_lines(tmp_path, *lines)]
    assert len(score_lines(tmp_path, *words)) == 2
    printed = capsys.readouterr().out
    assert "<think></think><answer>4</answer>" in printed
    assert "…" in printed
    assert "mean of 2" in printed
    assert "0.500" in printed
    assert "1 text longer than training.max_completion_length = 64" in printed


def test_a_long_table_shows_the_worst(capsys):
    texts = [
        score.ScoredText(
            *(row, None, f"text{row}."),
            rewards={"right": None if row == 90 else float(row < 60)},
            metrics={"right": 1.0},
        )
        for row in range(95)
    ]
    score.print_scores(texts)
    printed = capsys.readouterr().out
    assert all(f"text{row}." in printed for row in (60, 90, 94, 0))
    assert "text59." not in printed
    assert "40 of 95 texts, those with the least right; --json has all" in printed
    assert "metric" in printed, "its values differ from those of the reward"
