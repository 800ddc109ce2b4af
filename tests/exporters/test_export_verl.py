"""Folders for verl: its own code reads configuration, prompts and rewards up to a first batch."""

from __future__ import annotations

import pytest
import torch

from gdpo_tune.training.normalization import compute_advantages
from tests.support.export import export_folder, read_prompts
from tests.support.library_runs import build_first_batch, start_folder
from tests.support.packages import install_packages

pytestmark = pytest.mark.slow

PACKAGES = (
    "verl==0.9.1",
    "tensordict==0.10.0",
    "torchdata",
    "hydra-core==1.3.2",
    "omegaconf==2.3.0",
    "antlr4-python3-runtime==4.9.3",
    "codetiming",
    "pyvers",
    "orjson",
    "cloudpickle",
)
"""verl, and what it imports that a development environment lacks."""
CASES = (
    ("code", ("space.length_shape=ramp", "space.conditioning.format=correctness")),
    ("code", ("space.normalization=grpo",)),
    ("math", ("space.normalization=grpo_no_std",)),
    ("tools", ()),
)


@pytest.fixture(scope="module")
def verl(tmp_path_factory):
    """Directory with verl and the packages that its parts before sampling need."""
    return install_packages(tmp_path_factory.mktemp("verl"), *PACKAGES)


@pytest.mark.parametrize(("space", "changes"), CASES, ids=str)
def test_verl_reads_prompts_and_rewards_as_a_trial(verl, tmp_path, space, changes):
    folder = tmp_path / "a folder's export"
    request = export_folder(folder, *changes, space=space, library="verl")
    rows = read_prompts(folder)
    problems = [row["reward_model"]["ground_truth"] for row in rows[:3]]
    batch = build_first_batch(request, folder, problems)
    stand_in, change = ("python", "verl_program.py"), "trainer.total_training_steps=4"
    result = start_folder(folder, stand_in, [verl], batch, change)
    assert result["order"] == [0, 1, 2]
    assert result["rows"] == len(rows)
    assert result["prompts"] == batch.prompts
    for name, values in batch.rewards.items():
        assert result["rewards"][name] == pytest.approx(values), name
    scores = (batch.values @ batch.weights).tolist()
    assert result["scores"] == pytest.approx(scores)
    config = result["config"]
    assert config["trainer"]["total_training_steps"] == 4
    assert config["data"]["train_files"] == str(folder / "prompts.parquet")
    assert config["actor_rollout_ref"]["model"]["path"] == str(folder / "policy")
    theirs = torch.tensor(result["advantages"], dtype=torch.float64)
    torch.testing.assert_close(theirs, compute_verl_advantages(request, batch), rtol=0, atol=1e-4)


def compute_verl_advantages(request, batch):
    """Return ours, but whitened over tokens under GDPO."""
    mode = str(request.params["normalization"])
    if mode != "gdpo":
        return compute_advantages(batch.values, batch.weights, 8, mode, 1e-6)
    groups = batch.values.reshape(-1, 8, len(batch.weights))
    centred = groups - groups.mean(1, keepdim=True)
    parts = centred / (groups.std(1, keepdim=True) + 1e-6)
    summed = (parts * batch.weights).sum(-1).flatten()
    tokens = summed.repeat_interleave(batch.lengths)
    return (summed - tokens.mean()) / tokens.std()
