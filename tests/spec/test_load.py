"""A sweep file that is right: what it means, how files and overrides lie over each other."""

import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError
from ruamel.yaml import YAML

from gdpo_tune.core import registry
from gdpo_tune.core.errors import SpecError
from gdpo_tune.core.settings import SandboxSettings, TrainingSettings
from gdpo_tune.core.trials import Estimate, Objective, TrialRecord
from gdpo_tune.spec import load_spec
from gdpo_tune.spec.model import Constraint
from gdpo_tune.spec.space import Choices, Fixed, Uniform
from tests.support.paths import ROOT
from tests.support.spec_cases import GOOD, IDENTITY

# The others want packages, policies and data that are not everywhere: see test_commands.
SHIPPED = [ROOT / "search_spaces" / f"{name}.yaml" for name in ("code", "math", "tools")]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_files_load_and_round_trip(path, tmp_path):
    spec = load_spec(path)
    (tmp_path / "again.yaml").write_text(spec.dump_yaml())
    again = load_spec(tmp_path / "again.yaml")
    assert again == spec
    assert again.compute_identity() == spec.compute_identity()


def test_a_sweep_of_an_earlier_version_has_the_identity_that_its_ledger_has():
    """Or it could not go on: a new key of a section is left out of it at its default."""
    stored = ROOT / "tests" / "data" / "code_sweep" / "spec.yaml"
    assert load_spec(stored, to_run=False).compute_identity() == "ca24f1dd915d"


def test_a_clone_of_a_data_set_may_have_a_configuration(load, tmp_path):
    shutil.copy(ROOT / "tests" / "data" / "mbpp.jsonl", tmp_path)
    data = f"data={{source: {tmp_path}, layout: mbpp, config: main}}"
    with pytest.raises(SpecError, match=r"data\.config = main: has no effect: only a clone"):
        load(data)
    (tmp_path / "README.md").touch()
    assert load(data).data.config == "main"


def test_defaults_objectives_and_constraints(load):
    spec = load()
    assert (spec.name, spec.task, spec.policy, spec.keep) == ("sweep", "code", "embedded", "front")
    assert (spec.training, spec.sandbox) == (TrainingSettings(), SandboxSettings())
    assert spec.directory == Path("runs/sweep")
    assert (spec.tracking.uri, spec.tracking.experiment) == ("sqlite:///mlflow.db", "sweep")
    assert (spec.search.sampler, spec.search.scheduler.type) == ("auto", "fifo")
    assert (spec.resources.cpus, spec.resources.gpus, spec.resources.workers) == (1.0, 0.0, 1)
    assert spec.enqueue == ()
    names = ("correctness", "length")
    assert spec.list_objectives() == tuple(Objective(name, "maximize", 0.0) for name in names)
    assert spec.constraints == {"correctness": Constraint(op=">=", bound=0.2)}


@pytest.mark.parametrize("task", registry.TASKS)
def test_the_policy_is_the_one_that_ships_for_the_task(load, task):
    assert load(f"task={task}", "space.reward_weights={correctness: 1}").policy == (
        registry.describe_task(task).embedded
    )


@pytest.mark.parametrize(
    ("text", "value", "holds"),
    [
        (">= 0.2", 0.2, True),
        (">=0.2", 0.19, False),
        ("<= 0.2", 0.2, True),
        (" <= 2e-1 ", 0.21, False),
        (">= 0.2", float("nan"), False),
        ("<= 0.2", float("nan"), False),
        (">= untrained - 0.02", -5.0, True),  # until the baseline has a value
        ("<= published", 5.0, True),
        (">= untrained", float("nan"), False),
    ],
)
def test_constraint_includes_its_bound_and_excludes_nan(load, text, value, holds):
    spec = load(f'constraints.correctness="{text}"')
    assert spec.constraints["correctness"].holds(value) is holds


@pytest.mark.parametrize(
    ("text", "written", "least"),
    [
        (">= untrained", ">= untrained", 0.6),
        (" >=untrained-.02 ", ">= untrained - 0.02", 0.58),
        (">= published + 0.05", ">= published + 0.05", 0.45),
    ],
)
def test_a_constraint_may_refer_to_a_baseline(load, text, written, least):
    baselines = {"untrained": 0.6, "published": 0.4, "search": 0.9}
    records = [
        TrialRecord(0, role, "complete", {}, 0, "baseline", validation={"correctness": value})
        for role, value in ((role, Estimate(mean, 0.01)) for role, mean in baselines.items())
    ]
    spec = load(f'constraints.correctness="{text}"')
    assert load(text=spec.dump_yaml()).constraints["correctness"].text == written
    resolved = spec.resolve_constraints(records)
    bound = resolved.constraints["correctness"]
    assert bound.limit == pytest.approx(least)
    assert str(bound) == f"{written} ({least:.3g})"
    assert bound.holds(least + 0.001)
    assert not bound.holds(least - 0.001)
    assert resolved.dump_yaml() == spec.dump_yaml()
    assert resolved.resolve_constraints([]).constraints == resolved.constraints
    assert resolved.compute_identity() == spec.compute_identity()


def test_space_has_every_parameter(load):
    domains = load().space.domains
    assert domains["normalization"] == Choices(choices=("gdpo", "grpo"))
    assert domains["group_size"] == Choices(choices=(4, 8))
    assert domains["reward_weights.correctness"] == Fixed(value=1.0)
    assert domains["reward_weights.format"] == Uniform(low=0.05, high=2.0, log=True)
    assert domains["reward_weights.length"] == Fixed(value=1.0)
    assert domains["learning_rate"] == Uniform(low=3e-5, high=3e-4, log=True)
    assert domains["temperature"] == Fixed(value=1.0)
    assert domains["loss_type"] == Fixed(value="dapo")


RATE, SIZE = "learning_rate", "group_size"
GDPO = {"normalization": ("gdpo",)}


@pytest.mark.parametrize(
    ("name", "written", "domain"),
    [
        (SIZE, "=8", Fixed(value=8)),
        (SIZE, "={value: 8}", Fixed(value=8)),
        (SIZE, "=[4, 8]", Choices(choices=(4, 8))),
        (SIZE, "={choices: [4, 8]}", Choices(choices=(4, 8))),
        (SIZE, "={range: [4, 5]}", Uniform(low=4, high=5, integer=True)),
        (SIZE, "={range: [4, 16], step: 12}", Uniform(low=4, high=16, step=12, integer=True)),
        (SIZE, "={log: [4, 5]}", Uniform(low=4, high=5, log=True, integer=True)),
        (SIZE, "={value: 8, when: {normalization: gdpo}}", Fixed(value=8, when=GDPO)),
        (SIZE, "={choices: [4, 8], when: {normalization: [gdpo, grpo]}}",
         Choices(choices=(4, 8), when={"normalization": ("gdpo", "grpo")})),
        # The dotted name of a condition survives, nested or not.
        *(("beta", f"={{log: [1e-3, 1], when: {{{when}}}}}",
           Uniform(low=1e-3, high=1, log=True, when={"reward_weights.length": (0, 1)}))
          for when in ("reward_weights: {length: [0, 1]}", "reward_weights.length: [0, 1]")),
        # YAML 1.1 takes 3e-5 for a word, and so do many parsers.
        *((RATE, f"={number}", Fixed(value=3e-5))
          for number in ("3e-5", "3E-5", "3.0e-5", "0.00003", "+3e-5", "3e-05")),
        # `{range: ..}` over `{log: ..}` does not leave both.
        (RATE, "={range: [1e-5, 1e-4]}", Uniform(low=1e-5, high=1e-4)),
        (RATE, ".range=[1e-5, 1e-4]", Uniform(low=1e-5, high=1e-4)),
    ],
)  # fmt: skip
def test_notations_of_a_domain(load, name, written, domain):
    others = ("training.completions_per_step=80", "space.reward_weights.length=[0, 1]")
    spec = load(f"space.{name}{written}", *others)
    assert spec.space.domains[name] == domain
    assert load(text=spec.dump_yaml()).space.domains[name] == domain


def test_words_of_yaml_1_1_are_words(load):
    """`on` is not true and 010 is not 8."""
    assert load("policy=on").policy == "on"
    assert load("search.trials=010").search.trials == 10


def test_anchors_and_merge_keys(load):
    text = GOOD.replace("search: {trials: 16}", "search: &s {trials: 16}\nresources: {cpus: 2}\n")
    text += "tracking: &t {required: &yes true}\nenqueue: [&p {group_size: 4}, {<<: *p}]\n"
    spec = load(text=text)
    assert spec.tracking.required is True
    assert spec.enqueue == ({"group_size": 4}, {"group_size": 4})


def test_enqueued_points(load):
    """Nested and dotted; whether beta has an effect is up to the sampler's choice of the mode."""
    written = "{reward_weights: {format: 1}, group_size: 4}, {reward_weights.format: 2.0}"
    beta = "space.beta={log: [1e-3, 1], when: {normalization: gdpo}}"
    spec = load(f"enqueue=[{written}, {{beta: 0.01}}]", beta)
    assert spec.enqueue == (
        {"reward_weights.format": 1.0, "group_size": 4},
        {"reward_weights.format": 2.0},
        {"beta": 0.01},
    )
    assert load(text=spec.dump_yaml()).enqueue == spec.enqueue


def test_overrides_in_order_with_yaml_values(load):
    spec = load(
        "training.steps=10",
        "training.steps=100",
        "space.reward_weights.format={log: [0.1, 1]}",
        "search.replicates={max_runs: 0}",
        "constraints.correctness=",
        " keep =all",
    )
    assert spec.training.steps == 100
    assert spec.training.completions_per_step == 64
    assert spec.space.domains["reward_weights.format"] == Uniform(low=0.1, high=1.0, log=True)
    assert spec.space.domains["reward_weights.correctness"] == Fixed(value=1.0)
    assert (spec.search.replicates.max_runs, spec.search.replicates.per_point) == (0, 2)
    assert spec.constraints == {}
    assert spec.keep == "all"


def test_an_empty_mapping_replaces_what_it_is_written_over(load):
    spec = load("space={}", "training={}", "constraints={}", text=GOOD.replace("60", "61"))
    assert spec.space.dimensions == ()
    assert spec.training == TrainingSettings()
    assert spec.constraints == {}
    spec = load("space.reward_weights={}")
    assert spec.space.domains["reward_weights.format"] == Fixed(value=1.0)
    assert "learning_rate" in spec.space.dimensions
    with pytest.raises(SpecError, match="names no metric"):
        load("objectives={}")


def test_positions_are_those_of_the_policy_that_is_given(load, tmp_path):
    folder = tmp_path / "policy"
    folder.mkdir()
    (folder / "config.json").write_text('{"max_position_embeddings": 1024}')
    long, policy = "training.max_completion_length=1000", f"policy={folder}"
    assert load(long, policy).training.max_completion_length == 1000
    with pytest.raises(SpecError, match="has 1024 positions"):
        load("training.max_completion_length=1024", policy)
    for content in ('{"n_positions": 32}', '{"text_config": {"max_position_embeddings": 32}}'):
        (folder / "config.json").write_text(content)  # ms-swift#6211
        with pytest.raises(SpecError, match="has 32 positions"):
            load(long, policy)
    for content in ("{}", "[]", "{", '{"max_position_embeddings": null}'):
        (folder / "config.json").write_text(content)
        assert load(long, policy).policy == str(folder)
    assert load(long, "policy=org/name").policy == "org/name"


def test_prompts_of_a_data_set_are_counted_where_it_is_read(load, tmp_path):
    (tmp_path / "rows.jsonl").touch()
    data = f"data={{source: {tmp_path}/rows.jsonl, layout: mbpp}}"
    assert load(data, "training.train_prompts=1000000").training.train_prompts == 1000000


def test_a_file_that_only_extends_changes_nothing(tmp_path):
    (tmp_path / "base.yaml").write_text(GOOD)
    (tmp_path / "same.yaml").write_text("extends: base.yaml\n")
    (tmp_path / "empty.yaml").write_text("extends: base.yaml\nspace: {}\n")
    base, same = (load_spec(tmp_path / f"{name}.yaml") for name in ("base", "same"))
    assert same.compute_identity() == base.compute_identity()
    assert load_spec(tmp_path / "empty.yaml").space.dimensions == ()


def test_dotted_keys_in_the_file(load):
    spec = load(text=GOOD + "training.evaluate_every: 7\nspace.reward_weights.length: 2\n")
    assert (spec.training.steps, spec.training.evaluate_every) == (60, 7)
    assert spec.space.domains["reward_weights.length"] == Fixed(value=2.0)
    assert spec.space.domains["reward_weights.format"] == Uniform(low=0.05, high=2, log=True)


def test_name_from_the_option_the_file_the_stem(load):
    assert load().name == "sweep"
    assert load(text="name: mine\n" + GOOD).name == "mine"
    spec = load(text="name: mine\n" + GOOD, name="other")
    assert (spec.name, spec.tracking.experiment) == ("other", "other")
    assert load("tracking.experiment=team").tracking.experiment == "team"


def test_extends(tmp_path):
    (tmp_path / "bases").mkdir()
    middle = "extends: root.yaml\ntraining: {length_limit: 20, steps: 30}\n"
    top = "extends: bases/middle.yaml\ntraining.steps: 15\n"
    top += "space:\n  learning_rate: {range: [1e-5, 1e-4]}\n  reward_weights: {length: 2}\n"
    top += "objectives: {length: }\nconstraints:\n"
    (tmp_path / "bases" / "root.yaml").write_text("name: root\n" + GOOD)
    (tmp_path / "bases" / "middle.yaml").write_text(middle)
    (tmp_path / "top.yaml").write_text(top)
    spec = load_spec(tmp_path / "top.yaml", ["search.trials=3"])
    assert spec.name == "top"
    assert (spec.training.steps, spec.training.length_limit) == (15, 20)
    assert spec.space.domains["learning_rate"] == Uniform(low=1e-5, high=1e-4)
    assert spec.space.domains["reward_weights.length"] == Fixed(value=2.0)
    assert spec.space.domains["reward_weights.format"] == Uniform(low=0.05, high=2, log=True)
    assert (list(spec.objectives), spec.constraints) == (["correctness"], {})
    assert spec.search.trials == 3


def test_spec_is_frozen_and_travels(load):
    spec = load()
    with pytest.raises(ValidationError, match="frozen"):
        spec.task = "math"
    with pytest.raises(ValidationError, match="frozen"):
        spec.search.trials = 3
    again = pickle.loads(pickle.dumps(spec))
    assert again == spec
    assert again.space.order == spec.space.order


@pytest.mark.parametrize("override", IDENTITY["changes"] + IDENTITY["keeps"])
def test_what_changes_the_identity(load, override):
    is_same = load(override).compute_identity() == load().compute_identity()
    assert is_same == (override in IDENTITY["keeps"])


DATA = "data={source: me/words, layout: gsm8k"


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        (["task=tools"], ["scoring=released"], False),
        (["sandbox.modules=[json, re]"], ["sandbox.modules=[re, json, re]"], True),
        (["task=math", DATA + "}"], [DATA + ", columns: {question: Question}}"], False),
        (["task=math", DATA + "}"], [DATA + ", prompt_template: '{a} {b}'}"], False),
        (["task=math", DATA + "}"], [DATA + ", validation: {split: dev}}"], False),
        (["task=math", DATA + "}"], [DATA + ", test: {source: me/others}}"], False),
    ],
)
def test_what_two_files_have_in_common(load, one, other, is_same):
    same = load(*one).compute_identity() == load(*one, *other).compute_identity()
    assert same is is_same


@pytest.mark.parametrize(
    "section",
    [
        "sandbox={workers: 3, memory_mb: 100}",
        "sandbox={type: unsafe_no_isolation, modules: [json, xml.dom], cpu_seconds: 0.5}",
        "sandbox={modules: []}",
        "data={source: me/words, layout: gsm8k}",
        "data={source: me/words, layout: math, columns: {problem: Ask}, test: {split: dev}}",
        "data={source: me/w, layout: math, prompt_template: '{{{a}}}', validation: {source: me/v}}",
        "resources.env={NCCL_DEBUG: INFO}",
    ],
)
def test_sections_round_trip(load, section):
    spec = load("task=math", section)
    assert load(text=spec.dump_yaml()) == spec


def test_a_module_is_looked_for_without_importing_it(load, tmp_path, monkeypatch):
    (tmp_path / "explosive_module").mkdir()
    (tmp_path / "explosive_module" / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    spec = load("sandbox.modules=[explosive_module.part]")
    assert spec.sandbox.modules == ("explosive_module.part",)


def test_dimensions_do_not_depend_on_the_order_of_the_file(load):
    line = "  learning_rate: {log: [3e-5, 3e-4]}\n"
    moved = GOOD.replace(line, "").replace("space:\n", "space:\n" + line)
    assert load(text=moved).space.dimensions == load().space.dimensions
    assert load(text=moved).compute_identity() == load().compute_identity()


LOAD = """
import sys
from gdpo_tune.core import registry
from gdpo_tune.spec import load_spec
from gdpo_tune.spec.dry_run import render_dry_run
spec = load_spec(sys.argv[1])
render_dry_run(spec)
[registry.describe_task(name) for name in registry.TASKS]
heavy = {"torch", "ray", "trl", "mlflow", "optuna", "numpy", "transformers", "scipy"}
print(spec.compute_identity(), heavy & sys.modules.keys(), "gdpo_tune.sandbox" in sys.modules)
"""


def test_another_process_computes_the_same_identity_without_a_heavy_import(load, tmp_path):
    expected = load().compute_identity()
    command = [sys.executable, "-c", LOAD, str(tmp_path / "sweep.yaml")]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout == f"{expected} set() False\n"
    assert len(expected) == 12


def test_dump_is_read_alike_by_a_parser_of_yaml_1_1(load):
    """So that the file in MLflow can be read by anything: no bare 3e-05, no bare `on`."""
    spec = load("policy=on", "space.beta={log: [1e-5, 1], when: {normalization: gdpo}}")
    old = YAML(typ="safe", pure=True)
    old.version = (1, 1)
    plain = old.load(spec.dump_yaml())
    assert plain["policy"] == "on"
    assert plain["space"]["beta"] == {"log": [1e-5, 1.0], "when": {"normalization": ["gdpo"]}}
    assert plain["training"]["steps"] == 60
    assert plain["constraints"] == {"correctness": ">= 0.2"}


def test_a_clip_that_cispo_does_not_have_is_not_searched_under_it(load):
    """Source: TRL's `GRPOTrainer`: CISPO clamps the ratio from above alone, by `epsilon_high`."""
    spec = load("space.loss_type=[dapo, cispo]", "space.epsilon={range: [0.1, 0.3]}")
    assert spec.space.domains["epsilon"].when == {"loss_type": ("dapo",)}
    searched = spec.space.searched_domains.items()
    values = {name: d.find_middle() for name, d in searched if name not in ("loss_type", "epsilon")}
    assert spec.space.complete({"loss_type": "cispo", **values})["epsilon"] == 0.2
    fixed = load("space.loss_type=[dapo, cispo]", "space.epsilon=0.1").space.domains["epsilon"]
    assert fixed == Fixed(value=0.1)
