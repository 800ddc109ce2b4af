"""The generated reference page."""

import pytest

from docs.reference_pages import REFERENCE, read_function_doc, render_reference
from gdpo_tune.core import registry
from gdpo_tune.core.parameters import PARAMETERS
from gdpo_tune.core.settings import SandboxSettings, TrainingSettings
from gdpo_tune.spec import SweepSpec


def test_the_page_is_up_to_date():
    """If not: python docs/reference_pages.py."""
    assert REFERENCE.read_text() == render_reference()


NAMES = (
    *SweepSpec.model_fields,
    *(f"training.{name}" for name in TrainingSettings.model_fields),
    *(f"sandbox.{name}" for name in SandboxSettings.model_fields),
    *PARAMETERS,
    *registry.NORMALIZATIONS,
    *registry.SAMPLERS,
    *registry.SCHEDULERS,
    *(metric for task in registry.TASKS for metric in registry.describe_task(task).metrics),
    "search.replicates.max_runs",
    "search.scheduler.type",
    "search.scheduler.wide_share",
    "tracking.required",
    "resources.gpus",
    "objectives.<metric>.reference",
)


def test_every_name_has_a_line_of_its_own_that_says_something():
    rows = [line.strip(" |").split(" | ") for line in REFERENCE.read_text().splitlines()]
    described = {row[0] for row in rows if len(row) > 1 and row[-1].strip()}
    assert [name for name in NAMES if f"`{name}`" not in described] == []


def test_a_target_that_does_not_exist_is_a_defect():
    with pytest.raises(AttributeError, match="which does not exist"):
        read_function_doc("gdpo_tune.training.normalization", "nothing")
    with pytest.raises(ModuleNotFoundError, match=r"gdpo_tune\.nothing"):
        read_function_doc("gdpo_tune.nothing", "nothing")
