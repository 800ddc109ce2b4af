"""Keys with a life of their own: `space.trl`, `start:`, and those of chat templates."""

from __future__ import annotations

import pytest

from gdpo_tune.core.errors import IdentityError
from gdpo_tune.core.settings import StartSettings
from gdpo_tune.ledger import opening
from gdpo_tune.ledger.ledger import Ledger
from gdpo_tune.spec import load_spec
from gdpo_tune.spec.model import list_decisive_values, list_differences
from gdpo_tune.spec.space import Choices, Fixed
from tests.support.tuning import load_code_spec

# --- space.trl ------------------------------------------------------------------------------------


def test_fields_of_trl_are_fixed_or_searched(load):
    spec = load("space.trl={weight_decay: 0.1, top_entropy_quantile: [0.2, 1.0]}")
    assert spec.space.domains["trl.weight_decay"] == Fixed(value=0.1)
    assert spec.space.domains["trl.top_entropy_quantile"] == Choices(choices=(0.2, 1.0))
    assert "trl.top_entropy_quantile" in spec.space.dimensions
    complete = spec.space.complete_baseline({})
    assert complete["trl.weight_decay"] == 0.1
    assert complete["trl.top_entropy_quantile"] == 1.0
    assert load(text=spec.dump_yaml()).compute_identity() == spec.compute_identity()
    assert not any(name.startswith("trl.") for name in load().space.domains)


def test_a_field_of_trl_stands_beside_a_bad_task(refuse):
    problems = refuse("task=cod", "space.trl.weight_decay=0.1")
    assert all("trl" not in problem.key for problem in problems)


def test_a_field_of_trl_is_set_before_points_and_conditions_name_it(load):
    """A point or a condition may name a field at its default, where the space has it."""
    point = "enqueue=[{trl: {weight_decay: 0}}]"
    assert load("space.trl.weight_decay=0", point).enqueue == ({"trl.weight_decay": 0.0},)
    when = "{weight_decay: {range: [0, 0.1], when: {trl.adam_beta1: 0.9}}, adam_beta1: 0.9}"
    assert "trl.weight_decay" in load(f"space.trl={when}").space.order


# --- model: ---------------------------------------------------------------------------------------


def test_arguments_of_a_chat_template_are_kept(load):
    """Source: trl#3387, axolotl#2658; GRPOConfig.chat_template_kwargs of TRL."""
    thinking = load("task=math", "model.chat_template_kwargs.enable_thinking=false")
    assert thinking.model.chat_template_kwargs == {"enable_thinking": False}


def test_a_sweep_keeps_the_date_of_its_start(load, monkeypatch, tmp_path):
    """Source: open-unlearning#98: prompts that change overnight cannot be compared."""

    class Clock(opening.date):
        day = 1

        @classmethod
        def today(cls):
            return cls(2025, 1, cls.day)

    monkeypatch.setattr(opening, "date", Clock)
    storage = f"storage={tmp_path}/runs"
    for Clock.day in (1, 2):
        with Ledger.open(load(storage)) as ledger:
            assert ledger.spec.model.template_date == "2025-01-01"
            recorded = load_spec(ledger.directory / "spec.yaml")
        assert recorded.model.template_date == "2025-01-01"
    with pytest.raises(IdentityError, match=r"template_date = 2025-01-01, not 2025-01-02"):
        Ledger.open(load(storage, "model.template_date=2025-01-02"))
    with Ledger.open(load(storage), fresh=True) as ledger:
        assert ledger.spec.model.template_date == "2025-01-02"


# --- start: ---------------------------------------------------------------------------------------

START = "start={steps: 20}"


def test_a_start_has_defaults_and_a_round_trip(load):
    spec, plain = load("start={}"), load()
    assert spec.start == StartSettings(
        demonstrations="data", steps=60, learning_rate=1e-4, completions_per_step=16
    )
    assert spec.baselines == ("start", "untrained", "published")
    assert load(text=spec.dump_yaml()).start == spec.start
    assert (plain.start, plain.baselines) == (None, ("untrained", "published"))
    assert "\nstart:" not in plain.dump_yaml()
    assert not [key for key in list_decisive_values(plain) if key.startswith("start")]


def test_a_start_is_part_of_the_identity(load, tmp_path):
    storage = f"storage={tmp_path}/runs"
    plain, short, long = (load(storage, *words) for words in ([], [START], ["start={steps: 21}"]))
    assert len({spec.compute_identity() for spec in (plain, short, long)}) == 3
    differences = list_differences(list_decisive_values(short), list_decisive_values(long))
    assert differences == ["start.steps = 20, not 21"]
    assert "start.steps = unset, not 21" in list_differences({}, list_decisive_values(long))
    short.directory.mkdir(parents=True)
    (short.directory / "spec.yaml").write_text(short.dump_stored_yaml())
    assert opening.describe_differences(long) == "start.steps = 20, not 21"
    assert "a version of gdpo_tune with other keys" in opening.describe_differences(short)


def test_a_bound_may_refer_to_a_start_that_there_is(load):
    spec = load(START, 'constraints.correctness=">= start - 0.02"')
    assert spec.constraints["correctness"].text == ">= start - 0.02"


@pytest.mark.parametrize(
    ("written", "expected"), [("mine.jsonl", "{project}/mine.jsonl"), ("data", "data")]
)
def test_a_file_stays_a_path_and_data_stays_a_word(tmp_path, monkeypatch, written, expected):
    project = tmp_path / "project"
    for directory in (project / "data", tmp_path / "elsewhere"):
        directory.mkdir(parents=True)
    (project / "mine.jsonl").write_text("{}")
    monkeypatch.chdir(project)
    spec = load_code_spec("runs", [f"start={{demonstrations: {written}}}"])
    spec.directory.mkdir(parents=True)
    file = (spec.directory / "spec.yaml").absolute()
    file.write_text(spec.dump_stored_yaml())
    monkeypatch.chdir(tmp_path / "elsewhere")
    moved = load_spec(file)
    assert moved.start is not None
    assert moved.start.demonstrations == expected.format(project=project)
    assert moved.compute_identity() == spec.compute_identity()
