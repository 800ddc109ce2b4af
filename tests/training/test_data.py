"""Data sets from end to end: right programs pass in the sandbox, and trials train on them."""

import dataclasses
import json
import logging

import pytest

from gdpo_tune import cli
from gdpo_tune.core.errors import DataError
from gdpo_tune.core.parameters import list_parameters
from gdpo_tune.core.registry import describe_layout
from gdpo_tune.core.settings import DataSettings, SandboxSettings, TrainingSettings
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.spec import load_spec
from gdpo_tune.tasks import dataset
from gdpo_tune.tasks.code import TASK, CodeTask
from gdpo_tune.tasks.columns import RowError
from gdpo_tune.training import train, worker_cache
from tests.support.data import read_rows, read_solutions, write_enlarged
from tests.support.paths import ROOT

pytestmark = pytest.mark.integration


LAYOUTS = ("mbpp", "mbpp_sanitized", "humaneval", "apps", "code_contests")
FEW = TrainingSettings(
    dead_steps=0,  # the embedded policy earns nothing on these problems
    steps=2,
    completions_per_step=16,
    train_prompts=6,
    validation_prompts=2,
    test_prompts=2,
    evaluate_every=2,
    checkpoint_every=2,
)


@pytest.fixture(autouse=True)
def close_cache():
    yield
    worker_cache.release_worker_cache()
    dataset.collect_once.cache_clear()


def problems(layout):
    """Yield each usable problem of a file with its right program."""
    adapter = describe_layout(layout).convert
    for row, solution in zip(read_rows(layout), read_solutions(layout), strict=True):
        try:
            yield adapter(row), solution
        except RowError:
            continue


@pytest.fixture(scope="module")
def task():
    with CodeTask(TrainingSettings()) as task:
        yield task


@pytest.mark.parametrize("layout", LAYOUTS)
def test_right_programs_pass_and_those_of_other_problems_do_not(layout, task):
    batch, right = zip(*problems(layout), strict=True)
    chats = [f"Sure:\n```python\n{program}\n```\nDone." for program in right]
    assert task.score(batch, chats, [9] * len(batch)).rewards["correctness"] == [1.0] * len(batch)
    other = [*chats[1:], chats[0]]
    assert task.score(batch, other, [9] * len(batch)).rewards["correctness"] == [0.0] * len(batch)


TEXT = {"mbpp": "text", "code_contests": "description"}


def trial(directory, layout, **changes) -> TrialConfig:
    defaults = {name: info.default for name, info in list_parameters(TASK).items()}
    params = {**defaults, "group_size": 4, "learning_rate": 1e-4}
    config = TrialConfig("code", "embedded", 0, params, FEW, directory / "trial")
    data = write_enlarged(layout, TEXT[layout], directory)
    return dataclasses.replace(config, data=data.replace(**changes))


@pytest.mark.parametrize("layout", ["mbpp", "code_contests"])
def test_the_code_task_trains_on_a_data_set(layout, tmp_path):
    reports = []
    config = trial(tmp_path, layout)
    outcome = train(config, resume=None, report=lambda m, _: reports.append(m))
    assert [report.step for report in reports] == [1, 2]
    assert set(outcome.test) == set(TASK.metrics)
    prompts = {f"({time}) {problem.prompt}" for problem, _ in problems(layout) for time in range(5)}
    with worker_cache.open_worker_cache(config) as cache:
        trained_on = {problem.prompt for problem in cache.load_split("train").problems}
        held_out = {problem.prompt for problem in cache.load_split("test").problems}
    assert trained_on <= prompts
    assert not trained_on & held_out
    assert f"{layout}.jsonl: {5 * len(read_rows(layout))} rows" in outcome.environment["data"]


def test_long_prompts_are_left_out_and_counted_and_too_many_are_refused(tmp_path, caplog):
    def kept(limit):
        config = trial(tmp_path, "mbpp", max_prompt_length=limit)
        with worker_cache.open_worker_cache(config) as cache:
            return [len(prompt) for prompt in cache.load_split("train").prompts]

    every = sorted(kept(1024))
    assert len(every) == FEW.train_prompts
    longest = every.count(every[-1])
    assert longest <= 3
    caplog.set_level(logging.WARNING, "gdpo_tune.training")
    assert sorted(kept(every[-1] - 1)) == every[:-longest]
    assert f"{longest} of 6 train prompts are left out" in caplog.text
    with pytest.raises(DataError, match=rf"6 of 6 train prompts .* the longest has {every[-1]}:"):
        kept(3)


def requirements(*overrides):
    return cli.preflight(
        load_spec(ROOT / "search_spaces" / "code.yaml", ["tracking.required=false", *overrides])
    )


def test_the_command_reads_and_describes_the_data_before_it_starts(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    source = write_enlarged("mbpp", "text", tmp_path).source
    broken = {**read_rows("mbpp")[0], "test_list": []}
    with open(source, "a") as file:
        file.write(f"\n{json.dumps(broken)}")
    section = f"data={{source: '{source}', layout: mbpp}}"
    description = requirements(
        section,
        "training.train_prompts=6",
        "training.validation_prompts=2",
        "training.test_prompts=2",
    )
    assert "81 rows, 80 distinct prompts" in description["data"]
    assert "1 left out" in description["data"]
    assert "column test_list: no test" in description["data"]
    with pytest.raises(DataError, match=r"training\.train_prompts = 2048"):
        requirements(section)


def test_another_data_set_gets_another_cache(tmp_path):
    config = trial(tmp_path, "mbpp")
    with (
        worker_cache.open_worker_cache(config) as first,
        worker_cache.open_worker_cache(config) as again,
    ):
        assert first is again
    with worker_cache.open_worker_cache(trial(tmp_path, "code_contests")) as other:
        assert other is not first
    own = dataclasses.replace(config, data=DataSettings(), sandbox=SandboxSettings())
    with worker_cache.open_worker_cache(own) as embedded:
        assert embedded.load_split("train").problems[0].family in ("rate", "chain", "list")
