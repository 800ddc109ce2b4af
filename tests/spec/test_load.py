"""A sweep file that is right: what it means, how files and overrides lie over each other."""

import pickle
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
from tests.support.spec_cases import GOOD

# The others want packages, policies and data that are not everywhere: see test_commands.
SHIPPED = [ROOT / "search_spaces" / f"{name}.yaml" for name in ("code", "math", "tools")]


@pytest.fixture
def load(tmp_path):
    """Load `GOOD`, or another text, with overrides."""

    def load(*overrides, text=GOOD, name=None):
        path = tmp_path / "sweep.yaml"
        path.write_text(text)
        return load_spec(path, overrides, name)

    return load


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_files_load_and_round_trip(path, tmp_path):
    spec = load_spec(path)
    (tmp_path / "again.yaml").write_text(spec.dump_yaml())
    again = load_spec(tmp_path / "again.yaml")
    assert again == spec
    assert again.compute_identity() == spec.compute_identity()


def test_defaults(load):
    spec = load()
    assert (spec.name, spec.task, spec.policy, spec.keep) == ("sweep", "code", "embedded", "front")
    assert spec.training == TrainingSettings()
    assert spec.sandbox == SandboxSettings()
    assert spec.directory == Path("runs/sweep")
    assert (spec.tracking.uri, spec.tracking.experiment) == ("sqlite:///mlflow.db", "sweep")
    assert (spec.search.sampler, spec.search.scheduler.type) == ("auto", "fifo")
    assert (spec.resources.cpus, spec.resources.gpus, spec.resources.workers) == (1.0, 0.0, 1)
    assert spec.enqueue == ()


@pytest.mark.parametrize("task", registry.TASKS)
def test_the_policy_is_the_one_that_ships_for_the_task(load, task):
    assert load(f"task={task}", "space.reward_weights={correctness: 1}").policy == (
        registry.describe_task(task).embedded
    )


def test_objectives_and_constraints(load):
    spec = load()
    assert spec.list_objectives() == (
        Objective("correctness", "maximize", 0.0),
        Objective("length", "maximize", 0.0),
    )
    assert spec.constraints == {"correctness": Constraint(op=">=", bound=0.2)}


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
    records = [
        build_baseline(0, "untrained", 0.6),
        build_baseline(1, "published", 0.4),
        build_baseline(2, "search", 0.9),
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


def build_baseline(number, role, correctness):
    values = {"correctness": Estimate(correctness, 0.01)}
    return TrialRecord(number, role, "complete", {}, 0, "baseline", validation=values)


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


@pytest.mark.parametrize(
    ("written", "domain"),
    [
        ("8", Fixed(value=8)),
        ("{value: 8}", Fixed(value=8)),
        ("[4, 8]", Choices(choices=(4, 8))),
        ("{choices: [4, 8]}", Choices(choices=(4, 8))),
        ("{range: [4, 5]}", Uniform(low=4, high=5, integer=True)),
        ("{range: [4, 16], step: 12}", Uniform(low=4, high=16, step=12, integer=True)),
        ("{log: [4, 5]}", Uniform(low=4, high=5, log=True, integer=True)),
        (
            "{value: 8, when: {normalization: gdpo}}",
            Fixed(value=8, when={"normalization": ("gdpo",)}),
        ),
        (
            "{choices: [4, 8], when: {normalization: [gdpo, grpo]}}",
            Choices(choices=(4, 8), when={"normalization": ("gdpo", "grpo")}),
        ),
    ],
)
def test_notations_of_a_domain(load, written, domain):
    spec = load(f"space.group_size={written}", "training.completions_per_step=80")
    assert spec.space.domains["group_size"] == domain
    again = load(text=spec.dump_yaml())
    assert again.space.domains["group_size"] == domain


def test_condition_on_a_reward_weight(load):
    """Its dotted name survives, nested or not."""
    nested = "{log: [1e-3, 1], when: {reward_weights: {length: [0, 1]}}}"
    flat = "{log: [1e-3, 1], when: {reward_weights.length: [0, 1]}}"
    for written in (nested, flat):
        spec = load("space.reward_weights.length=[0, 1]", f"space.beta={written}")
        assert spec.space.domains["beta"].when == {"reward_weights.length": (0, 1)}


@pytest.mark.parametrize("number", ["3e-5", "3E-5", "3.0e-5", "0.00003", "+3e-5", "3e-05"])
def test_numbers_without_a_dot_are_numbers(load, number):
    """YAML 1.1 takes 3e-5 for a word, and so do many parsers."""
    assert load(f"space.learning_rate={number}").space.domains["learning_rate"] == Fixed(value=3e-5)


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


def test_enqueue_nested_and_dotted(load):
    spec = load(
        "enqueue=[{reward_weights: {format: 1}, group_size: 4}, {reward_weights.format: 2.0}]"
    )
    assert spec.enqueue == (
        {"reward_weights.format": 1.0, "group_size": 4},
        {"reward_weights.format": 2.0},
    )
    assert load(text=spec.dump_yaml()).enqueue == spec.enqueue


def test_enqueued_point_may_leave_a_condition_open(load):
    """Whether beta has an effect is up to the sampler's choice of the mode."""
    spec = load(
        "space.beta={log: [1e-3, 1], when: {normalization: gdpo}}", "enqueue=[{beta: 0.01}]"
    )
    assert spec.enqueue == ({"beta": 0.01},)


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


def test_a_domain_is_replaced_as_a_whole(load):
    """`{range: ..}` over `{log: ..}` does not leave both."""
    spec = load("space.learning_rate={range: [1e-5, 1e-4]}")
    assert spec.space.domains["learning_rate"] == Uniform(low=1e-5, high=1e-4)
    spec = load("space.learning_rate.range=[1e-5, 1e-4]")
    assert spec.space.domains["learning_rate"] == Uniform(low=1e-5, high=1e-4)


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
    (tmp_path / "bases" / "root.yaml").write_text("name: root\n" + GOOD)
    (tmp_path / "bases" / "middle.yaml").write_text(
        "extends: root.yaml\ntraining: {length_limit: 20, steps: 30}\n"
    )
    (tmp_path / "top.yaml").write_text(
        "extends: bases/middle.yaml\n"
        "training.steps: 15\n"
        "space:\n  learning_rate: {range: [1e-5, 1e-4]}\n  reward_weights: {length: 2}\n"
        "objectives: {length: }\n"
        "constraints:\n"
    )
    spec = load_spec(tmp_path / "top.yaml", ["search.trials=3"])
    assert spec.name == "top"
    assert (spec.training.steps, spec.training.length_limit) == (15, 20)
    assert spec.space.domains["learning_rate"] == Uniform(low=1e-5, high=1e-4)
    assert spec.space.domains["reward_weights.length"] == Fixed(value=2.0)
    assert spec.space.domains["reward_weights.format"] == Uniform(low=0.05, high=2, log=True)
    assert list(spec.objectives) == ["correctness"]
    assert spec.constraints == {}
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


@pytest.mark.parametrize(
    "override",
    [
        "policy=gpt",
        "objectives.length.reference=-1",
        "space.group_size=[4, 8, 16]",
        "space.group_size=[8, 4]",
        "space.temperature=0.9",
        "space.learning_rate={range: [3e-5, 3e-4]}",
        "training.steps=61",
        "training.lr_schedule=linear",
        "training.mini_batch_size=32",
        "sandbox.modules=[json]",
        "sandbox.cpu_seconds=2",
        "sandbox.wall_seconds=5",
        "sandbox.memory_mb=1024",
        "rollout.importance_sampling=token_mask",
        "rollout.importance_sampling_cap=2",
        "training.dead_steps=0",
        "space.partial_credit=true",
        "space.gamma=0.5",
        "space.baseline=leave_one_out",
        "space.length_shape=ramp",
        "space.conditioning.length=format",
    ],
)
def test_what_changes_the_identity(load, override):
    assert load(override).compute_identity() != load().compute_identity()


@pytest.mark.parametrize(
    "override",
    [
        "name=other",
        "search={trials: 100, sampler: tpe, seed: 3}",
        "resources={cpus: 2, env: {NCCL_DEBUG: INFO}}",
        "tracking.uri=http://localhost:5000",
        "storage=elsewhere",
        "keep=none",
        "constraints.correctness=",
        "enqueue=[{group_size: 4}]",
        # The same said in another way.
        "space.reward_weights.correctness=1.0",
        "space.temperature={value: 1}",
        "space.learning_rate={log: [0.00003, 0.0003]}",
        "training.steps=60",
        "training.micro_batch_size=8",
        "training.mini_batch_size=0",
        "training.optimizer=adamw",
        "training.dead_steps=10",
        "rollout.engine=transformers",
        "rollout={engine: vllm, importance_sampling: token_truncate, importance_sampling_cap: 3}",
        "sandbox.type=unsafe_no_isolation",
        "sandbox={modules: [], cpu_seconds: 1, wall_seconds: 4, memory_mb: 512}",
        "scoring=strict",
    ],
)
def test_what_leaves_the_identity(load, override):
    assert load(override).compute_identity() == load().compute_identity()


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        (["task=tools"], ["task=tools", "scoring=released"], False),
        (["sandbox.modules=[json, re]"], ["sandbox.modules=[re, json, re]"], True),
    ],
)
def test_what_two_files_have_in_common(load, one, other, is_same):
    same = load(*one).compute_identity() == load(*other).compute_identity()
    assert same is is_same


def test_every_key_of_data_counts_in_the_identity(load):
    data = "data={source: me/words, layout: gsm8k"
    base = load("task=math", data + "}")
    for more in (
        "columns: {question: Question}",
        "prompt_template: '{a} {b}'",
        "validation: {split: dev}",
        "test: {source: me/others}",
    ):
        changed = load("task=math", f"{data}, {more}}}")
        assert changed.compute_identity() != base.compute_identity()


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
    assert spec.space.complete({"loss_type": "cispo", **find_values(spec)})["epsilon"] == 0.2
    fixed = load("space.loss_type=[dapo, cispo]", "space.epsilon=0.1").space.domains["epsilon"]
    assert fixed == Fixed(value=0.1)
    with pytest.raises(SpecError, match="loss_type is never dapo, dr_grpo, grpo, bnpo"):
        load("space.loss_type=cispo", "space.epsilon={range: [0.1, 0.3]}")


def find_values(spec):
    """Return a value of every searched parameter but the loss and its clip."""
    searched = spec.space.searched_domains.items()
    return {n: d.find_middle() for n, d in searched if n not in ("loss_type", "epsilon")}


@pytest.mark.parametrize("split", ["validation", "test"])
def test_one_held_out_prompt_is_refused_since_it_has_no_standard_error(load, split):
    """Source: arithmetic: the variance of a mean over n prompts needs n - 1 > 0."""
    with pytest.raises(SpecError, match=rf"training\.{split}_prompts = 1: .*2"):
        load(f"training.{split}_prompts=1")
