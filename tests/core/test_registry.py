"""Tables of names: each entry is complete."""

import pytest

from gdpo_tune.core import registry


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
