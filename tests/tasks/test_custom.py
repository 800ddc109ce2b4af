"""Tasks in files: how they describe themselves, what is refused, and functions that raise."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
import itertools
import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, LlamaForSequenceClassification

from gdpo_tune import score
from gdpo_tune.core import task_files
from gdpo_tune.core.errors import SpecError, TaskFileError, TrialFailure, UsageError
from gdpo_tune.core.settings import DataSettings, SandboxSettings
from gdpo_tune.core.trial_files import read_steps
from gdpo_tune.spec import load_spec
from gdpo_tune.tasks import task_process
from gdpo_tune.tasks.base import Problem, Scores
from gdpo_tune.tasks.custom import RewardBatch, RewardFunctionTask, name_reward
from gdpo_tune.tasks.generation import choose_row_split, normalize_prompt
from gdpo_tune.tasks.task_process import score_by_functions
from gdpo_tune.training import evaluation
from gdpo_tune.training.checkpoints import find_checkpoint
from gdpo_tune.training.evaluation import estimate_metrics
from tests.support.paths import ROOT
from tests.support.tables import read_named, read_table
from tests.support.training import write_policy
from tests.tasks.own_tasks import FILES, HEAD, SETTINGS, TASK, run_trial, trial, with_line, written

GUIDE = ROOT / "docs" / "own_task.md"


pytestmark = pytest.mark.usefixtures("fresh_task_files")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)


def test_the_example_of_the_guide_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code, *_), (space,) = blocks("python"), blocks("yaml")
    assert len(code.splitlines()) <= 30
    Path("sums.py").write_text(code)
    Path("sums.yaml").write_text(space)
    spec = load_spec("sums.yaml")
    with task_files.build_task(spec.task, spec.training, spec.sandbox, spec.data) as task:
        assert task.environment() == {}
    outcome = run_trial(trial(spec.task, tmp_path))
    assert set(outcome.test) == {"right", "length", "mean_length"}
    last = read_steps(tmp_path / "trial")[-1]
    assert last.step == 2
    assert last.metrics["train/rewards/right/failed"] == 0
    assert 0 <= last.metrics["train/rewards/length/mean"] <= 1


def test_a_reward_of_weight_0_is_measured_and_may_be_an_objective(tmp_path):
    two = "def two(lengths, **_):\n    return [float(n) for n in lengths]\n\nclass"
    task = written(tmp_path, TASK.replace("[one]", "[one, two]").replace("class", two))
    goal = "{direction: minimize, reference: 9}"
    (tmp_path / "own.yaml").write_text(
        f"task: {task}\nobjectives: {{one: {{direction: maximize, reference: 0}}, two: {goal}}}\n"
        "space: {group_size: [2, 4], reward_weights: {one: 1, two: 0}}\n"
        "training: {train_prompts: 60, validation_prompts: 4, test_prompts: 4}\n"
    )
    assert [*load_spec(tmp_path / "own.yaml").objectives] == ["one", "two"]
    config = trial(task, tmp_path, **{"reward_weights.two": 0.0})
    outcome = run_trial(config)
    assert outcome.test["two"].mean == outcome.test["mean_length"].mean > 0


def test_the_measured_policy_of_the_guide_is_an_objective_and_costs_no_reward(tmp_path):
    """The third example of the page, in a training; texts that are scored have no such value."""
    (tmp_path / "kept.py").write_text(blocks("python")[-1])
    goals = (
        "right: {direction: maximize, reference: 0}, kept: {direction: maximize, reference: -30}"
    )
    settings = "{train_prompts: 60, validation_prompts: 4, test_prompts: 4}"
    (tmp_path / "own.yaml").write_text(
        f"task: {tmp_path / 'kept.py'}:Sums\nobjectives: {{{goals}}}\n"
        f"space: {{group_size: [2, 4], reward_weights: {{right: 1}}}}\ntraining: {settings}\n"
    )
    assert [*load_spec(tmp_path / "own.yaml").objectives] == ["right", "kept"]
    config = trial(f"{tmp_path / 'kept.py'}:Sums", tmp_path)
    outcome = run_trial(config)
    assert -30 < outcome.test["kept"].mean < 0
    assert outcome.test["kept"].se > 0
    steps = read_steps(config.directory)
    assert any("validation/kept" in step.metrics for step in steps)
    assert not any("rewards/kept" in name for step in steps for name in step.metrics)
    (tmp_path / "texts.jsonl").write_text(
        '{"prompt": "1 + 1 = ", "answer": "2", "completion": "2"}'
    )
    command = [str(tmp_path / "own.yaml"), "--completions", str(tmp_path / "texts.jsonl")]
    out = tmp_path / "scores.json"
    assert score.main([*command, "--json", str(out)]) == 0
    assert "kept" not in out.read_text()


def test_an_evaluation_has_a_name_of_its_own():
    with pytest.raises(
        UsageError, match=r"Twice\.evaluations names 'one', which is a metric already"
    ):
        type(
            "Twice",
            (RewardFunctionTask,),
            {"reward_funcs": {"one": len}, "evaluations": {"one": len}},
        )


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (5, r"\(a int\): 5 is not a callable object"),
        (lambda policy, tokenizer: [1.0], r"\(test_custom.py, line \d+\): got an unexpected"),
        (lambda policy, split, seed: [1.0], r"\(.*\): (too many|multiple values)"),
    ],
)
def test_an_evaluation_that_cannot_be_called_is_refused_before_work(function, reason):
    with pytest.raises(UsageError, match=rf"Bad\.evaluations\['kept'\] {reason}.*\n    fix: write"):
        type(
            "Bad",
            (RewardFunctionTask,),
            {"reward_funcs": {"one": len}, "evaluations": {"kept": function}},
        )


def test_a_class_describes_itself(tmp_path):
    info = task_files.load_task_info(written(tmp_path))
    assert info.rewards == {"one": (0, 2)}
    one, length = info.metrics["one"], info.metrics["mean_length"]
    assert (one.direction, one.low, one.high) == ("maximize", 0, 2)
    assert (length.direction, length.low) == ("minimize", 0)
    assert info.published == {"normalization": "gdpo", "reward_weights.one": 1.0}


@pytest.mark.parametrize(("text", "name", "reason"), read_named("task_files", "bad"))
def test_a_file_that_is_no_task_is_refused(tmp_path, text, name, reason):
    (tmp_path / "i_am_cut.py").write_text("x = (")
    if text.startswith("TASK: "):
        text = with_line(text.removeprefix("TASK: "))
    text = text.replace("TASK", TASK).replace("HEAD", HEAD)
    with pytest.raises(TaskFileError, match=reason):
        task_files.load_task_info(written(tmp_path, text, name))


def test_a_file_that_changes_the_directory_moves_no_sweep(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = written(tmp_path, f"import os\nos.chdir('/')\n{TASK}")
    task_files.load_task_info(file)
    assert Path.cwd() == tmp_path
    task_files.build_task("mine.py:Mine", SETTINGS, SandboxSettings(), DataSettings()).close()


def test_a_module_beside_the_file_comes_before_others_of_its_name(tmp_path, monkeypatch):
    # Source: axolotl#2557; Python puts the directory of a program first.
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "twice_there.py").touch()
    (tmp_path / "twice_there.py").write_text("WORTH = 2.0\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "elsewhere"), *sys.path, str(tmp_path)])
    task_files.load_task_info(written(tmp_path, f"from twice_there import WORTH\n{TASK}"))
    assert sys.path[-1] == str(tmp_path)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(TaskFileError, match="there is no file"):
        task_files.load_task_info(f"{tmp_path}/absent.py:Mine")


def test_data_for_a_task_that_writes_its_own_prompts_is_refused(tmp_path):
    (tmp_path / "rows.jsonl").touch()
    (space,) = blocks("yaml")
    space = space.replace("sums.py:Sums", written(tmp_path)).replace("right", "one")
    data = f"data: {{source: {tmp_path / 'rows.jsonl'}, layout: gsm8k}}\n"
    (tmp_path / "own.yaml").write_text(space.replace("short: {d", "mean_length: {d") + data)
    reason = r"data\.source = .*: a task in a file writes its own prompts"
    with pytest.raises(SpecError, match=reason):
        load_spec(tmp_path / "own.yaml")


def test_missing_instructions_are_refused_at_once(tmp_path):
    task = written(tmp_path, with_line("instructions = None"))
    with pytest.raises(TaskFileError, match="instructions has to be a text"):
        task_files.build_task(task, SETTINGS, SandboxSettings(), DataSettings())


class Own(RewardFunctionTask):
    """Its function is put in by each test."""

    def rows(self):
        return [{"prompt": str(i), "answer": i} for i in range(60)]


def own(*functions, rows=None, settings=SETTINGS):
    changes = {} if rows is None else {"rows": lambda self: rows}
    return type("Own", (Own,), {"reward_funcs": functions, **changes})(settings)


def test_rows_go_where_their_prompt_says():
    task = own(lambda **_: [])
    seen = {split: task.problems(split, 3, 0) for split in ("train", "validation", "test")}
    for split, problems in seen.items():
        assert [choose_row_split(problem.prompt) for problem in problems] == [split] * 3
        assert problems == own().problems(split, 3, 0)
    with pytest.raises(UsageError, match=r"--set training.test_prompts=\d+, or more rows"):
        task.problems("test", 60, 0)
    more = SETTINGS.replace(validation_prompts=30, test_prompts=30)
    said = r"has \d of 30 validation prompts, \d of 30 test prompts\n +fix: (--set \S+=\d ?){2}, or"
    with pytest.raises(UsageError, match=said), own(lambda **_: [], settings=more):
        pass


def test_rows_whose_prompts_differ_in_case_or_white_space_share_a_split():
    # Source: marin#6742: near-duplicates made a held-out set contaminated.
    rows = [{"prompt": text.format(i)} for i in range(60) for text in ("is it {}?", "Is  it {}?\n")]
    splits = own(rows=rows)._splits
    forms = [{normalize_prompt(p.prompt) for p in problems} for problems in splits.values()]
    assert (sum(map(len, splits.values())), sum(map(len, forms))) == (120, 60)


def test_rows_with_the_prompt_of_an_earlier_row_are_counted():
    task = own(rows=[{"prompt": str(i % 60), "answer": i} for i in range(90)])
    assert all(problem.data["answer"] < 60 for problem in task.problems("train", 9, 0))
    assert task.environment() == {"rows_left_out": "30, whose prompt an earlier row has"}


NO_TEXT = ([{"prompt": "\ud800"}], "row 0 has a prompt that is neither a text that UTF-8 can write")
NO_TURN = (
    [{"prompt": [{"role": "user", "content": "\ud800"}]}],
    "row 0 has a prompt that is neither a text that UTF-8 can write nor a list of messages",
)
NO_ROWS = (None, r"has 0 of 1 train prompts\n    fix: more rows: .* 80 per cent")


@pytest.mark.parametrize(
    ("rows", "reason"), [*read_table("task_files")["rows"], NO_TEXT, NO_TURN, NO_ROWS]
)
def test_rows_that_are_refused(rows, reason):
    kind = type("Rows", (Own,), {"rows": lambda self: rows})
    with pytest.raises(UsageError, match=reason):
        kind(SETTINGS).problems("train", 1, 0)


def score_here(task, problems, completions, lengths, ids=None, state=None, patience=0.0) -> Scores:
    """Score as the process of a task does, but in this one."""

    def call(name, _, batch):
        task.load_functions(None, 600.0)
        return task.call_function(name, batch._replace(problems=copy.deepcopy([*batch.problems])))

    batch = RewardBatch(problems, completions, lengths, ids, state or {})
    return score_by_functions(task.rewards, call, batch, task.most_failed, patience)


def score_prompts(*functions, count=20, most_failed=0.1, patience=0.0, rows=None, **more) -> Scores:
    """Score the first prompts as if they were completions of 0, 1, 2, ... tokens."""
    task = own(*functions, rows=rows)
    task.most_failed = most_failed
    problems = task.problems("train", count, 0)
    texts = [problem.prompt for problem in problems]
    return score_here(task, problems, texts, list(range(count)), patience=patience, **more)


def test_functions_get_prompts_completions_lengths_and_columns():
    def seen(prompts, completions, lengths, answer):
        assert prompts == completions
        assert [int(prompt) for prompt in prompts] == answer
        return [None if length == 3 else length for length in lengths]

    # A function without room for a keyword does not get it.
    result = score_prompts(seen, lambda completions, answer: answer)
    assert result.failures == {"seen": {}, "<lambda>": {}}
    assert list(result.rewards["seen"]) == [None if i == 3 else float(i) for i in range(20)]
    assert result.metrics["seen"] == result.rewards["seen"]
    assert result.metrics["mean_length"] == [float(i) for i in range(20)]
    prompts = [problem.prompt for problem in own().problems("train", 20, 0)]
    assert result.rewards["<lambda>"] == [float(prompt) for prompt in prompts]


def test_a_function_that_raises_costs_the_completions_that_it_raises_on():
    def picky(completions, lengths, **_):
        if 7 in lengths:
            raise KeyError("seven")
        return [1.0] * len(completions)

    result = score_prompts(picky)
    assert list(result.rewards["picky"]) == [None if i == 7 else 1.0 for i in range(20)]
    ((row, reason),) = result.failures["picky"].items()
    assert row == 7
    assert re.fullmatch(r"KeyError: 'seven' \(test_custom.py, line \d+\)", reason)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda completions, **_: completions[1:], "returned 19 values for 20 completions"),
        (lambda **_: itertools.repeat(0.5), "returned 10020 values for 20 completions"),
        (lambda **_: [0.5], "returned 1 values for 20 completions"),
        (lambda completions, **_: [1 / n for n in dict.fromkeys("ab", 1).values()], "2 values for"),
        (lambda **_: None, "returned None, a NoneType, in place of a list of 20 numbers"),
        (lambda **_: 0.5, "returned 0.5, a float"),
        (lambda **_: "x" * 20, "a str, in place of a list"),
        (lambda completions, **_: dict.fromkeys(completions, 1.0), "a dict, in place of a list"),
        (lambda completions, **_: ["1.0" for _ in completions], "returned '1.0', a str, for co"),
        (lambda completions, **_: [[1.0] for _ in completions], "a list, for completion 0"),
    ],
)
def test_what_is_no_reward_ends_the_trial_and_names_the_function(function, reason):
    # Source: trl#6533; TRL 1.16 raises for another number of values.
    named = r"reward <lambda> \(test_custom.py, line \d+\)"
    with pytest.raises(TrialFailure, match=named) as raised:
        score_prompts(function)
    assert reason in str(raised.value)


def test_a_function_that_compares_completions_is_asked_for_all_again():
    # Source: arithmetic; a completion alone is the mean of its batch, so it would earn zero.
    calls = []

    def spread(lengths, **_):
        calls.append(len(lengths))
        if len(calls) == 1:
            raise ConnectionError("away for a moment")
        mean = sum(lengths) / len(lengths)
        return [length - mean for length in lengths]

    result = score_prompts(spread, most_failed=0)
    assert list(result.rewards["spread"]) == [row - 9.5 for row in range(20)]
    assert result.failures["spread"] == {}
    assert calls == [20, 20]


@pytest.mark.parametrize("patience", [0.0, 30.0])
def test_a_judge_that_is_away_is_asked_again_for_what_failed_alone(patience, monkeypatch):
    # Source: arithmetic; without patience 8 of 20 have no score, with it none after two pauses.
    pauses, calls = [], []
    monkeypatch.setattr("tenacity.nap.time.sleep", pauses.append)

    def judge(lengths, **_):
        calls.append(len(lengths))
        if any(row % 5 < 2 for row in lengths) and len(pauses) < 2:
            raise ConnectionError("503")
        return [float(row) for row in lengths]

    result = score_prompts(judge, patience=patience)
    failed = [row for row in range(20) if row % 5 < 2]
    assert calls == [20, *[1] * 20, *[1] * 16 * bool(patience)]
    assert pauses == ([1, 2] if patience else [])
    assert list(result.failures["judge"]) == ([] if patience else failed)
    values = [None if row in result.failures["judge"] else float(row) for row in range(20)]
    assert list(result.rewards["judge"]) == values


def test_async_functions_are_awaited_as_in_trl():
    # Source: TRL 1.16, `GRPOTrainer._calculate_rewards`: async functions run on an event loop.
    async def later(completions, **_):
        await asyncio.sleep(0)
        return [1.0] * len(completions)

    result = score_prompts(later)
    assert set(result.rewards["later"]) == {1.0}
    assert result.failures["later"] == {}


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]


def test_every_call_has_its_own_copy_of_its_row():
    # Source: trl#6351; TRL's RepeatSampler reads the row again for each completion.
    def ticks(gold, prompts, completions, **_):
        found = [len(gold[row]) + len(completions[row][0]) for row in range(len(gold))]
        for row in range(len(gold)):
            gold[row].clear()
            prompts[row].clear()
            completions[row][0].clear()
        return found

    rows = [{"prompt": chat(f"say {i}"), "gold": ["a", "b"]} for i in range(60)]
    twice = lambda **keywords: ticks(**keywords)  # noqa: E731
    task = own(ticks, twice, rows=rows)
    problems = [*task.problems("train", 1, 0) * 3]
    for _ in range(2):
        scored = score_here(task, problems, ["x"] * 3, [1] * 3)
        assert scored.rewards == {"ticks": [4.0] * 3, "<lambda>": [4.0] * 3}


def test_conversations_reach_functions_as_messages():
    # Source: TRL's "Dataset formats", conversational prompts; `trl.rewards` reads
    # completion[0]["content"].
    from trl.rewards import think_format_reward

    def seen(prompts, completions, **_):
        assert all(prompt[1]["content"].startswith("say ") for prompt in prompts)
        assert all([set(one) for one in text] == [{"role", "content"}] for text in completions)
        return [float(text[0]["role"] == "assistant") for text in completions]

    task = own(think_format_reward, seen, rows=[{"prompt": chat(f"say {i}")} for i in range(100)])
    problems = task.problems("train", 2, 0)
    assert len({problem.prompt for problem in problems}) == 2
    scored = score_here(task, problems, ["<think>\na\n</think>\nb", "b"], [3, 1])
    assert scored.rewards == {"think_format_reward": [1.0, 0.0], "seen": [1.0, 1.0]}


def test_functions_of_trl_that_read_token_ids_work():
    """Source: unsloth#2907, trl#4202: functions written for TRL read what TRL passes."""
    from trl.rewards import get_soft_overlong_punishment

    function = get_soft_overlong_punishment(max_completion_len=10, soft_punish_cache=5)
    scored = score_prompts(function, count=2, ids=[[1] * 2, [1] * 20])
    assert next(iter(scored.rewards.values())) == [0.0, -1.0]
    failed = next(iter(score_prompts(function, count=2).failures.values()))
    assert len(failed) == 2
    assert "completion_ids are not known here" in failed[0]


def test_functions_log_metrics_and_columns_and_read_the_state():
    # Source: TRL 1.16, `log_metric(name, value)` and `log_extra(column, values)`.
    def logs(completions, log_metric, log_extra, trainer_state, **_):
        log_metric("judge/step", trainer_state.global_step)
        log_extra("parsed", [f"<{text}>" for text in completions])
        return [getattr(trainer_state, "epoch", 0.25)] * len(completions)

    def asks(trainer_state, completions, **_):
        return [trainer_state.best_metric] * len(completions)

    scored = score_prompts(logs, asks, count=2, state={"global_step": 3})
    assert scored.rewards["logs"] == [0.25, 0.25]
    assert scored.logged == [("judge/step", 3.0)]
    prompts = [problem.prompt for problem in own().problems("train", 2, 0)]
    assert scored.columns == {"parsed": [f"<{prompt}>" for prompt in prompts]}
    assert "trainer_state.best_metric is not known here" in scored.failures["asks"][0]


def test_a_column_named_lengths_reaches_its_function():
    # Source: rllm#829; under TRL `lengths` is an ordinary column.
    rows = [{"prompt": str(i), "lengths": 100 + i} for i in range(60)]
    scored = score_prompts(wanted, count=2, rows=rows)
    prompts = [problem.prompt for problem in own(rows=rows).problems("train", 2, 0)]
    assert scored.rewards["wanted"] == [100.0 + int(prompt) for prompt in prompts]
    assert scored.metrics["mean_length"] == [0.0, 1.0]


def wanted(lengths, **_):
    return lengths


@pytest.mark.parametrize(("value", "accepted"), [(0.1 + 0.2 + 0.7, True), (1.1, False)])
def test_a_value_outside_its_range_ends_the_trial(value, accepted):
    # Source: agent-eval-harness#182: a judge on 0 to 10 with the range (0, 1).
    task = type("Ranged", (Half,), {"ranges": {"a": (0, 1)}, "places": {"a": "mine.py, line 3"}})(0)
    task.score = lambda *_: Scores({"a": [value]}, {"b": [value]})
    score = functools.partial(evaluation.score_batch, task, [None], ["x"], [[1]], {}, [1])
    if accepted:
        assert score().rewards == {"a": [value]}
        return
    with pytest.raises(TrialFailure, match=r"a \(mine.py, line 3\) is 1.1 .* \(0, 1\)\n.*fix"):
        score()
    task.score = lambda *_: Scores({}, {"a": [value]})
    with pytest.raises(TrialFailure, match=r"metric a .* is 1.1 for completion 0, outside"):
        score()


class Half:
    """A task of which one reward function fails."""

    rewards = ("a",)
    most_failed = 0.1

    def __init__(self, failed: int) -> None:
        self.failed = failed

    def score(self, problems, completions, lengths, *_):
        values = [None] * self.failed + [1.0] * (len(completions) - self.failed)
        return Scores({"a": values}, {}, {"a": dict.fromkeys(range(self.failed), "E: x")})


TEN = {"completions": ["x"] * 10, "completion_ids": [[1]] * 10, "problem": [0] * 10}


def test_few_failures_are_counted_and_reported_once(caplog):
    (function,) = evaluation.build_reward_functions(Half(1), [None])
    logged = []
    log = {"log_metric": lambda *metric: logged.append(metric)}
    for _ in range(3):
        assert function(**TEN, **log) == [None] + [1.0] * 9
    assert logged == [("rewards/a/failed", 0.1)] * 3
    (record,) = caplog.records
    assert record.getMessage() == "reward a raised (reported once): E: x"


def test_many_failures_end_the_trial():
    (function,) = evaluation.build_reward_functions(Half(2), [None])
    with pytest.raises(TrialFailure, match=r"reward a raised for 20% of 10 .*first: E: x"):
        function(**TEN)


LATE = (FILES / "late.txt").read_text()
"""Its judge is away in the last evaluation, for that per cent of the prompts."""


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(task_process, "PATIENCE", 0.0)


@pytest.mark.usefixtures("impatient")
def test_a_training_whose_reward_function_is_broken_fails_at_its_first_step(tmp_path):
    broken = TASK.replace("return [1.0] * len(completions)", "return unknown")
    config = trial(written(tmp_path, broken), tmp_path)
    with pytest.raises(TrialFailure, match=r"one raised for 100% .*NameError.*mine.py, line"):
        run_trial(config)
    assert read_steps(tmp_path / "trial") == []


@pytest.mark.usefixtures("impatient")
def test_a_judge_that_is_partly_away_in_the_last_evaluation_costs_its_values(tmp_path):
    (tmp_path / "down").write_text("50")
    outcome = run_trial(trial(written(tmp_path, LATE), tmp_path))
    assert outcome.test["one"].mean == outcome.validation["one"].mean == 1
    said = outcome.environment["not_scored.test.one"]
    assert re.fullmatch(r"[1-9]\d* of 12 completions: ConnectionError: 503 \(mine.py.*", said)


@pytest.mark.usefixtures("impatient")
def test_a_judge_that_is_away_in_the_last_evaluation_costs_no_training(tmp_path):
    (tmp_path / "down").write_text("100")
    config = trial(written(tmp_path, LATE), tmp_path)
    config = dataclasses.replace(config, required_metrics=("one",))
    with pytest.raises(TrialFailure, match=r"metric one, .* prompts \(ConnectionError: 503"):
        run_trial(config)
    (tmp_path / "down").unlink()
    outcome = run_trial(config, find_checkpoint(config.directory).newest)
    assert outcome.validation["one"].mean == outcome.test["one"].mean == 1
    assert [step.step for step in read_steps(config.directory)] == [1, 2]


def test_what_is_not_scored_is_left_out_of_an_estimate():
    columns = {"a": [1.0, None, 0.0, 0.0], "b": [1.0, 1.0, 0.0, 0.0]}
    estimates = estimate_metrics(columns, 2, seed=0)
    assert estimates["a"].mean == pytest.approx(1 / 3)
    assert estimates["b"].mean == pytest.approx(0.5)
    assert estimates["a"].se > 0
    assert estimate_metrics({"c": [None, None]}, 1, seed=0) == {}


def test_a_reward_model_is_read_as_trl_reads_it(tmp_path):
    assert name_reward("org/Reward-Model-v1.5") == "Reward_Model_v1_5"
    folder = Path(write_policy(tmp_path / "judge-1"))
    config = AutoConfig.from_pretrained(folder, num_labels=1)
    torch.manual_seed(0)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    task = own(str(folder))
    assert task.rewards == ("judge_1",)
    problems = [Problem(prompt, "own", {}) for prompt in ("ab=", "c=", "ab=")]
    scored = score_here(task, problems, ["x", "yyyy", "x"], [1, 4, 1])
    first, second, third = scored.rewards["judge_1"]
    assert first == pytest.approx(third)
    assert first != pytest.approx(second)
    assert scored.failures["judge_1"] == {}
    alone = score_here(task, problems[:1], ["x"], [1]).rewards["judge_1"]
    assert alone[0] == pytest.approx(first, abs=1e-5), "padding has no effect"


def test_a_reward_model_that_cannot_be_read_is_refused(tmp_path):
    # Source: trl#1379; transformers draws the weights of a missing head at random.
    policy = write_policy(tmp_path / "policy")
    reasons = {
        str(policy): r"lacks trained weights: score.weight\n +fix",
        str(tmp_path / "absent"): r"reward model .*absent cannot be loaded",
    }
    for model, reason in reasons.items():
        with pytest.raises(UsageError, match=reason):
            score_here(own(model), [Problem("a", "own", {})], ["x"], [1])
