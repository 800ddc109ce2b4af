"""Tables of names: each entry is complete; and what the first steps of a program import."""

import subprocess
import sys

import pytest
from trl import GRPOConfig

from gdpo_tune.core import registry
from gdpo_tune.core.parameters import PARAMETERS
from gdpo_tune.core.text import suggest


@pytest.mark.parametrize("name", registry.TASKS)
def test_a_task_is_complete(name):
    info = registry.describe_task(name)
    assert set(info.published) <= {
        "normalization",
        *(f"reward_weights.{reward}" for reward in info.rewards),
    }
    assert info.embedded in registry.POLICIES
    assert {info.length_reward, info.partial_reward} <= {None, *info.rewards}
    assert not info.optional_rewards.keys() & info.rewards.keys()
    assert info.published_with.keys() <= info.optional_rewards.keys()


@pytest.mark.parametrize("name", registry.POLICIES)
def test_a_policy_is_a_directory(name):
    assert (registry.POLICIES[name] / "config.json").is_file()


@pytest.mark.parametrize("name", ["temperature", "beta", "epsilon", "num_iterations", "loss_type"])
def test_the_default_of_a_parameter_is_that_of_trl(name):
    assert PARAMETERS[name].default == GRPOConfig.__dataclass_fields__[name].default


def test_the_two_closest_names_are_suggested():
    """Source: difflib.get_close_matches, by the share of letters in common."""
    assert suggest("stp", ["steps", "step", "seed", "stop"]) == "did you mean 'stop' or 'step'? "


CHECK = "from gdpo_tune.policies.load_policy import check_policy; check_policy('embedded')"
HELP = "from gdpo_tune import export; export.build_parser().format_help()"


@pytest.mark.parametrize(
    ("program", "heavy"),
    [
        ("import gdpo_tune", "pandas numpy optuna plotly torch ray"),
        (CHECK, "torch transformers tokenizers"),
        (HELP, "torch optuna pydantic rich ray numpy"),
        (  # a sweep may still be refused once the display is there
            "import gdpo_tune.display, gdpo_tune.tracking, gdpo_tune.spec.first_trials",
            "matplotlib plotly scipy.stats mlflow",
        ),
    ],
    ids=["package", "policy", "help", "display"],
)
def test_the_first_steps_import_nothing_heavy(program, heavy):
    program += f"; import sys; print(*set({heavy.split()}) & set(sys.modules))"
    said = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert said == "\n"
