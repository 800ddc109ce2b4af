"""Folders for NeMo-RL: its own code reads configuration, prompts and rewards up to a first batch.

GDPO_TUNE_NEMO_RL=/path/to/RL pytest -m slow tests/exporters/test_export_nemo_rl.py
"""

import os
from pathlib import Path

import pytest
import torch

from gdpo_tune.training.normalization import compute_advantages
from tests.support.export import export_folder, read_prompts
from tests.support.library_runs import build_first_batch, start_folder
from tests.support.packages import install_packages

pytestmark = pytest.mark.slow

PACKAGES = (
    *("transformers==5.8.1", "tokenizers==0.22.2", "tensordict==0.10.0", "torchdata"),
    *("hydra-core==1.3.2", "omegaconf==2.3.0", "antlr4-python3-runtime==4.9.3", "pyvers"),
    *("soundfile", "cffi", "absl-py", "nvidia-ml-py", "tensorboard", "wandb"),
)
"""Packages of NeMo-RL that a development environment lacks, or has in a later version."""
NO_FORMAT = ("space.reward_weights.format=0", "space.conditioning.length=format")
CASES = (
    ("code", ("space.length_shape=ramp", "space.conditioning.format=correctness")),
    ("math", ("space.normalization=grpo",)),
    ("tools", ("space.normalization=gdpo_no_std", *NO_FORMAT)),
)


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """Directories from which NeMo-RL's own code can be imported."""
    checkout = os.environ.get("GDPO_TUNE_NEMO_RL", "")
    if not checkout:
        pytest.skip("GDPO_TUNE_NEMO_RL names no checkout of NeMo-RL")
    directory = install_packages(tmp_path_factory.mktemp("nemo"), *PACKAGES)
    (directory / "swanlab.py").touch()  # a logger that no test uses
    return [Path(checkout), directory]


@pytest.mark.parametrize(("space", "changes"), CASES, ids=str)
def test_nemo_rl_reads_prompts_and_rewards_as_a_trial(packages, tmp_path, space, changes):
    folder = tmp_path / "a folder"
    request = export_folder(folder, *changes, space=space, library="nemo-rl")
    rows = read_prompts(folder)
    batch = build_first_batch(request, folder, [row["problem"] for row in rows[:3]])
    stand_in, change = ("uv", "nemo_program.py"), "grpo.max_num_steps=4"
    checkout = {"NEMO_RL": str(packages[0])}
    result = start_folder(folder, stand_in, packages, batch, change, **checkout)
    assert result["rows"] == len(rows)
    assert result["prompts"] == batch.prompts
    assert set(result["observations"]) == {""}
    assert set(result["ended"]) == {1.0}
    assert result["stops"] == [batch.completions[0][0][-1]]
    mode = str(request.params["normalization"])
    if mode == "grpo":
        assert result["rewards"] == {"sum": pytest.approx((batch.values @ batch.weights).tolist())}
    else:
        named = {f"reward/{name}": values for name, values in batch.rewards.items()}
        assert set(result["rewards"]) == set(named)
        for name, values in named.items():
            assert result["rewards"][name] == pytest.approx(values), name
    config = result["config"]
    assert config["grpo"]["max_num_steps"] == 4
    assert config["policy"]["model_name"] == str(folder / "policy")
    assert config["checkpointing"]["checkpoint_dir"].startswith(str(folder))
    assert not (folder / "results").exists()
    theirs = torch.tensor(result["advantages"], dtype=torch.float64)
    ours = compute_advantages(batch.values, batch.weights, 8, mode, 1e-6)
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-4)
