"""AdamW with 8-bit moments: its checkpoints resume bit by bit, and on other processes."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gdpo_tune.training import train
from gdpo_tune.training.training_state import gather_optimizer
from tests.support.training import SETTINGS, build_trial_config, write_policy
from tests.training.test_sharding import assert_resumed, run_trials

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("toy")]
pytest.importorskip("torchao", reason="needs the extra adam8bit")

WIDE = 128
"""Width of a policy most of whose moments are large enough for 8 bits, also in halves."""


def test_a_training_resumes_bit_by_bit(tmp_path):
    policy = write_policy(tmp_path / "policy", width=WIDE)

    def run(name, optimizer, stop=0, resume=None):
        settings = SETTINGS.replace(optimizer=optimizer)
        config = build_trial_config(
            policy, tmp_path / name, settings=settings, learning_rate=1e-3, beta=0.01
        )
        metrics = []

        def report(measurement, _):
            metrics.append(dict(measurement.metrics))
            if measurement.step == stop:
                raise SystemExit

        with pytest.raises(SystemExit) if stop else nullcontext():
            outcome = train(config, resume=resume, report=report)
            return metrics, outcome.validation, outcome.test

    def read_state(name):
        file = tmp_path / name / "checkpoint-2" / "optimizer.pt"
        return torch.load(file, weights_only=True)["state"].values()

    run("cut", "adamw_8bit", stop=2)
    run("plain", "adamw", stop=2)
    (repeated, *rest), *outcome = run("cut", "adamw_8bit", resume=tmp_path / "cut/checkpoint-2")
    steps, *expected = run("whole", "adamw_8bit")
    assert repeated == {}
    assert (rest, outcome) == (steps[2:], expected)
    entries = [*read_state("cut")]
    assert all(each["exp_avg"].dtype == torch.float32 for each in entries)
    assert any("exp_avg_scale" in each for each in entries)
    distances = []
    for each, exact in zip(entries, read_state("plain"), strict=True):
        distances.append(float((each["exp_avg"] - exact["exp_avg"]).norm()))
        assert distances[-1] < 0.02 * exact["exp_avg"].norm()
    assert any(distances), "8 bits round the moments"


def test_a_checkpoint_takes_no_memory_of_a_gpu_for_moments_in_32_bits():
    with FakeTensorMode():
        moments = {name: torch.empty(8, device="cuda") for name in ("exp_avg", "exp_avg_sq")}
    optimizer = SimpleNamespace(state_dict=lambda: {"state": {0: moments}}, _new_buffer=None)
    gathered = gather_optimizer(optimizer)["state"][0]
    assert {value.device.type for value in gathered.values()} == {"cpu"}


@pytest.mark.system
@pytest.mark.slow
def test_workers_share_moments_and_go_on_with_those_of_one(tmp_path):
    policy, one, two = write_policy(tmp_path / "policy", width=WIDE), tmp_path / "1", tmp_path / "2"
    alone = run_trials("eight", policy, one, 1)
    shared = run_trials("eight", policy, two, 2, one, two)
    assert_resumed(shared, "eight", two, shared)
    # Adam's steps follow the codes, and the next code is a percent away.
    assert_resumed(shared, "eight", one, alone, rel=1e-3)
    for (_, ours), (_, theirs) in zip(shared["eight"][0], alone["eight"][0], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-6)
