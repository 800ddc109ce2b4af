"""Every shipped search space and every command of the README, run as commands."""

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from importlib import import_module

import mlflow
import pytest

from gdpo_tune.results.merge_request import parse_target
from gdpo_tune.results.open_sweep import read_sweep
from gdpo_tune.results.picks import parse_pick
from gdpo_tune.spec import load_spec
from tests.support.paths import ROOT

FOR_GPUS = sorted((ROOT / "search_spaces").glob("*_qwen.yaml"))
WORD_PROBLEMS = ROOT / "search_spaces" / "word_problems.yaml"
"""Its policy and data come from the Hub."""
CALCULATOR = ROOT / "search_spaces" / "calculator.yaml"
"""Its task is a file beside it."""
SPACES = sorted({*(ROOT / "search_spaces").glob("*.yaml")} - {*FOR_GPUS, WORD_PROBLEMS, CALCULATOR})
SHORT = (
    *("search.budget.completions=400", "search.merges.budget=0", "search.replicates.max_runs=0"),
    *("training.completions_per_step=8", "training.validation_prompts=8"),
    "training.test_prompts=8",
)
BEGUN = range(5, 9)
"""Configurations that a small budget begins: those of the wide rung, and most that begin anew."""
RUN_BY_A_PERSON = ("pip ", "pytest", "mlflow ui")
PATIENCE = 1_200
"""Seconds for a command that takes one minute on idle cores: with two cores for four busy processes
the short sweep took more than 300.
"""

pytestmark = pytest.mark.integration


def get_stem(path):
    return path.stem


def run_command(arguments, directory, timeout=PATIENCE):
    """Run `python -m gdpo_tune.<arguments>` in `directory`, without an existing cluster."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_ADDRESS")}
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=directory,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


@pytest.fixture
def run_here(monkeypatch, capsys):
    """A function that runs such arguments in this process and returns what they print."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def run(arguments, directory):
        monkeypatch.chdir(directory)
        assert import_module(arguments[0]).main(arguments[1:]) == 0
        return capsys.readouterr().out

    return run


def list_runs(directory, experiment):
    client = mlflow.MlflowClient(f"sqlite:///{directory}/mlflow.db")
    record = client.get_experiment_by_name(experiment)
    assert record is not None
    return client.search_runs([record.experiment_id], max_results=1000)


def list_readme_commands():
    """List the indented lines of the README that call this package."""
    prose = "".join((ROOT / "README.md").read_text().split("```")[::2])
    lines = re.findall(r"^    (\S.*)$", prose, re.MULTILINE)
    parts = [part for line in lines for part in line.split(" && ")]
    return [part for part in parts if not part.startswith(RUN_BY_A_PERSON)]


def check_outputs(directory, name, printed):
    """Check what a sweep leaves for people, and return its runs in MLflow."""
    runs = list_runs(directory, name)
    roles = [run.data.tags["role"] for run in runs]
    always = {"published", "search", "sweep", "untrained"}
    assert always <= set(roles) <= always | {"checkpoint", "merge", "replicate"}
    assert roles.count("sweep") == 1
    assert (directory / "runs" / name / "report.html").stat().st_size > 1_000_000
    assert (directory / "runs" / name / "front.png").stat().st_size > 10_000
    assert "correctness_se" in (directory / "runs" / name / "front.csv").read_text()
    assert "knee" in printed
    return runs


@pytest.mark.system
@pytest.mark.parametrize("space", [path for path in SPACES if path.stem != "code"], ids=get_stem)
def test_a_shipped_space_is_searched(space, tmp_path):
    """`code.yaml` is that of README, see test_readme_commands.py."""
    words = [word for override in SHORT for word in ("--set", override)]
    done = run_command(["gdpo_tune.sweep", str(space), *words], tmp_path)
    runs = check_outputs(tmp_path, space.stem, done.stdout)
    assert sum(run.data.tags["role"] == "search" for run in runs) in BEGUN


ON_GPUS = (
    *("# Needed where it trains, and missing on this machine", "# GPU memory: "),
    *("vllm; vLLM gets", "policy: Qwen/Qwen2.5"),
)
"""What this machine lacks for it, such as data, packages and a GPU, is noted."""
FROM_START = (
    "# Start: 40 steps of 8 demonstrations",
    "# A trial: 1 worker with 1 CPU and 0 GPUs",
)


@pytest.mark.parametrize("space", [*FOR_GPUS, WORD_PROBLEMS], ids=get_stem)
def test_a_shipped_space_of_a_policy_from_the_hub_is_valid(space, run_here):
    shown = run_here(["gdpo_tune.sweep", str(space), "--dry-run"], ROOT)
    expected = FROM_START if space == WORD_PROBLEMS else ON_GPUS
    assert all(text in shown for text in expected)


@pytest.mark.system
def test_word_problems_are_learned_from_a_start_by_a_small_policy(tmp_path):
    """In the columns of `ChilleD/SVAMP`; the policy of the file itself is tried by `make real`."""
    rows = [
        {
            "Body": f"Ann has {first} shells and finds {second} more.",
            "Question": "How many has she?",
            "Equation": f"( {first}.0 + {second}.0 )",
            "Answer": float(first + second),
        }
        for first, second in itertools.product(range(2, 14), repeat=2)
    ]
    data = tmp_path / "svamp.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    changes = [
        *("policy=embedded_math", f"data.source={data}", "data.split=null", "model.lora_rank=2"),
        *("data.max_prompt_length=512", "training.max_completion_length=64"),
        *("training.train_prompts=96", "start.steps=3", *SHORT),
    ]
    words = [word for change in changes for word in ("--set", change)]
    run_command(["gdpo_tune.sweep", str(WORD_PROBLEMS), *words], tmp_path)
    records = read_sweep(str(tmp_path / "runs" / "word_problems"), "test").records
    assert {"start", "untrained", "published"} <= {record.role for record in records}
    assert {record.state for record in records} <= {"complete", "pruned"}
    assert {"gdpo", "grpo"} == {r.params["normalization"] for r in records if r.role == "search"}


@pytest.mark.system
def test_a_policy_that_calls_a_tool_is_searched(tmp_path):
    shutil.copytree(CALCULATOR.parent, tmp_path / "search_spaces")
    changes = (
        "start.steps=60",
        "training.steps=2",
        "search.trials=2",
        "search.checkpoints.budget=0",
    )
    words = [w for c in (*changes, *SHORT[1:], "training.train_prompts=64") for w in ("--set", c)]
    run_command(["gdpo_tune.sweep", "search_spaces/calculator.yaml", *words], tmp_path)
    records = read_sweep(str(tmp_path / "runs" / "calculator"), "test").records
    assert {record.state for record in records} <= {"complete", "pruned"}
    (start,) = [record for record in records if record.role == "start"]
    assert start.test["tool_calls"].mean > 0
    report = (tmp_path / "runs" / "calculator" / "report.html").read_text(encoding="utf-8")
    assert "tool: " in report, "turns of completions"


@pytest.mark.parametrize("line", list_readme_commands())
def test_the_readme_commands_exist(line, tmp_path, run_here):
    """Each names a command and a file that ship; the sweeps themselves run above."""
    words = shlex.split(line, comments=True)
    assert words[:2] == ["python", "-m"]
    if words[2] == "gdpo_tune.init":
        assert "wrote" in run_here(words[2:], tmp_path)
        return
    if not any(word.endswith(".yaml") for word in words):
        # What these read is what a sweep of above leaves.
        parsed = import_module(words[2]).build_parser().parse_args(words[3:])
        assert getattr(parsed, "pick", None) is None or parse_pick(parsed.pick)
        assert words[2] != "gdpo_tune.merge" or parse_target(parsed.toward, parsed.prefer)
        return
    (file,) = [word for word in words if word.endswith(".yaml")]
    assert (ROOT / file).exists()
    if words[2] == "gdpo_tune.sweep":
        dry = [*words[2:], *([] if "--dry-run" in words else ["--dry-run"])]
        assert "completions" in run_here(dry, ROOT)


@pytest.mark.slow
@pytest.mark.parametrize("space", SPACES, ids=get_stem)
def test_a_shipped_space_in_full(space, tmp_path):
    run_command(["gdpo_tune.sweep", str(space)], tmp_path, timeout=3600)
    runs = list_runs(tmp_path, space.stem)
    roles = Counter(run.data.tags["role"] for run in runs)
    # few long trainings and their merges, with all of the budget
    assert roles["merge"] > roles["search"] >= 2
    assert roles["untrained"] == roles["published"] == 1
    spent = sum(run.data.metrics.get("cost/completions", 0) for run in runs)
    assert 0.8 <= spent / load_spec(space).search.budget.completions <= 1
    front = [run for run in runs if run.data.tags.get("pareto") == "true"]
    assert len(front) >= 3
    spans = {}
    for name in load_spec(space).objectives:
        values = [run.data.metrics[f"test/{name}"] for run in front]
        spans[name] = max(values) - min(values)
    assert spans.pop("correctness") >= 0.2
    assert max(spans.values()) >= 0.3
