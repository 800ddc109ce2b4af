"""The exported folder: rewards without this package, prompts, policy, programs, odd names."""

import ast
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
from gdpo_tune.exporters.page import PAGE
from gdpo_tune.exporters.runtime_prompts import list_facts
from gdpo_tune.exporters.write_export import export_training, format_run_script
from gdpo_tune.policies.load_policy import load_policy
from gdpo_tune.policies.prompt_format import PromptFormat
from gdpo_tune.results.retrain import build_request_from_file
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

ELSEWHERE = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}


def read_page(directory):
    return (directory / PAGE).read_text()


# Rewards

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
        *("<think>a</think>\n<response>b</response>", "<tool_call>", "x"),
    ),
}
RIGHT = {"code": "<think></think><answer>{}</answer>", "math": "<answer>{}</answer>", "tools": "{}"}
PARTIAL = ("space.partial_credit=true", "space.conditioning.length=correctness")
ALONE = [("code", PARTIAL), ("math", ()), ("tools", ("scoring=released",))]
VARIANTS = (
    (),
    ("space.length_shape=ramp", "space.reward_weights.format=0"),
    ("space.length_shape=overlong", "space.conditioning.format=length"),
)
HERE = [(space, variant) for space in ("math", "tools") for variant in VARIANTS]
SCORE = """
import json, os, sys
import rewards
import gdpo_tune
assert gdpo_tune.__file__ == os.path.abspath("modules/gdpo_tune/__init__.py"), "the copy"
assert not {"torch", "ray", "trl", "transformers", "numpy"} & set(sys.modules)
problems, completions, lengths = json.load(sys.stdin)
print(json.dumps(rewards.SCORER.score(problems, completions, lengths)))
"""


@pytest.mark.parametrize(
    ("space", "variant", "is_alone"),
    [*((*case, True) for case in ALONE), *((*case, False) for case in HERE)],
    ids=str,
)
def test_rewards_without_the_package_are_those_of_a_trial(tmp_path, space, variant, is_alone):
    request = export_folder(tmp_path, *variant, space=space)
    spec, params = request.spec, request.params
    task = build_task(spec.task, spec.training, spec.sandbox, spec.data, params, spec.scoring)
    chosen = task.problems("train", 3, 0)
    problems = [problem for problem in chosen for _ in COMPLETIONS[space]]
    completions = [*COMPLETIONS[space]] * 3
    completions[0] = RIGHT[space].format(chosen[0].data["solution"])
    lengths = [5, 26, 27, 64] * 3
    with task:
        scores = task.score(problems, completions, lengths)
    shaping = build_shaping(params, spec.training, load_task_info(spec.task, params))
    ours = shaping.apply(scores.rewards, lengths, scores.partial)
    batch = [json.dumps(asdict(problem)) for problem in problems], completions, lengths
    if is_alone:
        theirs = run_in_export(tmp_path, SCORE, batch)
    else:
        theirs = {n: list(v) for n, v in load_rewards(tmp_path).SCORER.score(*batch).items()}
    weighted = [reward.name for reward in make_recipe(request=request).rewards]
    assert {n: theirs[n] for n in weighted} == {n: list(ours[n]) for n in weighted}
    assert any(len(set(ours[name])) > 1 for name in weighted)


def test_an_optional_reward_comes_along(tmp_path):
    export_folder(tmp_path, "space.reward_weights.bug_free=1")
    text = (tmp_path / "rewards.py").read_text()
    assert "'reward_weights.bug_free'" in text
    assert 'bug_free_reward = REWARDS["bug_free"]' in text


def test_code_that_would_run_without_isolation_is_refused(tmp_path):
    with pytest.raises(ExportError, match="without isolation"):
        export_folder(tmp_path / "x", "sandbox.type=unsafe_no_isolation")
    assert not (tmp_path / "x").exists()


@pytest.fixture(scope="module")
def math(tmp_path_factory):
    """An export of the task math, which no test changes."""
    directory = tmp_path_factory.mktemp("math")
    export_folder(directory, space="math")
    return directory


def test_modules_are_copied_as_they_are(math):
    files = [file for file in (math / "modules").rglob("*") if file.is_file()]
    copies = [file for file in files if file.parent.name != "__pycache__"]
    assert math / "modules" / "gdpo_tune" / "rewards.py" in copies
    for copy in copies:
        original = ROOT / copy.relative_to(math / "modules")
        assert copy.read_bytes() == original.read_bytes()


def test_rewards_are_not_mixed_with_another_copy_of_the_package(math):
    options = {"cwd": math, "capture_output": True, "text": True, "env": ELSEWHERE}
    command = [sys.executable, "-c", "import gdpo_tune, rewards"]
    done = subprocess.run(command, check=False, **options)
    assert "was imported before" in done.stderr
    command[-1] = "import rewards, gdpo_tune; print(gdpo_tune.__file__)"
    done = subprocess.run(command, check=True, **options)
    assert done.stdout.strip() == str(math / "modules" / "gdpo_tune" / "__init__.py")


def test_commands_run_in_the_directory_of_an_export(math):
    command = [sys.executable, "-m", "gdpo_tune.export", "--help"]
    assert "--collect" in subprocess.check_output(command, cwd=math, text=True, env=ELSEWHERE)


# Tasks of a file

TASK = """
from gdpo_tune.tasks.custom import RewardFunctionTask
{imports}

def right(completions, answer, **_):
    return [float(wanted in text) for wanted, text in zip(answer, completions)]

def {second}(lengths, **_):
    return [float(length <= 4) for length in lengths]

class Sums(RewardFunctionTask):
    reward_funcs = [right, {second}]

    def rows(self):
        return [
            {{"prompt": f"{{a}}+{{b}}=", "answer": str(a + b), "more": {more}}}
            for a in range(30)
            for b in range(30)
        ]
"""
SPACE = """
policy: embedded_math
objectives: {{right: {{direction: maximize, reference: 0}}}}
space: {{normalization: gdpo, group_size: 8, learning_rate: 1e-5,
        reward_weights: {{right: 1, {second}: 0.5}}}}
training: {{train_prompts: 20, validation_prompts: 8, test_prompts: 8}}
"""


def export_own_task(directory, file="sums.py", second="short", more="0", imports="", place=None):
    """Export a task in a file, and return the folder."""
    (directory / file).write_text(TASK.format(second=second, more=more, imports=imports))
    place, task = place or directory / "x.yaml", json.dumps(f"{directory / file}:Sums")
    place.parent.mkdir(exist_ok=True)
    place.write_text(f"task: {task}{SPACE.format(second=second)}")
    export_training(build_request_from_file(place, []), "trl", "", directory / "out")
    return directory / "out"


SCORE_OWN = """
import json, sys
import rewards
problem, expected = json.load(sys.stdin)
for name, value in expected.items():
    assert getattr(rewards, f"{name}_reward")([""], [[1]], [problem]) == [value]
print(json.dumps(rewards.SCORER.score([problem], ["no"], [4])))
"""


def score_own_task(out, second="short"):
    """Return what the directory's rewards give for a wrong completion of 4 tokens."""
    batch = read_prompts(out)[0]["problem"], {"right": 0.0, second: 1.0}
    return run_in_export(out, SCORE_OWN, batch)


@pytest.mark.parametrize(
    ("file", "second"), [("rewards.py", "short"), ("my\"'new\nline.py", "judge")]
)
def test_a_task_file_and_a_reward_may_have_any_name(tmp_path, file, second):
    out = export_own_task(tmp_path, file, second)
    assert score_own_task(out, second) == {"right": [0.0], second: [1.0]}
    assert (out / "task.py").read_bytes() == (tmp_path / file).read_bytes()
    assert "files that your task reads, which are not here" in read_page(out)


def test_modules_beside_a_task_come_along(tmp_path, monkeypatch):
    parts = tmp_path / "parts_of_a_task"
    parts.mkdir()
    (tmp_path / "near_a_task.py").write_text("from parts_of_a_task.one import number\n")
    (parts / "__init__.py").write_text("")
    (parts / "one.py").write_text("from json import dumps as number\n")
    (tmp_path / "unused.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    out = export_own_task(tmp_path, imports="import json, near_a_task")
    assert score_own_task(out) == {"right": [0.0], "short": [1.0]}
    copied = {
        str(f.relative_to(out / "task_modules")) for f in (out / "task_modules").rglob("*.py")
    }
    assert copied == {"near_a_task.py", "parts_of_a_task/__init__.py", "parts_of_a_task/one.py"}


@pytest.mark.parametrize("more", ["(a, b)", "{a: b}", "{a}", "b'x'", "'\\ud800'", "[(a,)]"])
def test_rows_that_json_would_change_are_refused(tmp_path, more):
    with pytest.raises(DataError, match=r"the row of the prompt '\d+\+\d+=' cannot be written"):
        export_own_task(tmp_path, more=more)
    assert not (tmp_path / "out").exists()


def test_rows_may_hold_all_of_json(tmp_path):
    more = "[float('nan'), None, {'a': [True]}]"
    assert score_own_task(export_own_task(tmp_path, more=more))["right"] == [0.0]


def test_a_note_with_a_new_line_stays_a_comment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = export_own_task(tmp_path, place=Path("a\nb/space.yaml"))
    assert "a b/space.yaml\n" in (out / "grpo.yaml").read_text()


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
SCORE_WITHOUT_ROWS = """
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
    Path("mine.py").write_text(OWN)
    Path("sums.txt").write_text("\n".join(f"{n // 40} + {n % 40} = " for n in range(1600)))
    Path("mine.yaml").write_text(OWN_SPACE)
    assert export.main(["mine.yaml", "--to", "trl", "--out", "exported"]) == 0
    said = subprocess.check_output([sys.executable, "-c", SCORE_WITHOUT_ROWS], text=True)
    assert json.loads(said) == {"integer": [1.0, 0.0], "length": [1.0, 0.0]}


# Prompts and policies


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
    export_folder(tmp_path, "policy=Qwen/Qwen2.5-0.5B-Instruct", "training.train_prompts=4")
    (system, user) = read_prompts(tmp_path)[0]["prompt"]
    assert (system["role"], user["role"]) == ("system", "user")
    assert "Think first" in system["content"]
    unknown = "tokenizer of Qwen/Qwen2.5-0.5B-Instruct is not on this machine"
    assert unknown in read_page(tmp_path)


def test_prompts_that_a_task_writes_have_nothing_to_refer_to(tmp_path):
    with pytest.raises(DataError, match="task code writes its own prompts"):
        export_folder(tmp_path / "x", references_data=True)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("source", "licences", "reason"),
    [
        ("someone/data", ["cc-by-nc-4.0"], "its licence is cc-by-nc-4.0"),
        ("someone/data", [], "its licence is not known"),
        ("someone/data", ["mit"], ""),
        (__file__, None, ""),
        ("", None, ""),
    ],
)
def test_rows_that_may_not_be_passed_on_are_refused(monkeypatch, source, licences, reason):
    find = None if licences is None else lambda _: licences
    monkeypatch.setattr(training_prompts, "find_licences", find)
    data = DataSettings(source=source, layout="mbpp" if source else "")
    if not reason:
        training_prompts.require_shareable(data)
        return
    with pytest.raises(DataError, match=f"{reason}: --reference-data writes"):
        training_prompts.require_shareable(data)


ROWS = [{"question": f"What is {n} plus 1?", "answer": f"#### {n + 1}"} for n in range(60)]


def export_data(directory, *changes, rows=ROWS, name="data.jsonl", **options):
    """Export rows in a file, and return the folder."""
    (directory / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    sizes = ("training.validation_prompts=2", "training.test_prompts=2")
    source = f"data.source={json.dumps(str(directory / name))}"
    words = (source, "data.layout=gsm8k", *sizes, *changes)
    export_folder(directory / "out", *words, space="math", **options)
    return directory / "out"


def test_data_whose_prompts_are_all_too_long_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"every prompt has more than data\.max_prompt_length = 1"):
        export_data(tmp_path, "data.max_prompt_length=1")
    assert not (tmp_path / "out").exists()


def test_rows_with_half_a_character_are_left_out_and_the_place_of_the_data_too(tmp_path):
    broken = {"question": "What is \ud800?", "answer": "#### 1"}
    out = export_data(tmp_path, rows=[broken, *ROWS])
    assert len(read_prompts(out)) == 16
    assert str(tmp_path) not in (out / "rewards.py").read_text()


def test_a_name_of_data_may_hold_quotes(tmp_path):
    out = export_data(tmp_path, name='my """data\n"""\\.jsonl', references_data=True)
    ast.parse((out / "make_prompts.py").read_text())


TEMPLATE = "{% for turn in messages %}{{ turn.role }}:{{ turn.content }}\n{% endfor %}assistant:"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE


def save_embedded(*directories, template=None):
    model, tokenizer = load_policy("embedded")
    tokenizer.chat_template = template
    for directory in directories:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)


def export_chat(tmp_path, template, library="trl"):
    """Export the embedded policy with a chat template of its own."""
    save_embedded(tmp_path / "chat", template=template)
    words = (f"policy={tmp_path / 'chat'}", "training.train_prompts=4", "model.instructions=on")
    export_folder(tmp_path / "out", *words, library=library)
    return tmp_path / "out"


def test_a_template_without_a_system_role_gets_one_message(tmp_path):
    (message,) = read_prompts(export_chat(tmp_path, NO_SYSTEM))[0]["prompt"]
    assert message["role"] == "user"
    assert message["content"].startswith("Think first")


@pytest.mark.parametrize(("library", "differs"), [("trl", True), ("nemo-rl", False)])
def test_a_tag_that_the_template_opens_is_said(tmp_path, library, differs):
    page = read_page(export_chat(tmp_path, f"{TEMPLATE}<think>\n", library))
    assert ("with `<think>`, which completions then lack" in page) == differs


STARTED = ["start={steps: 2}", "training.train_prompts=16"]


@pytest.mark.parametrize("library", ["trl", "verl"])
def test_an_export_begins_at_the_start_of_its_sweep(tmp_path, library):
    start = tmp_path / "trials" / "0" / "checkpoint-2"
    save_embedded(start)
    (start / "trainer_state.json").write_text("{}")
    request = make_request(STARTED)
    with pytest.raises(UsageError, match="no sweep has trained the policy at which"):
        export_training(request, library, "", tmp_path / "none")
    _, directory = export_training(replace(request, start=start), library, "", tmp_path / "out")
    copied = directory / "policy"
    assert (copied / "model.safetensors").read_bytes() == (start / "model.safetensors").read_bytes()
    assert not (copied / "trainer_state.json").exists()
    assert "after the supervised start of its sweep (2 steps" in read_page(directory)
    load_policy(str(copied))


def test_an_export_names_the_start_of_a_large_policy(tmp_path):
    start, own = tmp_path / "trials" / "0" / "checkpoint-2", tmp_path / "own"
    save_embedded(start, own)
    request = replace(make_request([*STARTED, f"policy={own}"]), start=start)
    exported, directory = export_training(request, "trl", str(own), tmp_path / "out")
    assert f'model_name_or_path: "{start}"' in exported.text
    assert not (directory / "policy").exists()
    assert f"the directory {start}, which another machine lacks" in read_page(directory)


# Places and programs


def test_a_page_of_a_folder_names_only_what_is_there(tmp_path):
    export_folder(tmp_path)
    page = read_page(tmp_path)
    for name in re.findall(r"`(\w+\.(?:py|sh|yaml|parquet))`", page):
        assert (tmp_path / name).is_file(), name
    assert str(Path.home()) not in page


@pytest.mark.parametrize("kind", ["file", "link to nothing", "pipe"])
def test_nothing_is_written_where_one_file_has_no_place(tmp_path, kind):
    place = tmp_path / ("prompts.parquet" if kind == "pipe" else "policy")
    if kind == "file":
        place.write_text("mine")
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to("nowhere")
    problem = f"{place}.*\n    fix: choose another directory with --out"
    with pytest.raises(UsageError, match=problem):
        export_folder(tmp_path)
    assert list(tmp_path.iterdir()) == [place]


def run_in(directory, *command, run="pwd", install="", **variables):
    """Write a run.sh that starts `run`, start it by a command, and return how it ended."""
    exported = replace(export_to("trl", make_recipe()), install=install, run=run)
    directory.mkdir(parents=True, exist_ok=True)
    script = format_run_script(make_recipe(), exported, references_data=False)
    (directory / "run.sh").write_text(script)
    options = {"capture_output": True, "text": True, "check": False}
    environment = {**os.environ, **variables}
    return subprocess.run(["bash", *command], cwd=directory.parent, env=environment, **options)


@pytest.mark.parametrize(
    ("package", "message"),
    [
        ("pytest==0.1.0", "is installed, and this export is for 0.1.0"),
        ("no-such-package==1.0", "no-such-package is not installed"),
    ],
)
def test_another_version_of_the_library_is_refused(tmp_path, package, message):
    words = {"install": f"pip install {package}", "run": "echo ran"}
    done = run_in(tmp_path / "x", "x/run.sh", **words)
    assert done.returncode == 1
    assert message in done.stderr
    assert f"pip install {package}" in done.stderr
    assert run_in(tmp_path / "x", "x/run.sh", **words, ANY_VERSION="1").stdout == "ran\n"


def test_it_runs_in_its_own_directory_whatever_its_name_and_the_shell_looks_up(tmp_path):
    assert run_in(tmp_path / "-dash", "--", "-dash/run.sh").stdout == f"{tmp_path}/-dash\n"
    (tmp_path / "others" / "mine").mkdir(parents=True)
    done = run_in(tmp_path / "mine", "mine/run.sh", CDPATH=str(tmp_path / "others"))
    assert done.stdout == f"{tmp_path}/mine\n"


def test_a_directory_that_python_cannot_look_in_is_refused(tmp_path):
    done = run_in(tmp_path / "a:b", "a:b/run.sh", run='export PYTHONPATH="$PWD"; pwd')
    assert (done.returncode, done.stdout) == (2, "")
    assert re.search(r"PYTHONPATH cannot name .*/a:b: move it", done.stderr)
