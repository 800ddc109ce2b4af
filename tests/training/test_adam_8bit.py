"""AdamW with 8-bit moments: it resumes bit by bit, and up to rounding where it is divided."""

import pytest

from tests.support.training import SETTINGS, stop_after, write_policy
from tests.support.trials import build_trial, get_results, run_metrics
from tests.training.test_sharding import assert_resumed, run_trials

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("toy")]
pytest.importorskip("torchao", reason="needs the extra adam8bit")

WIDE = 128
"""Width of a policy most of whose moments are large enough for 8 bits, also in halves."""


def test_a_training_resumes_bit_by_bit(tmp_path):
    policy = write_policy(tmp_path / "policy", width=WIDE)

    def build(name, optimizer="adamw_8bit"):
        settings = SETTINGS.replace(optimizer=optimizer)
        fields = {"training": settings, "learning_rate": 1e-3, "beta": 0.01}
        return build_trial(policy, tmp_path / name, **fields)

    newest = stop_after(build("cut"), 2)
    plain, _ = run_metrics(build("plain", "adamw"))
    rest, outcome = run_metrics(build("cut"), newest)
    steps, expected = run_metrics(build("whole"))
    assert newest.name == "checkpoint-2"
    assert rest == steps[2:]
    assert get_results(outcome) == get_results(expected)
    assert plain != steps, "8 bits round the moments"


@pytest.mark.system
@pytest.mark.slow
def test_workers_share_moments_and_go_on_with_them(tmp_path):
    policy, one, two = write_policy(tmp_path / "policy", width=WIDE), tmp_path / "1", tmp_path / "2"
    alone = run_trials("eight", policy, one, 1)
    shared = run_trials("eight", policy, two, 2, two)
    # Adam's steps follow the codes, and the next code is a percent away.
    assert_resumed(shared, "eight", two, shared, rel=1e-3)
    for (_, ours), (_, theirs) in zip(shared["eight"][0], alone["eight"][0], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-6)
