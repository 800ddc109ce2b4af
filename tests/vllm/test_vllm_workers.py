"""Two workers that share a policy: each samples its part of a step with an engine of its own."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from gdpo_tune.core import registry
from gdpo_tune.core.parameters import PARAMETERS
from gdpo_tune.core.settings import DataSettings, ModelSettings, RolloutSettings
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.training import distributed, train, vllm_engine
from tests.support.process_groups import launch
from tests.vllm.conftest import TRAINING

pytestmark = pytest.mark.vllm

RATIO = "train/sampling/importance_sampling_ratio/mean"
APART = "train/sampling/sampling_logp_difference/max"


@pytest.mark.parametrize("lora_rank", [0, 4], ids=["every weight", "adapters"])
def test_engines_follow_the_shared_policy(tmp_path, lora_rank):
    launch("together", tmp_path, lora_rank, processes=2, script=__file__)
    seen, other = (json.loads((tmp_path / f"seen-{rank}.json").read_text()) for rank in (0, 1))
    assert seen == other
    first, second, test = seen
    for step in (first, second):
        print(f"  |log p(vLLM) - log p(trainer)| at most {step[APART]:.7f}")
        assert step[RATIO] == pytest.approx(1, abs=1e-3)
        assert 0 < step[APART] < 1e-4
    assert second["train/kl"] > 0, "the policy has moved, and both engines with it"
    assert all(math.isfinite(mean) for mean in test.values())


def train_together(directory: Path, lora_rank: int) -> None:
    """Train in one of several workers, which write the metrics that they reported."""
    registry.TASKS["shape"] = "tests.vllm.conftest:SHAPE"
    vllm_engine.CPU_CACHE = 2**26
    params = {name: info.default for name, info in PARAMETERS.items()}
    params |= {"reward_weights.digits": 1.0, "reward_weights.length": 1.0}
    params |= {"learning_rate": 1e-3, "group_size": 4, "beta": 0.04}
    config = TrialConfig(
        "shape",
        "embedded",
        0,
        params,
        TRAINING,
        directory,
        data=DataSettings(max_prompt_length=64),
        model=ModelSettings(lora_rank=lora_rank),
        rollout=RolloutSettings(engine="vllm"),
        sharded=True,
    )
    seen: list[Any] = []
    outcome = train(config, resume=None, report=lambda m, _: seen.append(dict(m.metrics)))
    seen.append({name: estimate.mean for name, estimate in outcome.test.items()})
    (directory / f"seen-{distributed.get_rank()}.json").write_text(json.dumps(seen))
    distributed.broadcast_from_first(None)


if __name__ == "__main__":
    train_together(Path(sys.argv[2]), int(sys.argv[3]))
