"""The benchmark of the driver: what Ray alone is asked for."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import driver
import pytest

from tests.support.tuning import load_code_spec


def test_rays_trials_report_as_often_as_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: dict[str, Any] = {}

    class FakeTuner:
        def __init__(self, trainable: Any, **options: Any) -> None:
            asked.update(options)

        def fit(self) -> None:
            asked["fitted"] = True

    monkeypatch.setattr("ray.tune.Tuner", FakeTuner)
    monkeypatch.setattr("gdpo_tune.tuning.ray.cluster.open_cluster", nullcontext)
    run = driver.run_ray(load_code_spec(tmp_path), [3, 3, 1])
    assert asked["fitted"]
    assert asked["param_space"] == {"results": {"grid_search": [3, 3, 1]}}
    assert asked["tune_config"].num_samples == 1
    assert run.results == {3: 2, 1: 1}
    assert +run.states == {"failed": 3}  # none of them told of its end
