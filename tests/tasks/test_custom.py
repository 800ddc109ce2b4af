"""Tasks in files: how they describe themselves, what is refused, and functions that raise."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, LlamaForSequenceClassification

from gdpo_tune.core import task_files
from gdpo_tune.core.errors import SpecError, TaskFileError, TrialFailure, UsageError
from gdpo_tune.core.parameters import PARAMETERS
from gdpo_tune.core.settings import DataSettings, SandboxSettings, TrainingSettings
from gdpo_tune.core.steps import read_steps
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.spec import load_spec
from gdpo_tune.tasks.base import Problem
from gdpo_tune.tasks.custom import RewardFunctionTask, choose_row_split, name_reward
from gdpo_tune.tasks.task import RewardFailures, Scores
from gdpo_tune.training import scoring, train, worker_cache
from gdpo_tune.training.evaluation import estimate_metrics
from tests.support.paths import ROOT
from tests.support.training import write_policy

GUIDE = ROOT / "docs" / "own_task.md"
SETTINGS = TrainingSettings(
    steps=2,
    completions_per_step=16,
    max_completion_length=8,
    length_limit=4,
    train_prompts=40,
    validation_prompts=6,
    test_prompts=6,
    samples_per_prompt=2,
)
HEAD = "from gdpo_tune.tasks.custom import RewardFunctionTask\n"
TASK = (
    HEAD
    + """
def one(completions, **_):
    return [1.0] * len(completions)

class Mine(RewardFunctionTask):
    reward_funcs = [one]
    ranges = {"one": (0, 2)}

    def rows(self):
        return [{"prompt": str(i)} for i in range(100)]
"""
)


@pytest.fixture(autouse=True)
def forget():
    """No file and no warm state passes from test to test."""
    task_files._load_module.cache_clear()
    yield
    worker_cache.release_worker_cache()
    task_files._load_module.cache_clear()
    for name in [name for name in sys.modules if name.startswith("gdpo_tune_task_")]:
        del sys.modules[name]


def written(folder: Path, text: str = TASK, name: str = "Mine") -> str:
    (folder / "mine.py").write_text(text)
    return f"{folder / 'mine.py'}:{name}"


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)


def trial(task: str, folder: Path, **params) -> TrialConfig:
    defaults = {name: info.default for name, info in PARAMETERS.items()}
    rewards = task_files.load_task_info(task).rewards
    weights = {f"reward_weights.{name}": 1.0 for name in rewards}
    complete = {**defaults, **weights, "group_size": 4, **params}
    return TrialConfig(task, "embedded", 0, complete, SETTINGS, folder / "trial")


def test_the_example_of_the_guide_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,), (space,) = blocks("python"), blocks("yaml")
    assert len(code.splitlines()) <= 30
    Path("sums.py").write_text(code)
    Path("sums.yaml").write_text(space)
    spec = load_spec("sums.yaml")
    with task_files.build_task(spec.task, spec.training, spec.sandbox, spec.data) as task:
        assert task.environment() == {}
    outcome = train(trial(spec.task, tmp_path), resume=None, report=lambda *_: None)
    assert set(outcome.test) == {"right", "short", "mean_length"}
    assert outcome.environment["task_file"].startswith("sha256:")
    last = read_steps(tmp_path / "trial")[-1]
    assert last.step == 2
    assert last.metrics["train/rewards/right/failed"] == 0
    assert 0 <= last.metrics["train/rewards/short/mean"] <= 1


def test_a_class_describes_itself(tmp_path):
    info = task_files.load_task_info(written(tmp_path))
    assert info.rewards == {"one": (0, 2)}
    assert info.metrics["one"].direction == "maximize"
    assert (info.metrics["one"].low, info.metrics["one"].high) == (0, 2)
    assert info.metrics["mean_length"].direction == "minimize"
    assert info.metrics["mean_length"].low == 0
    assert info.published == {"normalization": "gdpo", "reward_weights.one": 1.0}


BAD = {
    "no class": ("x = 1", "Mine", "has no class Mine"),
    "no name": (TASK, "", "names no class"),
    "not a class": ("Mine = 3", "Mine", "has no class Mine"),
    "raises": ("import sys\n1 / 0", "Mine", r"raised ZeroDivisionError: .* \(mine.py, line 2\)"),
    "syntax": ("def", "Mine", "raised SyntaxError"),
    "no rewards": (HEAD + "class Mine(RewardFunctionTask): pass", "Mine", "rewards has to be"),
    "no task": ("class Mine:\n rewards = metrics = ('a',)", "Mine", r"no method problems\(\)"),
    "dotted": (
        HEAD + "def f(**_): pass\nf.__name__ = 'a.b'\n"
        "class Mine(RewardFunctionTask): reward_funcs = [f]",
        "Mine",
        "'a.b', which is not a plain name",
    ),
    "twice": (
        HEAD + "def f(**_): pass\nclass Mine(RewardFunctionTask): reward_funcs = [f, f]",
        "Mine",
        "a name twice",
    ),
    "range": (TASK.replace("(0, 2)", "(2, 0)"), "Mine", r"ranges\['one'\] has to be"),
    "direction": (
        TASK.replace("    ranges", "    directions = {'one': 'up'}\n    ranges"),
        "Mine",
        "is not maximize or minimize",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_is_no_task_is_refused(tmp_path, case):
    text, name, reason = BAD[case]
    with pytest.raises(TaskFileError, match=reason):
        task_files.load_task_info(written(tmp_path, text, name))


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(TaskFileError, match="there is no file"):
        task_files.load_task_info(f"{tmp_path}/absent.py:Mine")


def test_data_for_a_task_that_writes_its_own_prompts_is_refused(tmp_path):
    (tmp_path / "rows.jsonl").touch()
    (space,) = blocks("yaml")
    (tmp_path / "own.yaml").write_text(
        space.replace("sums.py:Sums", written(tmp_path))
        .replace("right", "one")
        .replace("short: {d", "mean_length: {d")
        + f"data: {{source: {tmp_path / 'rows.jsonl'}, layout: gsm8k}}\n"
    )
    with pytest.raises(
        SpecError, match=r"data\.source = .*: a task in a file writes its own prompts"
    ):
        load_spec(tmp_path / "own.yaml")


def test_missing_instructions_are_refused_at_once(tmp_path):
    task = written(tmp_path, TASK.replace("    ranges", "    instructions = None\n    ranges"))
    with pytest.raises(TaskFileError, match="instructions has to be a text"):
        task_files.build_task(task, SETTINGS, SandboxSettings(), DataSettings())


class Own(RewardFunctionTask):
    """Its function is put in by each test."""

    def rows(self):
        return [{"prompt": str(i), "answer": i} for i in range(60)]


def own(*functions) -> type[RewardFunctionTask]:
    return type("Own", (Own,), {"reward_funcs": functions})


def test_rows_go_where_their_prompt_says():
    task = own(lambda **_: [])(SETTINGS)
    seen = {split: task.problems(split, 3, 0) for split in ("train", "validation", "test")}
    for split, problems in seen.items():
        assert [choose_row_split(problem.prompt) for problem in problems] == [split] * 3
        assert problems == own()(SETTINGS).problems(split, 3, 0)
    with pytest.raises(UsageError, match=r"--set training.test_prompts=\d+, or more rows"):
        task.problems("test", 60, 0)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([{"prompt": ["a"]}], "row 0 has no text"),
        ([{"text": "a"}], "row 0 has no text"),
        ([{"prompt": "a", "x": 1}, {"prompt": "b"}], r"row 1 has the columns \[\]"),
    ],
)
def test_rows_that_are_refused(rows, reason):
    kind = type("Rows", (Own,), {"rows": lambda self: rows})
    with pytest.raises(UsageError, match=reason):
        kind(SETTINGS).problems("train", 1, 0)


def scores(function, count: int = 20) -> Scores:
    task = own(function)(SETTINGS)
    problems = task.problems("train", count, 0)
    texts = [problem.prompt for problem in problems]
    return task.score(problems, texts, list(range(count)))


def test_functions_get_prompts_completions_lengths_and_columns():
    def seen(prompts, completions, lengths, answer):
        assert prompts == completions
        assert [int(prompt) for prompt in prompts] == answer
        return [None if length == 3 else length for length in lengths]

    result = scores(seen)
    assert result.failures == {"seen": RewardFailures()}
    assert list(result.rewards["seen"]) == [None if i == 3 else float(i) for i in range(20)]
    assert result.metrics["seen"] == result.rewards["seen"]
    assert result.metrics["mean_length"] == [float(i) for i in range(20)]


def test_a_function_that_raises_costs_the_completions_that_it_raises_on():
    def picky(completions, lengths, **_):
        if 7 in lengths:
            raise KeyError("seven")
        return [1.0] * len(completions)

    result = scores(picky)
    assert list(result.rewards["picky"]) == [None if i == 7 else 1.0 for i in range(20)]
    failed = result.failures["picky"]
    assert failed.count == 1
    assert re.fullmatch(r"KeyError: 'seven' \(test_custom.py, line \d+\)", failed.first)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda completions, **_: completions[1:], "0 rewards for 1|19 rewards for 20"),
        (lambda **_: None, "TypeError"),
        (lambda completion_ids, **_: [], "missing 1 required"),
    ],
)
def test_a_function_of_another_kind_fails_on_all(function, reason):
    failed = scores(function).failures["<lambda>"]
    assert failed.count == 20
    assert re.search(reason, failed.first)


def test_an_async_function_is_refused():
    async def later(**_):
        return []

    assert "write a plain one" in scores(later).failures["later"].first


class Half:
    """A task of which one reward function fails."""

    rewards = ("a",)

    def __init__(self, failed: int) -> None:
        self.failed = failed

    def score(self, problems, completions, lengths):
        values = [None] * self.failed + [1.0] * (len(completions) - self.failed)
        return Scores(
            {"a": values},
            {},
            {"a": RewardFailures(self.failed, "E: x") if self.failed else RewardFailures()},
        )


def test_few_failures_are_counted_and_reported_once(caplog):
    (function,) = scoring.build_reward_functions(Half(1), [None])
    logged = []
    for _ in range(3):
        values = function(
            completions=["x"] * 10,
            completion_ids=[[1]] * 10,
            problem=[0] * 10,
            log_metric=lambda *metric: logged.append(metric),
        )
        assert values == [None] + [1.0] * 9
    assert logged == [("rewards/a/failed", 0.1)] * 3
    assert [record.getMessage() for record in caplog.records] == [
        "reward a raised (reported once): E: x"
    ]


def test_many_failures_end_the_trial():
    (function,) = scoring.build_reward_functions(Half(2), [None])
    with pytest.raises(TrialFailure, match=r"reward a raised for 20% of 10 .*first: E: x"):
        function(completions=["x"] * 10, completion_ids=[[1]] * 10, problem=[0] * 10)


def test_a_trial_whose_reward_function_is_broken_fails(tmp_path):
    broken = TASK.replace("return [1.0] * len(completions)", "return unknown")
    with pytest.raises(
        TrialFailure, match=r"reward one raised for 100% .*NameError.*mine.py, line"
    ):
        train(trial(written(tmp_path, broken), tmp_path), resume=None, report=lambda *_: None)


def test_what_is_not_scored_is_left_out_of_an_estimate():
    columns = {"a": [1.0, None, 0.0, 0.0], "b": [1.0, 1.0, 0.0, 0.0]}
    estimates = estimate_metrics(columns, 2, seed=0)
    assert estimates["a"].mean == pytest.approx(1 / 3)
    assert estimates["b"].mean == pytest.approx(0.5)
    assert estimates["a"].se > 0
    with pytest.raises(TrialFailure, match="metric c has no value"):
        estimate_metrics({"c": [None, None]}, 1, seed=0)


def test_names_of_reward_models():
    assert name_reward("org/Reward-Model-v1.5") == "Reward_Model_v1_5"


def test_a_reward_model_is_read_as_trl_reads_it(tmp_path):
    folder = Path(write_policy(tmp_path / "judge-1"))
    config = AutoConfig.from_pretrained(folder, num_labels=1)
    torch.manual_seed(0)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    task = type("Judged", (Own,), {"reward_funcs": [str(folder)]})(SETTINGS)
    assert task.rewards == ("judge_1",)
    problems = [Problem(prompt, "own", {}) for prompt in ("ab=", "c=", "ab=")]
    scored = task.score(problems, ["x", "yyyy", "x"], [1, 4, 1])
    first, second, third = scored.rewards["judge_1"]
    assert first == pytest.approx(third)
    assert first != pytest.approx(second)
    assert scored.failures["judge_1"] == RewardFailures()
    alone = task.score(problems[:1], ["x"], [1]).rewards["judge_1"]
    assert alone[0] == pytest.approx(first, abs=1e-5), "padding has no effect"


def test_a_reward_model_that_is_not_there_is_refused(tmp_path):
    task = type("Judged", (Own,), {"reward_funcs": [str(tmp_path / "absent")]})(SETTINGS)
    with pytest.raises(UsageError, match=r"reward model .*absent cannot be loaded"):
        task.score([Problem("a", "own", {})], ["x"], [1])
