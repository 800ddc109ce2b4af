"""Each layout maps a row to a problem, or says which column is to blame."""

import json
from dataclasses import replace

import pytest

from gdpo_tune.core import registry
from gdpo_tune.core.settings import DataSettings
from gdpo_tune.sandbox import Job, Limits
from gdpo_tune.tasks import layouts
from gdpo_tune.tasks.columns import RowError
from gdpo_tune.tasks.data_rows import convert_row, name_columns
from gdpo_tune.tasks.execution import MOST_TESTS, TOLERANCE, build_code_problem, build_program_job
from gdpo_tune.tasks.tool_rewards import HIGHEST, agreement, tool_format
from tests.support.data import DIRECTORY, read_rows, score_one

CODE = ("mbpp", "mbpp_sanitized", "humaneval", "apps", "code_contests")


def mapped(layout, row):
    info = registry.describe_layout(layout)
    return convert_row(info, name_columns(DataSettings(), row, info))


def usable(layout):
    problems = []
    for row in read_rows(layout):
        try:
            problems.append(mapped(layout, row))
        except RowError:
            continue
    return problems


@pytest.mark.parametrize("layout", registry.LAYOUTS)
def test_every_layout_has_a_file_that_it_maps_to_json(layout):
    info = registry.describe_layout(layout)
    first = read_rows(layout)[0]
    assert set(info.columns) <= set(first)
    problems = usable(layout)
    assert len(problems) >= len(read_rows(layout)) - 1
    assert len({problem.prompt for problem in problems}) == len(problems)
    for problem in problems:
        assert problem.prompt.endswith("\n")
        assert json.loads(json.dumps(problem.data)) == problem.data
    assert {tuple(problem.data) for problem in problems} == {tuple(problems[0].data)}
    assert set(info.tasks) <= set(registry.TASKS)


@pytest.mark.parametrize("layout", registry.LAYOUTS)
def test_every_required_column_is_needed(layout):
    row = read_rows(layout)[0]
    for column in registry.describe_layout(layout).columns:
        with pytest.raises(RowError):
            mapped(layout, {**row, column: None} if layout != "code_contests" else {})


def test_gsm8k_answers_are_written_plainly():
    answers = [problem.data["answer"] for problem in usable("gsm8k")]
    assert answers[:5] == ["15", "60", "1250", "26", "-5"]
    assert (answers[8], answers[9], answers[14]) == ("6", "31", "44")


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("x #### 1 #### 1,234,567", "1234567"),
        ("#### - 7", "-7"),
        ("#### 1 000", "1000"),
        ("#### $ 3.50", "3.5"),
        ("#### 0.25.", "0.25"),
    ],
)
def test_gsm8k_numbers_in_other_hands(answer, gold):
    data = mapped("gsm8k", {"question": "q", "answer": answer}).data
    written = answer.rpartition("####")[2].strip()
    assert data == {"answer": gold, "written_answer": written}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("18", "no '####'"),
        ("#### many", "'many'"),
        ("####", "''"),
        ("#### ²", "not a number"),
        ("#### 3,5", "'3,5' after '####' is not a number"),
    ],
)
def test_gsm8k_answers_that_cannot_be_parsed(answer, reason):
    with pytest.raises(RowError, match="column answer") as caught:
        mapped("gsm8k", {"question": "q", "answer": answer})
    assert reason in str(caught.value)


def test_tests_of_a_program_are_no_answer_of_mathematics():
    # Source: verl#2199, AReaL#105: rows of code among those of Eurus-2-RL-Data.
    for truth in ('{"inputs": ["1\\n"], "outputs": ["2\\n"]}', ' {"fn_name": "f", "inputs": []}'):
        with pytest.raises(RowError, match="column reward_model: tests or a table in JSON"):
            mapped("verl", {"prompt": "Write f.", "reward_model": {"ground_truth": truth}})
    row = {"prompt": "Which set?", "reward_model": {"ground_truth": "{1, 2}"}}
    assert mapped("verl", row).data == {"answer": "{1, 2}"}


def test_a_list_in_the_answer_of_svamp_stays_a_list():
    row = {"Body": "Ann has 5 shells.", "Question": "Which?"}
    for written, gold in (("1,2", "1,2"), ("1,200", "1200"), (5.0, "5")):
        assert mapped("svamp", {**row, "Answer": written}).data == {"answer": gold}


@pytest.mark.parametrize(
    ("layout", "row", "thought"),
    [
        ("svamp", {"Body": "b", "Question": "q", "Answer": 145.0}, ""),
        (
            "svamp",
            {"Body": "b", "Question": "q", "Answer": 145.0, "Equation": "( 290.0 / 2.0 )"},
            "290 / 2 = 145",
        ),
        (
            "svamp",
            {"Body": "b", "Question": "q", "Answer": 2.5, "Equation": "( 7.5 - ( 3.0 + 2.0 ) )"},
            "7.5 - ( 3 + 2 ) = 2.5",
        ),
        (
            "asdiv",
            {"body": "b", "question": "q", "answer": "9 (apples)", "formula": "7+2=9"},
            "7+2=9",
        ),
    ],
)
def test_the_equation_of_a_row_is_the_thought_of_its_reference(layout, row, thought):
    """Columns as `ChilleD/SVAMP` on the Hub and ASDiv's release have them."""
    answer = mapped(layout, row).data["answer"]
    reference = registry.describe_layout(layout).write_reference(row)
    assert reference == f"<think>{thought}</think>\n<answer>{answer}</answer>"


def test_math_takes_the_last_box_or_the_column():
    answers = [problem.data["answer"] for problem in usable("math")]
    assert answers == [
        *("14", r"\frac{9}{2}", "19", "6", r"\{0,2,4,6,8\}", "120", "3.5", "1{,}000", "-3", "6")
    ]
    row = {**read_rows("math")[0], "answer": " 15 "}
    assert mapped("math", row).data == {"answer": "15"}
    assert layouts.extract_box(r"\boxed{\frac{1}{2}") == ""
    with pytest.raises(RowError, match=r"boxed"):
        mapped("math", {"problem": "p", "solution": "It is 4."})


def test_the_ground_truth_of_toolrl_earns_everything():
    for row, problem in zip(read_rows("toolrl"), usable("toolrl"), strict=True):
        truth = row["reward_model"]["ground_truth"]
        assert score_one(tool_format, truth, **problem.data) == 1
        if problem.data["calls"]:
            assert score_one(agreement, truth, **problem.data) == HIGHEST
        assert problem.prompt.startswith("You may call these tools.\nName: lamp")
        assert row["prompt"][1]["content"] in problem.prompt


@pytest.mark.parametrize(
    "truth",
    [
        [{"name": "a", "arguments": {"x": 1}}],
        '[{"name": "a", "arguments": "{\\"x\\": 1}"}]',
        '<tool_call>\n{"name": "a", "parameters": {"x": 1}}\n\n</tool_call>',
    ],
)
def test_toolrl_calls_in_other_writings(truth):
    change = {"reward_model": {"ground_truth": truth}, "tools": '[{"name": "a"}]'}
    row = {**read_rows("toolrl")[0], **change}
    problem = mapped("toolrl", row)
    assert problem.data == {"calls": [{"name": "a", "parameters": {"x": 1}}], "response": False}
    assert problem.prompt.startswith('Tools:\n{"name": "a"}\n\nYou may')


BROKEN = {
    "toolrl": [
        ({"prompt": "words"}, "prompt: not a list but str"),
        ({"prompt": []}, "prompt: no message"),
        ({"prompt": ["hello"]}, "prompt[0]: not a mapping but str"),
        ({"prompt": [{"role": "user", "content": " "}]}, "content: empty"),
        ({"reward_model": "x"}, "reward_model: not a mapping but str"),
        ({"reward_model": {"ground_truth": "<think>a</think>"}}, "neither a tool call nor"),
        ({"reward_model": {"ground_truth": "<tool_call>\n{\n</tool_call>"}}, "not JSON"),
        ({"reward_model": {"ground_truth": [{"name": "a"}]}}, "a name and an object"),
        ({"reward_model": {"ground_truth": None}}, "not a list but nothing"),
        ({"tools": "{"}, "tools: not JSON"),
    ],
    "mbpp": [
        ({"test_list": []}, "test_list: no test"),
        ({"test_list": "assert f(1)"}, "test_list: not a list but str"),
        ({"test_list": [3]}, "test_list: not a list of texts"),
        ({"test_list": ["assert double("]}, "test_list: the test is not Python"),
        ({"test_list": ["double(2)"]}, "nothing in this test can fail"),
        ({"test_list": ["assert triple(1) == 3"]}, "calls nothing that the code defines"),
        ({"code": "def double(x:"}, "code: not Python"),
        ({"test_setup_code": "import ("}, "test_setup_code: not Python"),
        ({"text": " "}, "text: empty"),
    ],
    "humaneval": [
        ({"entry_point": "other"}, "is no function that the prompt begins"),
        ({"test": "assert True"}, "does not define check"),
        ({"test": "def check(candidate): pass"}, "nothing in this test can fail"),
    ],
    "apps": [
        ({"input_output": ""}, "empty"),
        ({"input_output": "{"}, "not JSON"),
        ({"input_output": "[]"}, "not a mapping but list"),
        ({"input_output": "{}"}, "not a list but nothing"),
        ({"input_output": '{"inputs": [], "outputs": []}'}, "0 inputs and 0 outputs"),
        ({"input_output": '{"inputs": ["1"], "outputs": []}'}, "1 inputs and 0 outputs"),
        (
            {"input_output": '{"inputs": ["1"], "outputs": ["1"], "fn_name": "a b"}'},
            "not a function name",
        ),
        ({"input_output": '{"inputs": [1], "outputs": [1], "fn_name": "f"}'}, "not a list but int"),
        ({"input_output": '{"inputs": [1], "outputs": ["1"]}'}, "not a list but int"),
        ({"input_output": '{"inputs": ["1"], "outputs": ["\\n"]}'}, "prints nothing passes"),
    ],
    "code_contests": [
        ({"input_file": "in.txt"}, "would read a file"),
        ({"description": "see <image>"}, "shows a picture"),
        ({"public_tests": None, "private_tests": None}, "no test"),
        ({"private_tests": {"input": ["1"], "output": []}}, "1 inputs and 0 outputs"),
        ({"private_tests": {"input": ["1"], "output": [" \n"]}}, "prints nothing passes"),
        ({"private_tests": {"input": ["\udc80"], "output": ["1"]}}, "surrogates not allowed"),
    ],
}
"""Layout -> changes of its first row, and what is said of them."""


@pytest.mark.parametrize(
    ("layout", "change", "reason"),
    [(layout, *row) for layout, rows in BROKEN.items() for row in rows],
)
def test_broken_rows(layout, change, reason):
    with pytest.raises(RowError) as caught:
        mapped(layout, {**read_rows(layout)[0], **change})
    assert reason in str(caught.value)


def test_mbpp_shows_one_test_and_runs_all():
    first, *_ = problems = usable("mbpp")
    assert first.prompt.endswith("must pass this test:\nassert double(2) == 4\n")
    assert "double(-3)" not in first.prompt
    assert (first.data["function"], len(first.data["asserts"])) == ("double", 3)
    assert problems[4].data["asserts"][0].startswith("import math\nassert hyp")
    assert usable("mbpp_sanitized")[4].data == problems[4].data
    assert problems[3].data["function"] == "common"


def test_apps_has_programs_functions_and_methods():
    program, _, mean, lines, total, *_ = problems = usable("apps")
    assert program.data["streams"] == [["1\n2\n", "3\n", 0.0], ["-5\n5\n", "0\n", 0.0]]
    assert program.family == "introductory"
    assert "standard input" in program.prompt
    assert [tolerance for *_, tolerance in mean.data["streams"]] == [TOLERANCE] * 2
    assert lines.data["streams"] == [["a\nb\nc", "3", 0.0]]
    assert total.data["function"] == "total"
    assert total.prompt.endswith("Write a function total.\n")
    assert problems[7].data["tail"].endswith("longer = Solution().longer")
    assert "def longer(self" in problems[7].prompt


@pytest.mark.parametrize("layout", CODE)
def test_every_code_problem_is_a_job_that_the_sandbox_takes(layout):
    limits = Limits(cpu_seconds=2.5)
    for problem in usable(layout):
        job = build_program_job(problem, "pass", limits)
        assert isinstance(job, Job)
        assert "pass" in job.code.splitlines()
        assert (
            replace(job.limits, test_cpu_seconds=86_400.0) == limits or job.limits.cpu_seconds > 2.5
        )


def test_the_first_tests_are_kept():
    problem = build_code_problem("p", "f", streams=[(str(i), str(i)) for i in range(100)])
    assert [stream[0] for stream in problem.data["streams"]] == [str(i) for i in range(MOST_TESTS)]


def test_the_files_are_where_the_tests_look():
    assert {file.stem for file in DIRECTORY.glob("*.jsonl")} == set(registry.LAYOUTS)


def test_demonstrations_of_toolrl_are_read_as_its_rows():
    for row, problem in zip(read_rows("rlla_sft"), usable("rlla_sft"), strict=True):
        assert problem.prompt == f"{row['instruction']}\n\n{row['input']}\n"
        assert score_one(agreement, row["output"], **problem.data) == HIGHEST


def test_asdiv_loses_the_unit_and_olympiadbench_keeps_its_tolerance():
    row = {"body": "b", "question": "q", "answer": "5:45 (P.M.)"}
    assert mapped("asdiv", row).data == {"answer": "5:45"}
    assert mapped("question_answer", {"question": "q", "answer": "f (x)"}).data["answer"] == "f (x)"
    row = {**read_rows("olympiadbench")[0], "error": "1e-2"}
    assert mapped("olympiadbench", row).data == {"answer": "0", "tolerance": 0.01}
