"""The exported folder: rewards without this package, prompts, the sandbox, and refusals."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from gdpo_tune import export
from gdpo_tune.core.errors import DataError, ExportError, UsageError
from gdpo_tune.core.parameters import build_shaping
from gdpo_tune.core.settings import DataSettings
from gdpo_tune.core.task_files import build_task, load_task_info
from gdpo_tune.core.task_info import order_prompts
from gdpo_tune.exporters import training_prompts
from gdpo_tune.exporters.runtime_prompts import list_facts
from gdpo_tune.exporters.write_export import export_training, format_run_script
from gdpo_tune.policies.load_policy import load_policy
from gdpo_tune.policies.prompt_format import PromptFormat
from tests.support.export import (
    export_folder,
    export_to,
    load_rewards,
    make_recipe,
    make_request,
    read_prompts,
    run_in_export,
)
from tests.support.paths import ROOT

COMPLETIONS = {
    "code": (
        "<think>x</think><answer>def f(x): return x</answer>",
        "def f(x):\n    return x + 1",
        "<answer>def f(x): return 1 / 0</answer>",
        "no code at all, and many words",
    ),
    "math": ("<think>1</think><answer>12</answer>", "12", "<answer>7</answer> and more", ""),
    "tools": (
        '<think>a</think>\n<tool_call>\n{"name": "pay", "parameters": {}}\n</tool_call>',
        "<think>a</think>\n<response>b</response>",
        "<tool_call>",
        "x",
    ),
}
VARIANTS = (
    (),
    ("space.length_shape=ramp", "space.reward_weights.format=0"),
    ("space.length_shape=overlong", "space.conditioning.format=length"),
)
PARTIAL = ("space.partial_credit=true", "space.conditioning.length=correctness")
SCORE = """
import json, os, sys
import rewards
import gdpo_tune
assert gdpo_tune.__file__ == os.path.abspath("modules/gdpo_tune/__init__.py"), "the copy"
assert not {"torch", "ray", "trl", "transformers", "numpy"} & set(sys.modules)
problems, completions, lengths = json.load(sys.stdin)
print(json.dumps(rewards.SCORER.score(problems, completions, lengths)))
"""


ALONE = [("code", PARTIAL), ("math", ()), ("tools", ("scoring=released",))]
CASES = [(space, variant) for space in ("math", "tools") for variant in VARIANTS]


@pytest.mark.parametrize(
    ("space", "variant", "is_alone"),
    [*((*case, True) for case in ALONE), *((*case, False) for case in CASES)],
    ids=str,
)
def test_rewards_without_the_package_are_those_of_a_trial(tmp_path, space, variant, is_alone):
    request = export_folder(tmp_path, *variant, space=space)
    spec, params = request.spec, request.params
    task = build_task(spec.task, spec.training, spec.sandbox, spec.data, params, spec.scoring)
    chosen = task.problems("train", 3, 0)
    problems = [problem for problem in chosen for _ in COMPLETIONS[space]]
    completions = [*COMPLETIONS[space]] * 3
    completions[0] = add_solution(space, chosen[0])
    lengths = [5, 26, 27, 64] * 3
    with task:
        scores = task.score(problems, completions, lengths)
    shaping = build_shaping(params, spec.training, load_task_info(spec.task, params))
    ours = shaping.apply(scores.rewards, lengths, scores.partial)
    texts = [json.dumps(asdict(problem)) for problem in problems]
    batch = texts, completions, lengths
    if is_alone:
        theirs = run_in_export(tmp_path, SCORE, batch)
    else:
        theirs = {n: list(v) for n, v in load_rewards(tmp_path).SCORER.score(*batch).items()}
    weighted = [reward.name for reward in make_recipe(request=request).rewards]
    assert {name: theirs[name] for name in weighted} == {
        name: list(ours[name]) for name in weighted
    }
    assert any(len(set(ours[name])) > 1 for name in weighted)


def add_solution(space, problem):
    return {"code": "<think></think><answer>{}</answer>", "math": "<answer>{}</answer>"}.get(
        space, "{}"
    ).format(problem.data["solution"])


def test_an_optional_reward_comes_along(tmp_path):
    export_folder(tmp_path, "space.reward_weights.bug_free=1")
    text = (tmp_path / "rewards.py").read_text()
    assert "'reward_weights.bug_free'" in text
    assert 'bug_free_reward = REWARDS["bug_free"]' in text


def test_prompts_are_in_the_order_in_which_the_trial_reads_them_first(tmp_path):
    request = export_folder(tmp_path, "search.seed=5", "training.train_prompts=40")
    task = build_task("code", request.spec.training, request.spec.sandbox, DataSettings(), {})
    problems = task.problems("train", 40, 0)
    rows = read_prompts(tmp_path)
    order = order_prompts(40, 40, seed=5)
    assert [row["prompt"] for row in rows] == [problems[index].prompt for index in order]
    assert json.loads(rows[0]["problem"]) == list_facts(problems[order[0]])


@pytest.mark.parametrize("space", COMPLETIONS)
def test_the_policy_comes_along_and_reads_the_tokens_of_a_trial(tmp_path, space):
    export_folder(tmp_path, "training.train_prompts=8", space=space)
    texts = [row["prompt"] for row in read_prompts(tmp_path)]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    _, own = load_policy("embedded" if space == "code" else f"embedded_{space}")
    assert tokenizer(texts)["input_ids"] == PromptFormat(own).encode(texts)


def test_a_policy_with_a_chat_template_gets_messages(tmp_path):
    changes = ("policy=Qwen/Qwen2.5-0.5B-Instruct", "training.train_prompts=4")
    export_folder(tmp_path, *changes)
    (system, user) = read_prompts(tmp_path)[0]["prompt"]
    assert (system["role"], user["role"]) == ("system", "user")
    assert "Think first" in system["content"]
    page = (tmp_path / "DIFFERENCES.md").read_text()
    assert "tokenizer of Qwen/Qwen2.5-0.5B-Instruct is not on this machine" in page


def test_prompts_that_a_task_writes_have_nothing_to_refer_to(tmp_path):
    with pytest.raises(DataError, match="task code writes its own prompts"):
        export_folder(tmp_path / "x", references_data=True)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("licences", "reason"),
    [(["cc-by-nc-4.0"], "its licence is cc-by-nc-4.0"), ([], "its licence is not known")],
)
def test_rows_that_may_not_be_passed_on_are_refused(monkeypatch, licences, reason):
    monkeypatch.setattr(training_prompts, "find_licences", lambda _: licences)
    data = DataSettings(source="someone/data", layout="mbpp")
    with pytest.raises(DataError, match=f"{reason}: --reference-data writes"):
        training_prompts.require_shareable(data)


def test_rows_with_a_free_licence_and_files_are_copied(monkeypatch):
    monkeypatch.setattr(training_prompts, "find_licences", lambda _: ["mit"])
    training_prompts.require_shareable(DataSettings(source="someone/data", layout="mbpp"))
    monkeypatch.setattr(training_prompts, "find_licences", None)
    training_prompts.require_shareable(DataSettings(source=__file__, layout="mbpp"))
    training_prompts.require_shareable(DataSettings())


def test_code_that_would_run_without_isolation_is_refused(tmp_path):
    with pytest.raises(ExportError, match="without isolation"):
        export_folder(tmp_path / "x", "sandbox.type=unsafe_no_isolation")
    assert not (tmp_path / "x").exists()


def test_modules_are_copied_as_they_are(tmp_path):
    export_folder(tmp_path, space="math")
    copies = [file for file in (tmp_path / "modules").rglob("*") if file.is_file()]
    assert tmp_path / "modules" / "gdpo_tune" / "rewards.py" in copies
    for copy in copies:
        original = ROOT / copy.relative_to(tmp_path / "modules")
        assert copy.read_bytes() == original.read_bytes()


def test_rewards_are_not_mixed_with_another_copy_of_the_package(tmp_path):
    export_folder(tmp_path, space="math")
    program = "import gdpo_tune, rewards"
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment
    )
    assert "was imported before" in done.stderr
    command[-1] = "import rewards, gdpo_tune; print(gdpo_tune.__file__)"
    said = subprocess.check_output(command, cwd=tmp_path, text=True, env=environment)
    assert said.strip() == str(tmp_path / "modules" / "gdpo_tune" / "__init__.py")


def test_commands_run_in_the_directory_of_an_export(tmp_path):
    export_folder(tmp_path, space="math")
    command = [sys.executable, "-m", "gdpo_tune.export", "--help"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    assert "--collect" in subprocess.check_output(command, cwd=tmp_path, text=True, env=environment)


@pytest.mark.parametrize(
    ("package", "message"),
    [
        ("pytest==0.1.0", "is installed, and this export is for 0.1.0"),
        ("no-such-package==1.0", "no-such-package is not installed"),
    ],
)
def test_another_version_of_the_library_is_refused(tmp_path, package, message):
    exported = replace(
        export_to("trl", make_recipe()), install=f"pip install {package}", run="echo ran"
    )
    (tmp_path / "run.sh").write_text(
        format_run_script(make_recipe(), exported, references_data=False)
    )
    command = ["bash", str(tmp_path / "run.sh")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert message in done.stderr
    assert f"pip install {package}" in done.stderr
    anyway = {**os.environ, "ANY_VERSION": "1"}
    assert subprocess.check_output(command, text=True, env=anyway) == "ran\n"


def test_a_page_of_a_folder_names_only_what_is_there(tmp_path):
    export_folder(tmp_path)
    page = (tmp_path / "DIFFERENCES.md").read_text()
    for name in re.findall(r"`(\w+\.(?:py|sh|yaml|parquet))`", page):
        assert (tmp_path / name).is_file(), name
    assert str(Path.home()) not in page


TEMPLATE = "{% for turn in messages %}{{ turn.role }}:{{ turn.content }}\n{% endfor %}assistant:"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE


@pytest.fixture
def chat_policy(tmp_path):
    """A function that writes the embedded policy with a chat template of its own."""

    def write(template):
        model, tokenizer = load_policy("embedded")
        tokenizer.chat_template = template
        directory = tmp_path / "chat"
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        return (f"policy={directory}", "training.train_prompts=4", "model.instructions=on")

    return write


def test_a_template_without_a_system_role_gets_one_message(tmp_path, chat_policy):
    export_folder(tmp_path / "out", *chat_policy(NO_SYSTEM))
    (message,) = read_prompts(tmp_path / "out")[0]["prompt"]
    assert message["role"] == "user"
    assert message["content"].startswith("Think first")


@pytest.mark.parametrize(("library", "differs"), [("trl", True), ("nemo-rl", False)])
def test_a_tag_that_the_template_opens_is_said(tmp_path, chat_policy, library, differs):
    export_folder(tmp_path / "out", *chat_policy(f"{TEMPLATE}<think>\n"), library=library)
    page = (tmp_path / "out" / "DIFFERENCES.md").read_text()
    assert ("with `<think>`, which completions then lack" in page) == differs


@pytest.mark.parametrize("library", ["trl", "verl"])
def test_an_export_begins_at_the_start_of_its_sweep(tmp_path, library):
    start = tmp_path / "trials" / "0" / "checkpoint-2"
    model, tokenizer = load_policy("embedded")
    model.save_pretrained(start)
    tokenizer.save_pretrained(start)
    (start / "trainer_state.json").write_text("{}")
    request = make_request(["start={steps: 2}", "training.train_prompts=16"])
    with pytest.raises(UsageError, match="no sweep has trained the policy at which"):
        export_training(request, library, "", tmp_path / "none")
    request = replace(request, start=start)
    _, directory = export_training(request, library, "", tmp_path / "out")
    copied = directory / "policy"
    assert (copied / "model.safetensors").read_bytes() == (start / "model.safetensors").read_bytes()
    assert not (copied / "trainer_state.json").exists()
    assert (
        "after the supervised start of its sweep (2 steps"
        in (directory / "DIFFERENCES.md").read_text()
    )
    load_policy(str(copied))


def test_an_export_names_the_start_of_a_large_policy(tmp_path):
    start = tmp_path / "trials" / "0" / "checkpoint-2"
    own = tmp_path / "own"
    model, tokenizer = load_policy("embedded")
    for directory in (start, own):
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    words = ["start={steps: 2}", "training.train_prompts=16", f"policy={own}"]
    request = replace(make_request(words), start=start)
    exported, directory = export_training(request, "trl", str(own), tmp_path / "out")
    assert f'model_name_or_path: "{start}"' in exported.text
    assert not (directory / "policy").exists()
    assert (
        f"the directory {start}, which another machine lacks"
        in (directory / "DIFFERENCES.md").read_text()
    )


OWN = """
from pathlib import Path

from gdpo_tune.rewards import integer, length
from gdpo_tune.tasks.custom import RewardFunctionTask

class Mine(RewardFunctionTask):
    reward_funcs = [integer, length]

    def rows(self):
        sums = Path(__file__).with_name("sums.txt").read_text()
        return [{"prompt": line} for line in sums.splitlines()]
"""
OWN_SPACE = """
task: mine.py:Mine
objectives: {integer: {direction: maximize, reference: 0}}
space: {group_size: 4, learning_rate: 1.0e-4, reward_weights: {integer: 1, length: 0.5}}
training: {steps: 4, train_prompts: 500, validation_prompts: 64, test_prompts: 64}
"""
SCORE_OWN = """
import json, sys
sys.path.insert(0, "exported")
import rewards
problem = json.dumps({"prompt": "1 + 2 = ", "family": "own", "data": {"prompt": "1 + 2 = "}})
texts = ["<answer>3</answer>", "<answer>three</answer>"]
print(json.dumps(rewards.SCORER.score([problem] * 2, texts, [5, 500])))
"""


def test_an_own_task_scores_with_the_library_that_the_export_has_and_without_its_rows(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "sums.txt").write_text("\n".join(f"{n // 40} + {n % 40} = " for n in range(1600)))
    (tmp_path / "mine.yaml").write_text(OWN_SPACE)
    assert export.main(["mine.yaml", "--to", "trl", "--out", "exported"]) == 0
    done = subprocess.run(
        [sys.executable, "-c", SCORE_OWN], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    scores = json.loads(done.stdout)
    assert scores == {"integer": [1.0, 0.0], "length": [1.0, 0.0]}
