"""AdamW with averages in 8 bits: its checkpoints resume bit by bit, and on other processes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gdpo_tune.training.training_state import gather_optimizer
from tests.support.training import write_policy
from tests.training.test_sharding import assert_resumed, run_trials

pytestmark = pytest.mark.integration
pytest.importorskip("torchao", reason="needs the extra adam8bit")

WIDE = 128
"""Width of a policy most of whose averages are large enough for 8 bits, also in halves."""


def read_averages(checkpoint):
    state = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"]
    return [entries["exp_avg"] for entries in state.values()], [*state.values()]


def test_a_training_resumes_bit_by_bit(tmp_path):
    one = tmp_path / "1"
    seen = run_trials("full,eight", write_policy(tmp_path / "policy", width=WIDE), one, 1, one)
    repeated, *steps = seen["eight-after-1"][0]
    assert repeated == [2, {}]
    assert [steps, seen["eight-after-1"][1]] == [seen["eight"][0][2:], seen["eight"][1]]
    averages, entries = read_averages(one / "eight" / "checkpoint-2")
    assert all(average.dtype == torch.float32 for average in averages)
    assert any("exp_avg_scale" in each for each in entries)
    plain, _ = read_averages(one / "full" / "checkpoint-2")
    for average, exact in zip(averages, plain, strict=True):
        assert 0 <= (average - exact).norm() < 0.02 * exact.norm()
    assert seen["eight"] != seen["full"]


def test_a_checkpoint_takes_no_memory_of_a_gpu_for_averages_in_32_bits():
    with FakeTensorMode():
        averages = {name: torch.empty(8, device="cuda") for name in ("exp_avg", "exp_avg_sq")}
    optimizer = SimpleNamespace(state_dict=lambda: {"state": {0: averages}}, _new_buffer=None)
    gathered = gather_optimizer(optimizer)["state"][0]
    assert {value.device.type for value in gathered.values()} == {"cpu"}


@pytest.mark.system
@pytest.mark.slow
def test_workers_share_averages_and_go_on_with_those_of_one(tmp_path):
    policy, one, two = write_policy(tmp_path / "policy", width=WIDE), tmp_path / "1", tmp_path / "2"
    alone = run_trials("eight", policy, one, 1)
    shared = run_trials("eight", policy, two, 2, one, two)
    assert_resumed(shared, "eight", two, shared)
    # Adam's steps follow the codes, and the next code is a percent away.
    assert_resumed(shared, "eight", one, alone, rel=1e-3)
    for (_, ours), (_, theirs) in zip(shared["eight"][0], alone["eight"][0], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-6)
