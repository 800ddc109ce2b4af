"""Reading a data set, splitting it, and every way in which that fails."""

import logging
import random

import pytest

from gdpo_tune.core import registry
from gdpo_tune.core.errors import DataError
from gdpo_tune.core.settings import DataSettings, SandboxSettings, TrainingSettings
from gdpo_tune.tasks import data_rows, dataset
from gdpo_tune.tasks.dataset import check_data, describe_data, select_problems
from gdpo_tune.tasks.generation import choose_row_split
from tests.support.data import DIRECTORY, build_data_settings, read_rows
from tests.tasks.data_files import collect, list_problems, questions, settings_of, write_lines


@pytest.fixture(autouse=True)
def forgotten():
    """Nothing is kept from one test to the next."""
    yield
    dataset.collect_once.cache_clear()


def written(folder, rows, name="rows.jsonl"):
    return settings_of(write_lines(folder / name, rows))


SPLITS = ("train", "validation", "test")


@pytest.fixture
def hundred(tmp_path):
    return written(tmp_path, questions(100))


def sizes(settings):
    splits = dataset.collect_data(settings).splits
    return {name: len(problems) for name, problems in splits.items()}


def test_splits_are_disjoint_complete_and_decided_by_the_prompt(hundred):
    splits = dataset.collect_data(hundred).splits
    assert tuple(splits) == SPLITS
    prompts = [problem.prompt for problems in splits.values() for problem in problems]
    assert len(set(prompts)) == len(prompts) == 100
    for name in SPLITS:
        assert {choose_row_split(problem.prompt) for problem in splits[name]} == {name}
    assert 70 <= len(splits["train"]) <= 90


def test_problems_are_the_same_whatever_the_order_of_the_rows(tmp_path, hundred):
    shuffled = questions(100)
    random.Random(0).shuffle(shuffled)
    other = written(tmp_path / "other", [*shuffled, *shuffled[:7]])
    first = select_problems(hundred, "train", 40, 0)
    assert select_problems(other, "train", 40, 0) == first
    assert select_problems(other, "train", 10, 0) == first[:10]
    assert select_problems(other, "train", 40, 1) != first
    assert "107 rows, 100 distinct prompts" in describe_data(other)["data"]


def test_of_two_rows_with_one_prompt_the_first_counts(tmp_path):
    row = {"question": "q?", "answer": "#### 1"}
    collected = dataset.collect_data(written(tmp_path, [row, {**row, "answer": "#### 2"}]))
    [problem] = list_problems(collected)
    assert problem.data["answer"] == "1"


def test_nested_columns_of_parquet_say_the_same_as_json_lines():
    parquet, lines = DIRECTORY / "toolrl.parquet", DIRECTORY / "toolrl.jsonl"
    assert collect(parquet, "toolrl").splits == collect(lines, "toolrl").splits


def test_rows_that_cannot_be_used_are_counted_and_the_first_is_named(tmp_path):
    broken = [{"question": "q", "answer": "many"}, {"question": "q"}]
    settings = written(tmp_path, [*questions(3), *broken])
    said = describe_data(settings)["data"]
    assert "5 rows, 3 distinct prompts" in said
    assert f"2 left out ({settings.source}:4: column answer: no '####'" in said


def test_mostly_unusable_rows_are_an_error_that_names_the_first(tmp_path):
    settings = written(tmp_path, [*questions(1), *[{"question": "q", "answer": "many"}] * 2])
    with pytest.raises(DataError, match=r"2 of 3 rows cannot be used as layout gsm8k") as caught:
        describe_data(settings)
    assert f"{settings.source}:2: column answer: no '####'" in str(caught.value)


def test_without_a_source_there_is_nothing_to_check_or_say():
    assert describe_data(DataSettings()) == {}
    check_data(DataSettings(), TrainingSettings(), ())


def test_too_small_splits_say_how_many_there_are_and_which_keys_to_change(hundred):
    available = sizes(hundred)
    settings = TrainingSettings(
        train_prompts=500, validation_prompts=available["validation"], test_prompts=99
    )
    with pytest.raises(DataError) as caught:
        check_data(hundred, settings, ())
    message = str(caught.value)
    for name, wanted in (("train", 500), ("test", 99)):
        said = f"distinct {name} prompts where training.{name}_prompts = {wanted}"
        assert f"{available[name]} {said}" in message
    assert "lower training.train_prompts, training.test_prompts, or give more data" in message
    assert "validation" not in message
    with pytest.raises(DataError, match=r"lower training\.test_prompts"):
        select_problems(hundred, "test", 99, 0)
    check_data(hundred, TrainingSettings(train_prompts=1, validation_prompts=2, test_prompts=2), ())


def test_an_empty_split_cannot_be_mended_by_asking_for_less(tmp_path):
    settings = written(tmp_path, questions(1))
    empty = [name for name, size in sizes(settings).items() if not size]
    assert empty
    with pytest.raises(DataError, match=f"has no distinct {empty[0]} prompts.*: give more data"):
        select_problems(settings, empty[0], 1, 0)


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    file = tmp_path / "rows.parquet"
    file.write_bytes(b"PAR1 no table PAR1")
    refused = {
        file: r"rows\.parquet cannot be read as Parquet: ",
        DIRECTORY / "toolrl.parquet": "no column question, answer; there are data_source, prom",
        tmp_path / "gone.jsonl": "no such file, or a directory without",
        tmp_path / "empty": "no such file, or a directory without",
    }
    (tmp_path / "empty").mkdir()
    for source, reason in refused.items():
        with pytest.raises(DataError, match=reason):
            collect(source)
    (tmp_path / "rows.jsonl").mkdir()
    monkeypatch.setattr(data_rows, "list_data_files", lambda source: [source])
    monkeypatch.setattr(data_rows, "is_directory", lambda path: False)
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        collect(tmp_path / "rows.jsonl")


HUB = DataSettings(source="own/questions", layout="gsm8k", config="main", split="train")


def test_a_data_set_on_the_hub_is_asked_for_with_its_keys(monkeypatch):
    import datasets

    calls = []

    def load(*names, **options):
        calls.append((names, options))
        return datasets.Dataset.from_list([{**row, "id": 1} for row in questions(30)])

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert not HUB.is_local
    assert sum(sizes(HUB).values()) == 30
    assert calls == [(("own/questions", "main"), {"split": "train"})]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConnectionError("Couldn't reach 'own/questions' on the Hub\nmore"), "Couldn't reach"),
        (ValueError('Unknown split "train".'), 'Unknown split "train"'),
        (RuntimeError("Dataset scripts are no longer supported"), "Dataset scripts are no longer"),
        (OSError(), "OSError"),
    ],
)
def test_a_hub_that_fails_is_one_error_with_the_local_alternative(error, said, monkeypatch):
    import datasets

    def load(*_, **__):
        logging.getLogger("huggingface_hub.utils").warning("retrying")
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load)
    before = logging.getLogger("huggingface_hub").level
    with pytest.raises(DataError) as caught:
        check_data(HUB, TrainingSettings(), ())
    message = str(caught.value)
    where = "data.source = own/questions (config main, split train)"
    assert message.startswith(f"{where} cannot be loaded from the Hub: {said}")
    assert ".csv or .parquet file as data.source" in message
    assert "\n" not in message
    assert caught.value.exit_status == 2
    assert logging.getLogger("huggingface_hub").level == before


@pytest.mark.parametrize(
    "source",
    ["gsm8k", "some/rows.jsonl", "some/rows.parquet", "./rows", "/data/rows", "~/rows", "a/b/c"],
)
def test_what_is_meant_as_a_path(source, tmp_path, monkeypatch):
    assert DataSettings(source=source).is_local
    monkeypatch.chdir(tmp_path)
    assert not DataSettings(source="openai/gsm8k").is_local
    (tmp_path / "openai" / "gsm8k").mkdir(parents=True)
    assert DataSettings(source="openai/gsm8k").is_local


@pytest.mark.parametrize(
    ("task", "layout"), [("math", "gsm8k"), ("gsm8k", "math"), ("tools", "toolrl")]
)
def test_every_task_takes_its_problems_from_the_data(task, layout):
    build = registry.describe_task(task).build
    data = build_data_settings(layout)
    with build(TrainingSettings(), SandboxSettings(), data) as made:
        problems = made.problems("train", 5, 0)
        train = dataset.collect_data(data).splits["train"]
        assert {problem.prompt for problem in problems} <= {problem.prompt for problem in train}
        assert data.source in made.environment()["data"]
        scores = made.score(problems, ["<answer>42</answer>"] * 5, [3] * 5)
        assert {len(column) for column in scores.rewards.values()} == {5}
    with pytest.raises(DataError, match=r"lower training\.train_prompts"):
        made.problems("train", len(read_rows(layout)) + 1, 0)
