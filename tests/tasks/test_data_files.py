"""Data files as people have them: formats, directories, splits, columns and conversations."""

import gzip
import json
import os

import pytest

from gdpo_tune.core.content import measure_content
from gdpo_tune.core.errors import DataError, UsageError
from gdpo_tune.core.registry import describe_layout
from gdpo_tune.core.settings import DataSettings, HeldOutData, TrainingSettings
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.tasks.data_rows import read_rows
from gdpo_tune.tasks.dataset import check_data, describe_data, propose_layout
from gdpo_tune.tasks.generation import choose_row_split, normalize_prompt
from tests.support.tables import read_table
from tests.tasks.data_files import (
    collect,
    list_problems,
    questions,
    settings_of,
    write_lines,
    write_parquet,
)

TABLE = read_table("data_files")


def list_questions(collected, split="train"):
    return {problem.prompt.strip() for problem in collected.splits[split]}


# Formats ------------------------------------------------------------------------------------------


NAMES = "a.jsonl a.JSONL a.jsonl.gz blank.jsonl a.json a.json.gz lines.json a.csv a.Parquet"


@pytest.mark.parametrize("name", NAMES.split())
def test_every_usual_file_gives_the_same_problems(name, tmp_path):
    """`load_dataset` reads these suffixes in either case; a .json is a list or lines."""
    rows, file = questions(12), tmp_path / name
    if name.startswith("a.json") and "jsonl" not in name.lower():
        text = ("\ufeff" + json.dumps(rows, indent=1)).encode()
        file.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    elif name.endswith(".csv"):
        body = "".join(f'"{r["question"]}","{r["answer"]}"\r\n' for r in rows)
        file.write_bytes(b"\xef\xbb\xbfquestion,answer\r\n" + body.encode())
    elif name.endswith("Parquet"):
        write_parquet(file, rows)
    elif name == "blank.jsonl":
        file.write_text("\ufeff" + "\n\n".join(map(json.dumps, rows)), encoding="utf-8")
    else:
        write_lines(file, rows)
    expected = collect(write_lines(tmp_path / "other" / "rows.jsonl", rows)).splits
    assert collect(file).splits == expected
    assert DataSettings(source=f"some/{name}").is_local


@pytest.mark.parametrize("name", [".rows.jsonl", "__rows.jsonl"])
def test_a_hidden_file_is_read_if_it_is_named(name, tmp_path):
    file = write_lines(tmp_path / name, questions(3))
    assert collect(file).rows == 3
    assert DataSettings(source=f"some/{name}").is_local


def test_values_arrive_as_they_are_in_the_file(tmp_path):
    """The reader of `datasets` makes times, numbers and None of these, or fails on two types."""
    values = ["2021-01-01", "007", 7, 7.5, [], ["a"], True, "None", "a\u2028b"]
    rows = [{"question": "q", "answer": value} for value in values]
    file = write_lines(tmp_path / "a.jsonl", [*rows, {"question": "q"}])
    settings, layout = DataSettings(source=str(file)), describe_layout("question_answer")
    read = list(read_rows(settings, layout))
    assert [row.get("answer", "missing") for _, row in read] == [*values, "missing"]
    assert read[-1][0] == f"{file}:10"
    table = tmp_path / "a.csv"
    table.write_text('question,answer\n\n"a\nb",007\nc,NA\n')
    assert list(read_rows(DataSettings(source=str(table)), layout)) == [
        (f"{table}:4", {"question": "a\nb", "answer": "007"}),
        (f"{table}:5", {"question": "c", "answer": "NA"}),
    ]


PACKED = gzip.compress(json.dumps(questions(99)[9]).encode(), mtime=0)
BYTES = [
    ("a.jsonl", '{"question": "q"}'.encode("utf-16"), "a.jsonl: it is UTF-16"),
    ("a.csv", "question,answer\n".encode("utf-16"), "a.csv: it is UTF-16"),
    ("a.csv", b"question,answer\na,\xff\n", r"a.csv:\d: not CSV in UTF-8"),
    ("a.jsonl.gz", PACKED[:-9], "gz cannot be read: Compressed fi"),
    ("a.jsonl", b"[" * 10**5, "jsonl:1: not JSON"),
]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [*((name, text.encode(), said) for name, text, said in TABLE["broken"]), *BYTES],
)
def test_a_broken_file_is_named_with_its_line(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        collect(tmp_path / name)


# Directories and splits ---------------------------------------------------------------------------


@pytest.mark.parametrize(("train", "test"), TABLE["splits"])
def test_a_directory_gives_the_files_of_the_split(train, test, tmp_path):
    for name, rows in ((train, questions(40)), (test, questions(50, 40))):
        (write_parquet if "parquet" in name else write_lines)(tmp_path / name, rows)
    for litter in ("._train.jsonl", ".git/train.jsonl"):
        write_lines(tmp_path / litter, [{"no": "data"}])
    (tmp_path / "LICENSE.txt").write_text("MIT")
    assert collect(tmp_path).rows == 40
    assert collect(tmp_path, split="test").rows == 10
    assert collect(tmp_path, split="train+test").rows == 50
    own = collect(tmp_path, test=HeldOutData(split="test"))
    assert list_questions(own, "test") == {f"No. {i}?" for i in range(40, 50)}
    assert sum(map(len, own.splits.values())) == 50
    assert {choose_row_split(p.prompt) for p in own.splits["validation"]} == {"validation"}
    with pytest.raises(DataError, match=r"no split dev; .* there are train, test: write one"):
        collect(tmp_path, split="dev")


def test_prompts_that_differ_in_case_or_white_space_share_a_split(tmp_path):
    # Source: marin#6742, simplescaling/s1#26: near-duplicates made a held-out set contaminated.
    forms = ("How many  ARE {}?", "How many are\n{}?")
    rows = [{"question": form.format(i), "answer": "#### 1"} for form in forms for i in range(200)]
    splits = collect(write_lines(tmp_path / "near.jsonl", rows)).splits
    assert sum(map(len, splits.values())) == 400
    forms = [{normalize_prompt(p.prompt) for p in problems} for problems in splits.values()]
    assert sum(map(len, forms)) == 200


def test_columns_that_nothing_reads_are_named(tmp_path):
    # Source: Eurus-2 and RAG sets: a `passage` that no prompt shows changes what is asked.
    rows = [{"passage": f"P{i}", **row, "level": 3} for i, row in enumerate(questions(40))]
    write_parquet(tmp_path / "a.parquet", rows)
    for file in (write_lines(tmp_path / "a.jsonl", rows), tmp_path / "a.parquet"):
        assert str(collect(file)).endswith("; not read: passage, level")
        template = {"prompt_template": "{passage} {question}"}
        assert str(collect(file, **template)).endswith("; not read: level")


@pytest.mark.parametrize(("column", "value", "reason"), TABLE["unseen"])
def test_a_prompt_without_its_picture_or_choices_is_refused(tmp_path, column, value, reason):
    rows = [*({**row, column: None} for row in questions(30)), {**questions(31)[30], column: value}]
    file = write_lines(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match=rf"a.jsonl:31: column {column} holds {reason}"):
        collect(file)
    assert collect(file, prompt_template=f"{{question}} {{{column}}}").rows == 31
    assert collect(write_lines(tmp_path / "b.jsonl", rows[:30])).rows == 30


def test_files_whose_names_say_nothing_are_all_for_training(tmp_path):
    for name in ("a.jsonl", "b [1].jsonl"):
        write_lines(tmp_path / "of [x]" / name, questions(8))
    (tmp_path / "of [x]" / "notes.txt").write_text("no data")
    assert collect(tmp_path / "of [x]").rows == 16
    with pytest.raises(DataError, match=r"no split test; .* there are train: write one"):
        collect(tmp_path / "of [x]", split="test")


def test_a_clone_of_the_hub_is_read_by_its_readme(tmp_path):
    write_parquet(tmp_path / "main" / "train-0.parquet", questions(10))
    write_parquet(tmp_path / "socratic" / "rows.parquet", questions(17, 10))
    files = "- config_name: {0}\n  data_files:\n  - split: train\n    path: {0}/*\n"
    heads = files.format("main") + files.format("socratic")
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{heads}---\n# Questions\n")
    assert collect(tmp_path, config="main").rows == 10
    assert collect(tmp_path, config="socratic").rows == 7
    with pytest.raises(DataError, match=r"Please pick one among .*'main', 'socratic'.*data.config"):
        collect(tmp_path)


def test_what_save_to_disk_wrote_is_read_where_it_is(tmp_path, monkeypatch):
    import datasets

    datasets.disable_progress_bars()
    table = datasets.Dataset.from_list(questions(30))
    table.with_format("numpy").save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=table, dev=table.select(range(3))).save_to_disk(tmp_path / "two")
    datasets.enable_progress_bars()
    before = {str(file) for file in tmp_path.rglob("*")}
    assert collect(tmp_path / "one").rows == collect(tmp_path / "two").rows == 30
    assert collect(tmp_path / "two", split="dev").rows == 3
    with pytest.raises(DataError, match=r"no split test; .* there are train, dev"):
        collect(tmp_path / "two", split="test")
    assert {str(file) for file in tmp_path.rglob("*")} == before
    data = DataSettings(source=str(tmp_path / "two"))
    config = TrialConfig("math", "embedded", 0, {}, TrainingSettings(), tmp_path, data=data)
    facts = measure_content(config)
    assert f"data train{os.sep}data-00000-of-00001.arrow" in facts


def test_own_splits_are_used_as_they_are_and_the_rest_is_for_training(tmp_path):
    train = write_lines(tmp_path / "rows.jsonl", questions(100))
    valid = write_lines(tmp_path / "v.jsonl", questions(120, 100))
    test = write_lines(tmp_path / "t.csv.jsonl", questions(150, 120))
    own = {"validation": HeldOutData(source=str(valid)), "test": HeldOutData(source=str(test))}
    sizes = {name: len(problems) for name, problems in collect(train, **own).splits.items()}
    assert sizes == {"train": 100, "validation": 20, "test": 30}


def test_a_test_prompt_is_never_a_training_prompt(tmp_path):
    """The front is measured on prompts that no policy was trained on."""
    train = write_lines(tmp_path / "rows.jsonl", questions(100))
    other = [{"question": f"  no.  {i}? ", "answer": f"#### {i}"} for i in range(95, 115)]
    test = write_lines(tmp_path / "t.jsonl", other)
    own = {"test": HeldOutData(source=str(test))}
    collected = collect(train, **own)
    assert collected.shared == 5
    assert len(collected.splits["test"]) == 20
    assert list_questions(collected).isdisjoint({f"No. {i}?" for i in range(95, 100)})
    said = describe_data(settings_of(train, **own))["data"]
    assert "5 held-out prompts left out of training" in said
    leaked = settings_of(train, test=HeldOutData(source=str(train)))
    with pytest.raises(DataError, match=r"data.test: 100 of 100 prompts are in another split too"):
        check_data(leaked, TrainingSettings(), ())


# Columns ------------------------------------------------------------------------------------------

SVAMP = {"Body": "Ann has 5 shells.", "Question": "How many?", "Answer": 5.0, "Equation": "( 5.0 )"}


def test_a_column_without_a_name_is_in_no_prompt(tmp_path):
    """`DataFrame.to_csv` of pandas writes the index in a first column without a name."""
    (tmp_path / "a.csv").write_text(",question,answer\n7,Why?,4\n")
    collected = collect(tmp_path / "a.csv", "question_answer", prompt_template="{question} Think.")
    assert [problem.prompt for problem in list_problems(collected)] == ["Why? Think.\n"]


@pytest.mark.parametrize(("layout", "others", "message"), TABLE["missing"])
def test_columns_that_are_missing_name_those_that_probably_mean_them(
    layout, others, message, tmp_path
):
    file = write_lines(tmp_path / "a.jsonl", [SVAMP])
    with pytest.raises(DataError, match=message):
        collect(file, layout, **others)


@pytest.mark.parametrize(("value", "answer"), TABLE["answers"])
@pytest.mark.parametrize("layout", ["math", "question_answer", "olympiadbench"])
def test_answers_may_be_numbers_and_lists(value, answer, layout, tmp_path):
    info = describe_layout(layout)
    columns = {"olympiadbench": "final_answer"}
    row = {info.columns[0]: "q", columns.get(layout, "answer"): value}
    file = write_lines(tmp_path / "a.jsonl", [row])
    [(_, named)] = read_rows(DataSettings(source=str(file)), info)
    assert info.convert(named).data == {"answer": answer}
    assert info.write_reference(named) == f"<think></think>\n<answer>{answer}</answer>"


def test_int64_answers_of_parquet_need_no_solution(tmp_path):
    rows = [{"problem": f"No. {i}", "answer": i, "solution": "Thus."} for i in range(9)]
    file = write_parquet(tmp_path / "aime.parquet", rows)
    answers = {problem.data["answer"] for problem in list_problems(collect(file, "math"))}
    assert answers == set(map(str, range(9)))


@pytest.mark.parametrize("value", [None, "", [], float("nan"), True, {"a": 1}])
@pytest.mark.parametrize(("layout", "asks"), [("question_answer", "question"), ("math", "problem")])
def test_an_answer_that_is_none_is_left_out_and_counted(layout, asks, value, tmp_path):
    rows = [{asks: f"q{i}", "answer": str(i)} for i in range(3)]
    file = write_lines(tmp_path / "a.jsonl", [*rows, {asks: "q", "answer": value}])
    collected = collect(file, layout)
    assert (collected.rows, collected.left_out) == (4, 1)
    assert collected.first_left_out.startswith(f"{file}:4: column answer: ")


# Conversations ------------------------------------------------------------------------------------

SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "2 + 2?"}


def test_a_prompt_of_messages_becomes_a_conversation(tmp_path):
    """verl's and TRL's rows: the policy's chat template writes the roles."""
    rows = [
        {"prompt": [SYSTEM, ASK], "reward_model": {"ground_truth": "4"}},
        {"prompt": [ASK], "reward_model": {"ground_truth": "4"}},
        {"prompt": [SYSTEM], "reward_model": {"ground_truth": 4}},
        {"prompt": [{"role": "user", "content": [{"image": 1}]}], "reward_model": {}},
    ]
    collected = collect(write_parquet(tmp_path / "a.parquet", rows[:2]), "verl")
    chat, plain = sorted(list_problems(collected), key=lambda p: not p.turns)
    assert chat.turns == [SYSTEM, ASK]
    assert chat.prompt == "system: Be brief.\n\nuser: 2 + 2?\n"
    assert (plain.turns, plain.prompt, plain.data) == ((), "2 + 2?\n", {"answer": "4"})
    said = str(collect(write_lines(tmp_path / "b.jsonl", rows), "verl"))
    assert "1 left out" in said
    assert "column prompt: not a text but list" in said


def test_messages_that_are_no_text_are_left_out_and_those_of_programs_have_their_test(tmp_path):
    rows = [
        {"problem": [SYSTEM, ASK], "answer": "4"},
        {"problem": [{"role": "user", "content": [{"type": "image_url"}]}], "answer": "4"},
    ]
    assert "1 left out" in str(collect(write_lines(tmp_path / "a.jsonl", rows), "math"))
    code = {"code": "def f(x): return x + 1", "test_list": ["assert f(1) == 2"]}
    row = {**code, "text": [SYSTEM, {"role": "user", "content": "Add 1."}]}
    [problem] = list_problems(collect(write_lines(tmp_path / "b.jsonl", [row]), "mbpp"))
    assert problem.turns[1]["content"].endswith("must pass this test:\nassert f(1) == 2")


def test_a_layout_that_keeps_messages_wants_its_own_column(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", [{"messages": [ASK], "reward_model": {}}])
    with pytest.raises(DataError, match="no column prompt; there are messages, reward_model"):
        collect(file, "toolrl")


# Proposals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("row", "layout", "columns"), TABLE["proposed"])
def test_a_layout_is_proposed_for_a_file(row, layout, columns, tmp_path):
    proposed = propose_layout(str(write_lines(tmp_path / "a.jsonl", [row] * 3)), None, None)
    assert (proposed.layout, dict(proposed.columns)) == (layout, columns)


def test_a_file_without_a_known_layout_is_described(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", [{"Zeile": "a", "Wert": 3}])
    with pytest.raises(UsageError, match="has the columns Zeile, Wert, which fit none"):
        propose_layout(str(file), None, None)


def test_a_readme_that_is_no_yaml_is_named(tmp_path):
    write_lines(tmp_path / "train.jsonl", questions(3))
    (tmp_path / "README.md").write_text("---\nconfigs: [\n---\n")
    with pytest.raises(DataError, match=r"while parsing a flow node.*correct data.config"):
        collect(tmp_path)


def test_an_unknown_column_of_a_layout_that_fits_proposes_no_other(tmp_path):
    file = write_lines(tmp_path / "rows.jsonl", questions(3))
    with pytest.raises(DataError) as caught:
        collect(file, prompt_template="{nope} {question}")
    assert "no column nope" in str(caught.value)
    assert "data.layout" not in str(caught.value)
