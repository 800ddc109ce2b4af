"""Everything that a sweep file can get wrong: line, key, value, reason, fix; all at once."""

import dataclasses
import itertools
import pickle
import re
import sys
import types
from operator import attrgetter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdpo_tune.core import registry
from gdpo_tune.core.errors import SpecError, SpecProblem
from gdpo_tune.spec import load_spec
from tests.support.spec_cases import CASES, GOOD


@pytest.mark.parametrize("case", CASES)
def test_bad_file(case, refuse, tmp_path, installed):
    # What else is wrong is told where a package is not installed, too.
    installed.update(peft=True, flash_attn=True)
    old, new, line, key, reason, fix = CASES[case]
    for name in ("file", "rows.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "folder").mkdir()
    places = {"{file}": "file", "{rows}": "rows.jsonl", "{folder}": "folder"}
    for mark, name in places.items():
        new = new.replace(mark, str(tmp_path / name))
    (problem,) = refuse(text=GOOD.replace(old, new))
    assert (problem.where, problem.key) == (f"{tmp_path / 'sweep.yaml'}:{line}", key)
    assert reason in problem.reason
    assert fix in problem.fix


@pytest.mark.parametrize(
    ("group_size", "line"),
    [("", 12), ("  group_size: {choices: [3, 5], when: {normalization: gdpo}}\n", 8)],
    ids=["not in the file", "at its default under another mode"],
)
def test_default_group_size_must_divide_too(group_size, line, refuse, tmp_path):
    text = GOOD.replace("completions_per_step: 64", "completions_per_step: 60")
    (problem,) = refuse(text=text.replace("  group_size: [4, 8]\n", group_size))
    assert problem.where == f"{tmp_path / 'sweep.yaml'}:{line}"
    assert problem.reason == "8 does not divide training.completions_per_step = 60"


def test_the_file_that_cases_break_is_good(load):
    assert load().name == "sweep"


def test_every_problem_at_once_in_the_order_of_lines(refuse):
    text = GOOD
    for old, new in {
        "task: code": "task: code\npolcy: x",
        "length: {direction: maximize, reference: 0}": "length: {direction: up}",
        "[gdpo, grpo]": "[gdpo, gpro]",
        "[4, 8]": "[4, 6]",
        "format: {log: [0.05, 2]}": "format: {log: [0, 2]}",
        "steps: 60": "steps: 0",
        "trials: 16": "trials: 0, sampler: x, scheduler: {type: halvin}",
    }.items():
        text = text.replace(old, new)
    problems = refuse("resources.workers=0", "nothing", text=text)
    assert [problem.key for problem in problems] == [
        *("", "polcy", "objectives.length.direction", "objectives.length.reference"),
        *("space.normalization[1]", "space.group_size", "space.reward_weights.format"),
        *("training.steps", "search.scheduler.type", "search.sampler", "search.trials"),
        "resources.workers",
    ]
    lines = [int(p.where.rpartition(":")[2]) for p in problems if not p.where.startswith("--set")]
    assert lines == sorted(lines)


def test_what_hangs_on_a_bad_value_is_not_complained_of(refuse):
    text = GOOD.replace("completions_per_step: 64", "completions_per_step: x")
    text = text.replace("[gdpo, grpo]", "[gdpo, grop]").replace("[4, 8]", "[5]")
    text = text.replace("{log: [0.05, 2]}", "{log: [0.05, 2], when: {normalization: grpo}}")
    keys = [problem.key for problem in refuse(text=text)]
    assert keys == ["space.normalization[1]", "training.completions_per_step"]


def test_the_message_reads_well_and_survives_pickling(refuse, tmp_path):
    error = SpecError(refuse(text=GOOD.replace("[4, 8]", "[4, 6]")))
    assert str(error).splitlines() == [
        "1 problem in the sweep specification",
        f"{tmp_path}/sweep.yaml:8: space.group_size = [4, 6]: 6 does not divide "
        "training.completions_per_step = 64",
        "    fix: use group sizes among [2, 4, 8, 16, 32, 64], "
        "or change training.completions_per_step",
    ]
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.exit_status) == (str(error), 2)


def test_a_module_that_lies_nowhere_is_not_installed(refuse, monkeypatch):
    monkeypatch.setitem(sys.modules, "placeless", types.ModuleType("placeless"))
    (problem,) = refuse("sandbox.modules=[placeless]")
    assert problem.key == "sandbox.modules[0]"
    assert problem.reason == "no module placeless is installed"


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("", ":1", "the file is empty"),
        ("# only a comment\n", ":1", "the file is empty"),
        ("- a\n- b\n", ":1", "not a mapping"),
        ("just words\n", ":1", "not a mapping"),
        ("task: \x00\n", "", "not YAML"),
        ("{when: {beta: 0}}: code\n", "", "unhashable"),
        ("task: 2024-13-41\n", "", "month must be in 1..12"),
        ("task: " + "[" * 600 + "]" * 600, "", "recursion"),
    ],
)
def test_file_that_is_no_sweep(text, line, reason, refuse, tmp_path):
    (problem,) = refuse(text=text)
    assert problem.where == f"{tmp_path / 'sweep.yaml'}{line}"
    assert reason in problem.reason


@pytest.mark.parametrize(
    ("first", "element", "brackets"),
    [("[1, 2, 3, 4, 5]", "*{0}", "[]"), ("{x: 1, y: 2}", "{1}{2}: *{0}", "{}")],
)
def test_aliases_that_mean_millions_of_values(first, element, brackets, refuse, tmp_path):
    lines = [f"a: &a {first}"]
    for below, name in itertools.pairwise("abcdefgh"):  # each means ten of the line before
        ten = ", ".join(element.format(below, name, index) for index in range(10))
        lines.append(f"{name}: &{name} {brackets[0]}{ten}{brackets[1]}")
    (problem,) = refuse(text="# a bomb\n" + "\n".join(lines) + "\n")
    assert problem.where == f"{tmp_path / 'sweep.yaml'}:7"  # the first line that means too many
    assert problem.reason.startswith("more than 100,000 values up to here")
    assert problem.fix


def test_aliases_that_mean_millions_of_values_in_an_override(refuse):
    text = "[&a [0, 0, 0, 0, 0, 0, 0, 0]"
    for below, name in itertools.pairwise("abcdefghi"):
        text += f", &{name} [{', '.join([f'*{below}'] * 8)}]"
    (problem,) = refuse(f"enqueue={text}]")
    assert problem.where.startswith("--set enqueue=[&a")
    assert problem.key == "enqueue"
    assert problem.reason.startswith("more than 100,000 values")


def test_many_values_are_no_fault_as_long_as_they_are_meant(load):
    points = "".join("  - {group_size: 8}\n" for _ in range(1000))
    assert len(load(text=f"{GOOD}enqueue:\n{points}").enqueue) == 1000


def test_a_message_shows_the_beginning_of_a_long_value(refuse):
    (problem,) = refuse(text=GOOD + f"points: [{', '.join(['1'] * 1000)}]\n")
    assert len(problem.value) == 300
    assert problem.value.startswith("[1, 1, 1")
    assert problem.value.endswith("...")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("task: " + "[" * 60 + "]" * 60, 1),
        ("task: code\n" + ".".join(["a"] * 60) + ": 1", 2),
        ("a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 400)), 1),
    ],
    ids=["brackets", "dots", "aliases of aliases"],
)
def test_values_that_lie_too_deep(text, line, refuse, tmp_path):
    (problem,) = refuse(text=text)
    assert problem.where == f"{tmp_path / 'sweep.yaml'}:{line}"
    assert problem.reason == "more than 50 levels deep"


def test_what_is_no_file_of_text(tmp_path):
    (tmp_path / "sweep.yaml").write_bytes(b"task: \xff\xfe")
    with pytest.raises(SpecError, match="not UTF-8 at byte 6"):
        load_spec(tmp_path / "sweep.yaml")
    with pytest.raises(SpecError, match="Is a directory"):
        load_spec(tmp_path)


def test_missing_file_suggests_its_neighbour(tmp_path):
    (tmp_path / "code.yaml").write_text(GOOD)
    with pytest.raises(SpecError, match="there is no such file") as caught:
        load_spec(tmp_path / "cod.yaml")
    (problem,) = caught.value.problems
    assert problem.where == str(tmp_path / "cod.yaml")
    assert f"did you mean {tmp_path / 'code.yaml'}?" in problem.fix


@pytest.mark.parametrize(
    ("override", "key", "reason"),
    [
        ("training.steps=0", "training.steps", "must be at least 1"),
        ("training.stpes=3", "training.stpes", "unknown key"),
        ("space.reward_weights.format={log: [0, 1]}", "space.reward_weights.format", "reach 0"),
        ("space.group_size=6", "space.group_size", "does not divide"),
        ("task=cod", "task", "unknown task"),
        ("task.name=x", "task", "unknown task"),
        ("training.steps=[1", "training.steps", "not YAML"),
        ("training.steps={a: 1, a: 2}", "training.steps", "given twice"),
        ("training.stpes=", "training.stpes", "no value"),
        ("training.steps", "", "not of the form KEY=VALUE"),
        ("=3", "", "not of the form KEY=VALUE"),
        ("training..steps=3", "", "not of the form KEY=VALUE"),
        (".".join(["a"] * 2000) + "=3", "", "not of the form KEY=VALUE"),
        ("extends=other.yaml", "extends", "only in files"),
        ("name=a/b", "name", "directory"),
    ],
)
def test_bad_override_is_named(override, key, reason, refuse):
    (problem,) = refuse(override)
    assert (problem.where, problem.key) == (f"--set {override}", key)
    assert reason in problem.reason


def test_bad_name_option_is_named(refuse):
    (problem,) = refuse(name="../up")
    assert (problem.where, problem.key) == ("--name ../up", "name")


def test_stem_that_is_no_name(tmp_path):
    path = tmp_path / "my sweep.yaml"
    path.write_text(GOOD)
    with pytest.raises(SpecError, match="write name: my-sweep"):
        load_spec(path)


def test_mode_under_which_nothing_is_left(refuse, monkeypatch):
    """A condition that asks only for modes which ignore the parameter never holds."""
    ignoring = dataclasses.replace(registry.NORMALIZATIONS["grpo"], ignores=("beta",))
    monkeypatch.setitem(registry.NORMALIZATIONS, "grpo", ignoring)
    (problem,) = refuse("space.beta={log: [1e-3, 1], when: {normalization: grpo}}")
    assert problem.key == "space.beta"
    assert problem.reason.startswith("normalization is never gdpo, grpo_no_std")


def test_errors_of_a_base_point_into_it(refuse, tmp_path):
    (tmp_path / "base.yaml").write_text(GOOD.replace("steps: 60", "steps: 0"))
    problems = refuse(text="extends: base.yaml\nsearch: {trials: 0}\n")
    assert [(p.where, p.key) for p in problems] == [
        (f"{tmp_path / 'base.yaml'}:13", "training.steps"),
        (f"{tmp_path / 'sweep.yaml'}:2", "search.trials"),
    ]


@pytest.mark.parametrize(
    ("extends", "reason"),
    [
        ("missing.yaml", r"there is no file .*missing\.yaml"),
        ("[a]", "not the name of a file"),
        ("", "not the name of a file"),
        ("sweep.yaml", "a circle: sweep.yaml -> sweep.yaml"),
        ("middle.yaml", "a circle: sweep.yaml -> middle.yaml -> sweep.yaml"),
        ("a/" + "b" * 256, "a name in it has more than 255 bytes"),  # NAME_MAX of Linux
        ("~nouser/a.yaml", "there is no user of that name"),
        ('"\\0"', "a character that no name can have"),
    ],
)
def test_bad_extends(extends, reason, refuse, tmp_path):
    (tmp_path / "middle.yaml").write_text("extends: sweep.yaml\n")
    (problem,) = refuse(text=f"# a comment\nextends: {extends}\n")
    place = "middle.yaml:1" if extends == "middle.yaml" else "sweep.yaml:2"
    assert (problem.where, problem.key) == (f"{tmp_path}/{place}", "extends")
    assert re.search(reason, problem.reason)


FRAGMENTS = (
    *("", "\t", "\n", "null", "[]", "{}", "[[1]]", "{a: 1}", "x", "-1", "1e400", ".nan", "true"),
    *("2024-01-01", "2024-13-41", "&a", "*a", "!t x", "'", '"', ":", "- ", "#", "\x07", "<<", "? "),
    *("0x1f", "1_0", "|", ">", "~", "%", "@", ",", "[", "]", "{", "}", "---", "...", "1:2:3"),
    *("{when: {beta: 0}}", "{log: 1}", "{? {a: 1} : 2}", "{? [a] : 2}"),
)
fragments = st.sampled_from(FRAGMENTS)
keys = st.sampled_from(["space", "enqueue", "search.replicates", "space.beta", "name", "a.b"])


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_damage_ends_in_a_spec_or_a_spec_error(data, tmp_path_factory):
    """No other exception, whatever a word of the file or an override is replaced by."""
    words = re.split(r"(\W)", GOOD)
    for _ in range(data.draw(st.integers(1, 3))):
        words[data.draw(st.integers(0, len(words) - 1))] = data.draw(fragments)
    path = tmp_path_factory.getbasetemp() / "damaged.yaml"
    path.write_text("".join(words), encoding="utf-8")
    overrides = data.draw(st.lists(st.builds("{}={}".format, keys, fragments), max_size=1))
    try:
        spec = load_spec(path, overrides)
    except SpecError:
        return
    again = path.with_name("again.yaml")
    again.write_text(spec.dump_yaml(), encoding="utf-8")
    assert load_spec(again) == spec


def test_a_mode_that_does_not_exist_hides_no_other_problem(refuse):
    condition = "space.temperature={range: [0.7, 1], when: {normalization: grop}}"
    found = refuse("space.normalization=[gdpo, grop]", condition, "task=cod")
    assert {problem.key for problem in found} >= {"space.normalization[1]", "task"}


@pytest.mark.parametrize(
    ("key", "override"),
    [
        ("policy", "policy={}"),
        ("task", "task={}.py:Mine"),
        ("data.source", "data={{source: {}, layout: mbpp}}"),
        ("tracking.uri", "tracking.uri=sqlite:///{}"),
        ("search.warm_start[0]", "search.warm_start=[{}]"),
    ],
)
@pytest.mark.parametrize("name", ["a" * 5000, "a/" * 3000, "~nouser/x", "é" * 200])
def test_a_path_that_no_disk_can_hold(key, override, name, refuse):
    (problem,) = refuse(override.format(name))
    assert problem.key == key
    assert len(problem.reason) < 100
    assert len(problem.fix) < 150


@pytest.mark.parametrize("key", ['"\\ud800"', '"a\\0"'])
@pytest.mark.parametrize("section", ["{}: 1\n", "training: {{{}: 1}}\n"])
def test_a_key_that_cannot_be_printed(key, section, refuse, tmp_path):
    training = "training: {steps: 60, completions_per_step: 64}\n"
    (problem,) = refuse(text=GOOD.replace(training, section.format(key)))
    assert problem.where == f"{tmp_path / 'sweep.yaml'}:13"
    assert problem.reason == "a key has characters that cannot be printed"


@pytest.mark.parametrize("weights", ["{}", "[]", "", "1"])
@pytest.mark.parametrize("task", ["code", "cod", "missing.py:Mine"])
def test_a_space_without_any_weight(weights, task, load, refuse):
    old = "  reward_weights:\n    correctness: 1\n    format: {log: [0.05, 2]}\n"
    text = GOOD.replace(old, f"  reward_weights: {weights}\n").replace("code", task)
    if (task, weights) == ("code", "{}"):  # every weight has its default
        assert load(text=text).space.domains["reward_weights.correctness"]
    else:
        keys = {problem.key for problem in refuse(text=text)}
        assert keys <= {"task", "space.reward_weights"}


def test_what_another_machine_needs_is_no_error(load, refuse, installed):
    installed["peft"] = False
    data = "data={source: ./rows.jsonl, layout: mbpp}"
    overrides = ["model.lora_rank=8", "sandbox.modules=[no_such_module]", data]
    needs: list[SpecProblem] = []
    assert load(*overrides, needs=needs).model.lora_rank == 8
    keys = ["sandbox.modules[0]", "data.source", "model.lora_rank"]
    assert [need.key for need in needs] == keys
    assert [problem.key for problem in refuse(*overrides)] == keys
    assert len(refuse(*overrides, "training.steps=0", needs=[])) == 1


# Source: `_flash_attn_import_error` of transformers: without it a policy could not be loaded.
@pytest.mark.parametrize(
    ("override", "module", "package", "fix"),
    [
        ("model.lora_rank=8", "peft", "peft", "'gdpo-tune[peft]'"),
        ("training.optimizer=adamw_8bit", "torchao", "torchao", "'gdpo-tune[adam8bit]'"),
        ("model.attention=flash_attention_2", "flash_attn", "flash-attn", "flash-attn --no-build"),
    ],
)
def test_a_key_without_its_package_names_it(
    load, refuse, installed, override, module, package, fix
):
    installed[module] = False
    key, _, value = override.partition("=")
    (problem,) = refuse(override, "resources.gpus=1")
    assert problem.key == key
    assert f"needs the package {package}" in problem.reason
    assert f"pip install {fix}" in problem.fix
    installed[module] = True
    assert str(attrgetter(key)(load(override, "resources.gpus=1"))) == value
