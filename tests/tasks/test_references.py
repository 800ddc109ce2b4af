"""Reference solutions of a data set, scored before a sweep."""

import json
import re

import pytest

from gdpo_tune import cli, sweep
from gdpo_tune.core.errors import DataError
from gdpo_tune.core.settings import DataSettings, SandboxSettings, TrainingSettings
from gdpo_tune.policies.prompt_choice import load_local_tokenizer, read_back
from gdpo_tune.spec import load_spec
from gdpo_tune.tasks import dataset
from gdpo_tune.tasks.code import CodeTask
from gdpo_tune.tasks.math import MathTask
from gdpo_tune.tasks.references import check_references, read_references


@pytest.fixture(autouse=True)
def fresh_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    dataset.collect_once.cache_clear()


def write_problems(file, answers):
    """Write rows of MATH whose solutions end in 1, 2, 3, ...; `answers` are their answers."""
    rows = [
        {"problem": f"Find {n}.", "solution": rf"So \boxed{{{n}}}.", "answer": answer}
        for n, answer in enumerate(answers, 1)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataSettings(source=str(file), layout="math")


def check(data, task=None):
    dataset.collect_once.cache_clear()
    return check_references(
        data, SandboxSettings(), task or MathTask(TrainingSettings(), data=data)
    )


def test_every_row_has_a_reference_or_a_reason(tmp_path):
    data = write_problems(tmp_path / "rows.jsonl", ["1", "", 3])
    found = list(read_references(data))
    assert [one.place.rpartition(":")[2] for one in found] == ["1", "2", "3"]
    assert [one.problem.data["answer"] for one in found] == ["1", "2", "3"]
    assert not any(one.reason for one in found)


def test_a_wrong_answer_column_is_refused_with_its_lines(tmp_path):
    data = write_problems(tmp_path / "rows.jsonl", range(100, 150))  # such as a number of the row
    with pytest.raises(DataError, match=r"of 50 reference solutions, 0 earn full correctness") as e:
        check(data)
    assert "rows.jsonl:1: correctness is 0.0" in str(e.value)
    assert "and 45 more\n    fix: write the layout and columns" in str(e.value)


def test_what_a_tokenizer_loses_counts(tmp_path):
    """Source: transformers#45488, where blanks were lost."""
    data = write_problems(tmp_path / "rows.jsonl", range(1, 51))
    seen = []

    def lose(texts):
        _, written = read_back("embedded", "", [text.replace("So", "So ☃") for text in texts])
        seen.extend(written)
        return [text.replace("1", "") for text in written]

    dataset.collect_once.cache_clear()
    found = check_references(data, SandboxSettings(), MathTask(TrainingSettings(), data=data), lose)
    assert found.right == sum("1" not in str(n) for n in range(1, 51))
    assert seen[0].startswith("<think>So ☃ ")
    (tokens,), (text,) = read_back("embedded", "", ["ab<eos>c"])
    end = load_local_tokenizer("embedded").eos_token_id
    assert (text, tokens[-1], tokens.count(end)) == ("ab", end, 1)


def test_a_share_of_wrong_answers_is_told(tmp_path):
    found = check(write_problems(tmp_path / "rows.jsonl", [*range(1, 50), 0]))
    assert (found.right, found.count, found.share) == (49, 50, 0.98)
    assert str(found).startswith("49 of 50 earn full correctness; the first that does not: ")
    assert "rows.jsonl:50" in str(found)
    assert str(found).endswith("<answer>50</answer>; the data's answer is 0")
    found = check(write_problems(tmp_path / "rows.jsonl", [*range(1, 46), 0, 0, 0, 0, 0]))
    assert str(found) == "45 of 50 earn full correctness"  # the warning lists them


def test_the_first_reward_is_cached_by_content(tmp_path, monkeypatch):
    data = write_problems(tmp_path / "rows.jsonl", range(1, 51))
    task = MathTask(TrainingSettings(), data=data)
    score, calls = task.score, []

    def count(*arguments):
        calls.append(1)
        return score(*arguments)

    monkeypatch.setattr(task, "score", count)
    assert check(data, task).right == check(data, task).right == 50
    assert len(calls) == 1
    write_problems(tmp_path / "rows.jsonl", [*range(1, 50), 0])
    assert check(data, task).right == 49
    assert len(calls) == 2


def test_a_large_data_set_is_sampled_from_end_to_end(tmp_path):
    data = write_problems(tmp_path / "rows.jsonl", [*range(1, 601), *[0] * 400])
    found = check(data)
    assert found.count == 200
    assert 0.5 < found.share < 0.7


def test_a_fault_of_every_third_row_is_not_taken_for_the_whole(tmp_path):
    answers = [n if n % 3 else 0 for n in range(1, 601)]  # 200 drawn: every third would be one kind
    assert 0.55 < check(write_problems(tmp_path / "rows.jsonl", answers)).share < 0.78


def test_a_broken_grader_of_programs_is_found(tmp_path):
    """A reference of MBPP that does not pass its own test, beside one that does."""
    file = tmp_path / "rows.jsonl"
    code = "def f(x):\n    return x + 1"
    tests = {"Add one.": "assert f(1) == 2", "Add two.": "assert f(1) == 3"}
    rows = [{"text": text, "code": code, "test_list": [test]} for text, test in tests.items()]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataSettings(source=str(file), layout="mbpp")
    with CodeTask(TrainingSettings(), data=data) as task:
        found = check(data, task)
    assert (found.right, found.count) == (1, 2)
    assert found.wrong[0][1].startswith("failed (0 of 1 tests)")


SWEEP = """
task: math
data: {{source: {}, layout: {}}}
space: {{reward_weights: {{correctness: 1, length: [0, 1]}}}}
objectives: {{correctness: {{direction: maximize, reference: 0}}}}
"""


def test_a_sweep_warns_with_the_lines(tmp_path, capsys):
    data = write_problems(tmp_path / "rows.jsonl", [*range(1, 541), *[0] * 60])
    (tmp_path / "sweep.yaml").write_text(SWEEP.format(data.source, "math"))
    spec = load_spec(tmp_path / "sweep.yaml")
    with MathTask(spec.training, data=spec.data) as task:
        found = cli.check_scoring(spec, task)
    told = re.match(r"1[789]\d of 200 earn full correctness", found["references"])
    error = capsys.readouterr().err
    assert told
    assert f"warning: references: {told[0]}" in error
    assert re.search(r"rows.jsonl:5[4-9]\d: correctness is 0.0", error)


def test_a_sweep_names_its_file_and_the_missing_column(tmp_path, capsys):
    """A dry run once ended in a traceback, for the error of columns could not be made again."""
    rows, file = tmp_path / "rows.jsonl", tmp_path / "sweep.yaml"
    rows.write_text(json.dumps({"Frage": "1+1?", "answer": "2"}) + "\n")
    file.write_text(SWEEP.format(rows, "question_answer"))
    with pytest.raises(SystemExit) as stop:
        cli.run_command(sweep.main, [str(file), "--dry-run"])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert "sweep.yaml: " in said
    assert "rows.jsonl:1: no column question" in said
