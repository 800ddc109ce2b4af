"""`steps.jsonl` of earlier versions."""

import json

from gdpo_tune.core.steps import STEPS_FILE, read_steps


def test_names_of_earlier_versions_are_read_as_those_of_trl(tmp_path):
    metrics = {
        "train/reward/format/mean": 0.5,
        "train/reward/format/dead_groups": 0.25,
        "train/mean_length": 9.0,
        "train/clip_ratio": 0.0,
        "validation/mean_length": 8.0,
    }
    (tmp_path / STEPS_FILE).write_text(json.dumps({"step": 1, "metrics": metrics, "cost": {}}))
    (step,) = read_steps(tmp_path)
    assert step.metrics == {
        "train/rewards/format/mean": 0.5,
        "train/rewards/format/frac_reward_zero_std": 0.25,
        "train/completions/mean_length": 9.0,
        "train/clip_ratio": 0.0,
        "validation/mean_length": 8.0,
    }
