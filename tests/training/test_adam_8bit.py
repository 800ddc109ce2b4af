"""AdamW with 8-bit moments: it resumes bit by bit, and up to rounding where it is divided."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from gdpo_tune.training import train
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

    run("cut", "adamw_8bit", stop=2)
    plain, *_ = run("plain", "adamw")
    (repeated, *rest), *outcome = run("cut", "adamw_8bit", resume=tmp_path / "cut/checkpoint-2")
    steps, *expected = run("whole", "adamw_8bit")
    assert repeated == {}
    assert (rest, outcome) == (steps[2:], expected)
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
