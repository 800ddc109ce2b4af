"""Rewards that a language model gives: a server that is slow, fails, dies or answers nonsense.

Source of expected values: the fake server's mark is the last digit of the text that it reads.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from gdpo_tune import rewards
from gdpo_tune.core import task_files
from gdpo_tune.core.errors import TaskFileError, TrialFailure, UsageError
from gdpo_tune.core.settings import DataSettings, SandboxSettings
from gdpo_tune.core.trial_files import read_steps
from gdpo_tune.exporters.runtime import RewardScorer
from gdpo_tune.spec import load_spec
from gdpo_tune.spec.spec_warnings import list_warnings
from gdpo_tune.tasks import judge
from gdpo_tune.tasks.task_process import check_rewards
from gdpo_tune.training import worker_cache
from gdpo_tune.training.checkpoints import find_checkpoint
from gdpo_tune.training.evaluation import build_reward_functions
from tests.support.judge_server import TOKENS, JudgeServer
from tests.support.paths import ROOT
from tests.support.training import build_plain_trainer, write_policy
from tests.tasks.own_tasks import SETTINGS, build, run_trial, trial, written

pytest.importorskip("openai", reason="needs the extra judge")

TASK = """
from gdpo_tune.rewards import Judge, length
from gdpo_tune.tasks.custom import RewardFunctionTask

class Judged(RewardFunctionTask):
    reward_funcs = {
        "helpful": Judge(
            url="URL", model="m", prompt="{question}\\n{completion}", scale=(0, 9)MORE
        ),
        "length": length,
    }

    def rows(self):
        return [{"prompt": f"{n}?", "question": f"{n}?"} for n in range(300)]
"""
LINE = 7
"""Line on which it makes the judge."""
RUNNER = asyncio.Runner()
"""One loop for all calls of a function, as tasks and TRL's trainer have."""


pytestmark = pytest.mark.usefixtures("fresh_task_files")


@pytest.fixture
def judge_server():
    server = JudgeServer()
    yield server
    server.released.set()
    server.end()


@pytest.fixture
def build_judge(judge_server):
    built = []

    def build_one(**changes):
        usual = {"url": judge_server.url, "model": "m", "prompt": "{question}\n{completion}"}
        built.append(rewards.Judge(**{**usual, "scale": (0, 9), **changes}))
        return built[-1]

    yield build_one
    for function in built:
        if function._client is not None:
            RUNNER.run(function._client.close())


class Scored:
    """Values of one call, and what it logged."""

    def __init__(self, function, texts, **columns):
        self.metrics, self.failures = {}, {}
        columns = {"prompts": ["?"] * len(texts), "question": ["?"] * len(texts), **columns}
        self.values = RUNNER.run(
            function(
                completions=list(texts),
                log_metric=self.metrics.__setitem__,
                log_failure=self.failures.__setitem__,
                **columns,
            )
        )


def judged(server, more=""):
    return TASK.replace("URL", server.url).replace("MORE", more)


def count_lines(directory):
    files = directory.glob("judge/*.jsonl")
    return sum(len(file.read_text().splitlines()) for file in files)


def test_a_busy_server_gives_the_values_of_a_perfect_one(judge_server, build_judge):
    judge_server.delay, judge_server.first = 0.02, threading.Barrier(5)
    judge_server.statuses = dict.fromkeys(range(3, 100, 20), 429) | {15: 500, 40: 503}
    texts = [f"{n} is {n % 10}" for n in range(60)]
    scored = Scored(build_judge(concurrency=5), [*texts, *texts[:20]])
    assert scored.values == [float(n % 10) for n in [*range(60), *range(20)]]
    assert scored.failures == {}
    assert set(judge_server.answers.values()) == {1}, "equal texts are one call"
    assert len(judge_server.requests) == 60 + 4 + 2
    assert judge_server.most_open == 5
    assert scored.metrics == {
        "judge/judge/calls": 60,
        "judge/judge/prompt_tokens": 60 * TOKENS["prompt_tokens"],
        "judge/judge/completion_tokens": 60 * TOKENS["completion_tokens"],
        "judge/judge/cached": 20,
    }


def test_a_request_asks_for_a_number_on_the_scale(judge_server, build_judge):
    Scored(build_judge(request={"top_p": 0.5}), ["5"])
    (request,) = judge_server.requests
    form = request.pop("response_format")["json_schema"]
    assert form["strict"]
    assert form["schema"]["required"] == ["score"]
    assert form["schema"]["additionalProperties"] is False
    number = form["schema"]["properties"]["score"]
    assert (number["type"], number["minimum"], number["maximum"]) == ("number", 0, 9)
    end = 'Answer with JSON alone: {"score": NUMBER}, a number from 0 to 9.'
    messages = [{"role": "user", "content": f"?\n5\n\n{end}"}]
    assert request == {"model": "m", "messages": messages, "top_p": 0.5}
    assert judge_server.keys == {"Bearer no-key"}


def test_a_server_that_dies_for_a_while_costs_no_value(judge_server, build_judge):
    judge_server.delay = 0.05
    texts = [f"n{n} {n % 10}" for n in range(40)]
    found = []
    thread = threading.Thread(
        target=lambda: found.append(Scored(build_judge(concurrency=4), texts))
    )
    thread.start()
    while judge_server.answers.total() < 8:
        time.sleep(0.01)
    judge_server.end()
    time.sleep(2)
    judge_server.begin()
    thread.join()
    assert found[0].values == [float(n % 10) for n in range(40)]


@pytest.mark.parametrize(
    "said",
    [
        *('{"score": 9.5}', '{"score": -1}', '{"score": "7"}', '{"score": true}', '{"score": NaN}'),
        *('{"score": null}', '{"mark": 7}', "[7]", "7", "seven", "", '```json\n{"score": 7}\n```'),
    ],
)
def test_an_answer_that_is_no_mark_is_a_failure_and_no_value(judge_server, build_judge, said):
    judge_server.said = {"bad": said}
    function = build_judge()
    scored = Scored(function, ["bad", "8"])
    assert scored.values == [None, 8.0]
    assert scored.failures == {0: f"no score from 0 to 9: {said!r}"}
    assert scored.metrics["judge/judge/calls"] == 2, "it is paid for"
    judge_server.said = {}
    assert Scored(function, ["bad", "8"]).values == [0.0, 8.0], "a failure is asked for again"
    assert judge_server.answers == {"?\nbad": 2, "?\n8": 1}


def test_an_answer_or_a_text_that_cannot_be_read_costs_no_other_one(judge_server, build_judge):
    judge_server.broken = {"?\n5": b'{"choices": [', "?\n6": b'{"choices": "\xff"}'}
    scored = Scored(build_judge(), ["5", "6", "\ud83d 7", "8"])
    assert scored.values == [None, None, None, 8.0]
    reasons = ["Expecting value", "'utf-8' codec can't decode", "surrogates not allowed"]
    assert all(reason in scored.failures[row] for row, reason in enumerate(reasons))
    assert judge_server.answers == {"?\n5": 1, "?\n6": 1, "?\n8": 1}


def test_a_call_that_never_returns_has_a_limit(judge_server, build_judge):
    judge_server.most = 2
    function = build_judge(concurrency=1)
    function.open("helpful", None, 3.0)
    scored = Scored(function, ["1", "2", "3", "4"])
    assert scored.values == [1.0, 2.0, None, None]
    assert scored.failures == dict.fromkeys((2, 3), "no answer within 2.7 s")


def test_the_key_is_sent_and_shown_nowhere(judge_server, build_judge, monkeypatch, tmp_path):
    monkeypatch.setenv("MY_JUDGE", "s3cret")
    monkeypatch.setenv("OPENAI_API_KEY", "another")
    function = build_judge(key="MY_JUDGE")
    function.open("helpful", tmp_path, 600.0)
    judge_server.statuses = {1: 401}
    scored = Scored(function, ["1"])
    assert judge_server.keys == {"Bearer s3cret"}
    assert "no Bearer ***" in scored.failures[0]
    Scored(function, ["1"])
    (file,) = tmp_path.rglob("*.jsonl")
    (line,) = file.read_text().splitlines()
    assert "s3cret" not in line + repr(function)
    monkeypatch.setenv("MY_JUDGE", "changed")
    assert Scored(function, ["1"]).metrics["judge/helpful/cached"]


def test_what_is_missing_is_refused_before_work_with_file_and_line(
    judge_server, tmp_path, monkeypatch
):
    place = rf"reward helpful \(mine.py, line {LINE}\)"
    reason = rf"{place} needs the variable MY_JUDGE, a key without .*\n    fix: export MY_JUDGE="
    monkeypatch.delenv("MY_JUDGE", raising=False)
    for key in ("", "s3cret\n", "s3cret\r\nX: 1", "s3cr\u00e9t"):
        if key:
            monkeypatch.setenv("MY_JUDGE", key)
        with (
            build(tmp_path, judged(judge_server, ', key="MY_JUDGE"'), "Judged") as task,
            pytest.raises(UsageError, match=reason) as caught,
        ):
            check_rewards(task)
        assert "s3c" not in str(caught.value)
    monkeypatch.setattr(judge, "find_spec", lambda _: None)
    name = written(tmp_path, judged(judge_server))
    function = task_files.load_task_info(name.replace("Mine", "Judged")).build.reward_funcs
    with pytest.raises(UsageError, match=r"needs openai\n    fix: pip install"):
        function["helpful"].open("helpful", None, 1.0)
    assert not judge_server.requests


def test_a_server_that_is_not_there_is_refused_before_work(judge_server, tmp_path):
    text = judged(judge_server).replace("    def rows", "    time_limit = 4\n\n    def rows")
    judge_server.end()
    reason = rf"helpful \(mine.py, line {LINE}\) raised for each of 8 texts, .*(connect|within)"
    with build(tmp_path, text, "Judged") as task, pytest.raises(UsageError, match=reason):
        check_rewards(task)
    judge_server.begin()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ('url="localhost"', "url of a Judge: "),
        ('url="http://me:pass@host/v1"', "url of a Judge: it has a user or a password"),
        ('prompt="{question}"', r"prompt of a Judge: it has no \{completion\}"),
        ('prompt="{completion} {"', "expected '}'|Single '{'"),
        ("scale=(9, 0)", "scale of a Judge: write .LOWEST, HIGHEST"),
        ("scale=(0, float('inf'))", "scale of a Judge: "),
        ('key="sk-abc"', "key of a Judge: write the name of an environment variable"),
        ("concurrency=0", "concurrency of a Judge: write a number of at least 1"),
    ],
)
def test_arguments_that_are_refused(tmp_path, change, reason):
    good = {"url": '"http://h/v1"', "model": '"m"', "prompt": '"{completion}"', "scale": "(0, 9)"}
    name, _, value = change.partition("=")
    arguments = ", ".join(f"{k}={v}" for k, v in {**good, name: value}.items())
    text = f"from gdpo_tune.rewards import Judge\n\nJUDGE = Judge({arguments})\n"
    with pytest.raises(TaskFileError, match=rf"({reason}).*\(mine.py, line 3\)") as refused:
        task_files.load_task_info(written(tmp_path, text))
    assert "sk-abc" not in str(refused.value)
    assert "me:pass" not in str(refused.value)


def test_a_prompt_with_an_unknown_column_is_refused_with_the_columns(judge_server, tmp_path):
    text = judged(judge_server).replace('"{question}\\n', '"{qestion}\\n')
    reason = rf"line {LINE}\) has \{{qestion\}}, and there are .*question"
    with build(tmp_path, text, "Judged") as task, pytest.raises(UsageError, match=reason):
        check_rewards(task)


def test_failures_count_as_those_of_functions_that_raise(judge_server, tmp_path):
    judge_server.said = {"bad": "none"}
    with build(tmp_path, judged(judge_server), "Judged") as task:
        problems = task.problems("train", 16, 0)
        texts = ["bad", *(f"{n} 5" for n in range(15))]
        scores = task.score(problems, texts, [1] * 16)
        assert scores.rewards["helpful"] == [None] + [5.0] * 15
        assert scores.failures == {"helpful": {0: "no score from 0 to 9: 'none'"}, "length": {}}
        assert set(judge_server.answers.values()) == {1}, "none is tried alone"
        (function, _) = build_reward_functions(task, problems)
        ids = [[1]] * 16
        with pytest.raises(TrialFailure, match="reward helpful raised for 12% of 16 completions"):
            function(completions=["bad"] * 2 + texts[2:], completion_ids=ids, problem=range(16))


def test_a_judge_in_a_conversation_reads_turns(judge_server, build_judge):
    prompts = [[{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Why?"}]]
    replies = [{"role": "assistant", "content": "4"}]
    function = build_judge(prompt="{prompt}\n{completion}")
    assert Scored(function, [replies], prompts=prompts).values == [4.0]
    assert [*judge_server.answers] == ["system: Be kind.\n\nuser: Why?\n4"]


def test_a_judge_of_a_task_with_tools_reads_calls_and_answers(judge_server, build_judge):
    """Source: TRL's messages of a completion with tools."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    turns = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    turns += [
        {"role": "tool", "name": "add", "content": "2"},
        {"role": "assistant", "content": "4"},
    ]
    function = build_judge(prompt="{completion}")
    assert Scored(function, [turns], prompts=["?"]).values == [4.0]
    (asked,) = judge_server.answers
    assert asked == 'assistant: add({"a": 1})\n\ntool: 2\n\nassistant: 4'


@pytest.mark.system
def test_trials_and_processes_share_what_was_paid(judge_server, tmp_path):
    texts = [f"{n} {n % 10}" for n in range(60)]
    expected = [float(n % 10) for n in range(60)]
    names = ["0", "1", "0"]
    with ExitStack() as stack:
        tasks = []
        for name in names:
            tasks.append(stack.enter_context(build(tmp_path, judged(judge_server), "Judged")))
            tasks[-1].directory = tmp_path / "trials" / name
        problems = [tasks[0].problems("train", 1, 0)[0]] * 60

        def score(task, part):
            values = task.score(problems[part], texts[part], [1] * 60).rewards["helpful"]
            assert values == expected[part]

        score(tasks[0], slice(40))
        score(tasks[1], slice(20, 60))
        assert set(judge_server.answers.values()) == {1}
        score(tasks[0], slice(60))
        assert len(judge_server.answers) == judge_server.answers.total() == 60
        score(tasks[2], slice(60))
        texts = [f"more {text}" for text in texts]
        threads = [threading.Thread(target=score, args=(t, slice(60))) for t in tasks[:2]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        before = judge_server.answers.total()
        score(tasks[2], slice(60))
        assert judge_server.answers.total() == before <= 60 + 2 * 60


def test_a_line_that_a_full_disk_has_cut_costs_one_call(judge_server, build_judge, tmp_path):
    function = build_judge()
    function.open("helpful", tmp_path / "1", 600.0)
    Scored(function, ["1", "2", "3"])
    (file,) = tmp_path.rglob("*.jsonl")
    first, second, third = file.read_text().splitlines(keepends=True)
    file.write_text(first + second[:20] + third + '{"key": "unfinished')
    other = build_judge()
    other.open("helpful", tmp_path / "2", 600.0)
    assert Scored(other, ["1", "2", "3"]).values == [1.0, 2.0, 3.0]
    assert judge_server.answers.total() == 3 + 2


KILLED = """
import sys
from pathlib import Path
from tests.tasks.own_tasks import SETTINGS, run_trial, trial
run_trial(trial(sys.argv[1], Path(sys.argv[2]), settings=SETTINGS.replace(checkpoint_every=1)))
"""


@pytest.mark.system
@pytest.mark.integration
def test_a_training_that_is_killed_pays_nothing_twice(judge_server, tmp_path):
    settings = SETTINGS.replace(checkpoint_every=1)
    name = written(tmp_path, judged(judge_server), "Judged")
    whole = trial(name, tmp_path / "whole", settings=settings)
    expected = run_trial(whole)
    answers = judge_server.answers.total()
    assert set(judge_server.answers.values()) == {1}
    assert answers == count_lines(whole.directory) > 30
    steps = read_steps(whole.directory)
    calls = sum(step.metrics["train/judge/helpful/calls"] for step in steps)
    cached = sum(step.metrics["train/judge/helpful/cached"] for step in steps)
    assert 0 < calls < answers
    assert calls + cached == settings.steps * settings.completions_per_step
    assert steps[-1].metrics["train/rewards/helpful/failed"] == 0

    judge_server.answers.clear()
    judge_server.most = answers - 5
    worker_cache.release_worker_cache()
    config = trial(name, tmp_path / "killed", settings=settings)
    command = [sys.executable, "-c", KILLED, name, str(tmp_path / "killed")]
    paths = os.pathsep.join([str(ROOT), *sys.path])
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths})
    while count_lines(config.directory) < judge_server.most:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    judge_server.most = 10**9
    resumed = run_trial(config, find_checkpoint(config.directory).newest)
    assert set(judge_server.answers.values()) == {1}
    assert judge_server.answers.total() == answers
    assert resumed.test == expected.test
    assert resumed.validation == expected.validation


def test_an_export_scores_without_what_was_kept(judge_server, tmp_path):
    name = written(tmp_path, judged(judge_server), "Judged")
    params = {"length_shape": "step"}
    scorer = RewardScorer(
        *(name, SETTINGS, SandboxSettings(), DataSettings(), params, "strict", {"helpful": 1.0})
    )
    problem = json.dumps({"prompt": "?", "family": "own", "data": {"question": "?"}})
    assert scorer.score([problem], ["is 6"], [3]) == {"helpful": [6.0]}
    assert [*tmp_path.glob("**/judge")] == []


def test_a_trainer_of_trl_takes_a_judge(build_judge, tmp_path):
    policy = write_policy(tmp_path / "policy")
    judges = [build_judge(prompt="{completion}\n7")]
    trainer = build_plain_trainer(policy, tmp_path / "out", reward_funcs=judges, max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["rewards/judge/mean"] == 7
    client, judges[0]._client = judges[0]._client, None
    asyncio.run_coroutine_threadsafe(client.close(), trainer.async_loop).result()


@pytest.mark.parametrize(("weight", "count"), [(1, 1), (0, 0)])
def test_a_judge_as_reward_and_objective_is_warned_about(judge_server, tmp_path, weight, count):
    name = written(tmp_path, judged(judge_server), "Judged")
    (tmp_path / "own.yaml").write_text(
        f"task: {name}\nobjectives: {{helpful: {{direction: maximize, reference: 0}}, "
        "mean_length: {direction: minimize, reference: 9}}\n"
        f"space: {{group_size: [4, 8], reward_weights: {{helpful: {weight}, length: 1}}}}\n"
    )
    found = [text for text in list_warnings(load_spec(tmp_path / "own.yaml")) if "judge" in text]
    assert len(found) == count
    assert all(text.startswith("objectives.helpful: reward_weights.helpful is") for text in found)


def test_the_example_of_the_guide_scores(judge_server, tmp_path, monkeypatch):
    guide = (ROOT / "docs" / "own_task.md").read_text().partition("## A judge")[2]
    code = guide.partition("```python\n")[2].partition("```")[0]
    assert "http://localhost:8000/v1" in code
    code = code.replace("http://localhost:8000/v1", judge_server.url)
    rows = [json.dumps({"question": f"What is {n}?"}) for n in range(100)]
    (tmp_path / "questions.jsonl").write_text("\n".join(rows))
    monkeypatch.chdir(tmp_path)
    name = written(Path(), code, "Judged")
    info = task_files.load_task_info(name)
    assert info.rewards == {"helpful": (0, 10), "length": (0, 1)}
    assert info.judges == ("helpful",)
    with closing(build(Path(), code, "Judged")) as task:
        problem = task.problems("train", 1, 0)[0]
        assert task.score([problem], ["It is 9"], [3]).rewards["helpful"] == [9.0]
    (asked,) = judge_server.answers
    assert f"Question: {problem.prompt}\nAnswer: It is 9" in asked
