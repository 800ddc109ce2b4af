"""Tables of names: each entry can be loaded, and describing tasks stays light."""

import subprocess
import sys

import pytest

from gdpo_tune.core import registry

HEAVY = {"torch", "ray", "trl", "transformers", "optuna", "mlflow", "scipy", "gdpo_tune.sandbox"}


def test_describing_every_task_imports_no_heavy_library():
    program = (
        "import sys; import gdpo_tune.spec; from gdpo_tune.core import registry;"
        "[registry.describe_task(name) for name in registry.TASKS];"
        f"print({HEAVY} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


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
    assert name not in registry.REMOVED_TASKS


@pytest.mark.parametrize("name", registry.POLICIES)
def test_a_policy_is_a_directory(name):
    assert (registry.POLICIES[name] / "config.json").is_file()
