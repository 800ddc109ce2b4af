"""Keys of `model:` for chat templates: values, identity, and the date of a sweep's start."""

import pytest

from gdpo_tune.core.errors import IdentityError, SpecError
from gdpo_tune.ledger.ledger import Ledger
from gdpo_tune.spec import load_spec

SPACE = """task: math
objectives: {correctness: {direction: maximize, reference: 0}}
space: {group_size: 4}
"""


@pytest.fixture
def load(tmp_path):
    """Load the space above with overrides, stored in a directory of its own."""
    file = tmp_path / "space.yaml"
    file.write_text(SPACE)
    return lambda *sets: load_spec(file, [f"storage={tmp_path}/runs", *sets])


def test_arguments_count_in_the_identity_only_where_they_are_set(load):
    """Source: trl#3387, axolotl#2658; GRPOConfig.chat_template_kwargs of TRL."""
    plain = load()
    thinking = load("model.chat_template_kwargs.enable_thinking=false")
    assert thinking.model.chat_template_kwargs == {"enable_thinking": False}
    assert thinking.compute_identity() != plain.compute_identity()
    assert load("model.template_date=2025-01-31").compute_identity() == plain.compute_identity()


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("chat_template_kwargs={messages: 1}", "gets this from Transformers"),
        ("chat_template_kwargs={'a b': 1}", "cannot read such a name"),
        ("chat_template_kwargs={bos_token: x}", "gets this from Transformers"),
        ("chat_template_kwargs={thinking: [1]}", "true or false"),
        ("chat_template_kwargs={thinking: .nan}", "true or false"),
        ("template_date=yesterday", "not a date"),
    ],
)
def test_what_no_template_could_read_is_refused(load, override, reason):
    with pytest.raises(SpecError, match=reason):
        load(f"model.{override}")


def test_a_sweep_keeps_the_date_of_its_start(load, monkeypatch):
    """Source: open-unlearning#98: prompts that change overnight cannot be compared."""
    from gdpo_tune.ledger import opening

    class Clock(opening.date):
        day = 1

        @classmethod
        def today(cls):
            return cls(2025, 1, cls.day)

    monkeypatch.setattr(opening, "date", Clock)
    for Clock.day in (1, 2):
        with Ledger.open(load()) as ledger:
            assert ledger.spec.model.template_date == "2025-01-01"
            recorded = load_spec(ledger.directory / "spec.yaml")
        assert recorded.model.template_date == "2025-01-01"
    with pytest.raises(IdentityError, match=r"template_date = 2025-01-01, not 2025-01-02"):
        Ledger.open(load("model.template_date=2025-01-02"))
    with Ledger.open(load(), fresh=True) as ledger:
        assert ledger.spec.model.template_date == "2025-01-02"
