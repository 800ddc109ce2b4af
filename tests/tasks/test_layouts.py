"""Each layout maps a row to a problem, or says which column is to blame."""

import json
from dataclasses import replace

import pytest

from gdpo_tune.core import registry
from gdpo_tune.core.settings import DataSettings
from gdpo_tune.sandbox import Job, Limits
from gdpo_tune.tasks import data_rows
from gdpo_tune.tasks.columns import RowError
from gdpo_tune.tasks.data_rows import convert_row, name_columns
from gdpo_tune.tasks.dataset import collect_data
from gdpo_tune.tasks.execution import TOLERANCE, build_code_problem, build_program_job
from gdpo_tune.tasks.tool_rewards import HIGHEST, agreement, tool_format
from tests.support.data import DIRECTORY, read_rows, score_one
from tests.support.tables import read_table
from tests.tasks.data_files import list_problems, settings_of, write_lines

CODE = ("mbpp", "mbpp_sanitized", "humaneval", "apps", "code_contests")


TABLE = read_table("layouts")
BROKEN = [(layout, *row) for layout, rows in TABLE["broken"].items() for row in rows]


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


@pytest.mark.parametrize("case", TABLE["rows"].values(), ids=TABLE["rows"])
def test_a_row_becomes_its_problem_and_its_reference(case, tmp_path):
    file = write_lines(tmp_path / "a.jsonl", [case["row"]])
    settings = settings_of(file, case["layout"], **case.get("settings", {}))
    [problem] = list_problems(collect_data(settings))
    assert (problem.prompt, problem.data) == (case["prompt"], case["data"])
    assert list(problem.turns) == case.get("turns", [])
    info = registry.describe_layout(case["layout"])
    [(_, row)] = data_rows.read_rows(settings, info)
    assert info.write_reference(row) == case["reference"]


def test_math_takes_the_last_box_or_the_column():
    answers = [problem.data["answer"] for problem in usable("math")]
    assert answers == [
        *("14", r"\frac{9}{2}", "19", "6", r"\{0,2,4,6,8\}", "120", "3.5", "1{,}000", "-3", "6")
    ]


def test_the_ground_truth_of_toolrl_earns_everything():
    for row, problem in zip(read_rows("toolrl"), usable("toolrl"), strict=True):
        truth = row["reward_model"]["ground_truth"]
        assert score_one(tool_format, truth, **problem.data) == 1
        if problem.data["calls"]:
            assert score_one(agreement, truth, **problem.data) == HIGHEST
        assert problem.prompt.startswith("You may call these tools.\nName: lamp")
        assert row["prompt"][1]["content"] in problem.prompt


@pytest.mark.parametrize("truth", TABLE["toolrl"])
def test_toolrl_calls_in_other_writings(truth):
    change = {"reward_model": {"ground_truth": truth}, "tools": '[{"name": "a"}]'}
    row = {**read_rows("toolrl")[0], **change}
    problem = mapped("toolrl", row)
    assert problem.data == {"calls": [{"name": "a", "parameters": {"x": 1}}], "response": False}
    assert problem.prompt.startswith('Tools:\n{"name": "a"}\n\nYou may')


@pytest.mark.parametrize(("layout", "change", "reason"), BROKEN)
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
    # Source: docs/data.md.
    assert [stream[0] for stream in problem.data["streams"]] == [str(i) for i in range(20)]


def test_the_files_are_where_the_tests_look():
    assert {file.stem for file in DIRECTORY.glob("*.jsonl")} == set(registry.LAYOUTS)


def test_demonstrations_of_toolrl_are_read_as_its_rows():
    for row, problem in zip(read_rows("rlla_sft"), usable("rlla_sft"), strict=True):
        assert problem.prompt == f"{row['instruction']}\n\n{row['input']}\n"
        assert score_one(agreement, row["output"], **problem.data) == HIGHEST
