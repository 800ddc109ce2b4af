"""Script of `tests/vllm/test_vllm_workers.py`: workers that share a policy, each with an engine.

Each process writes the metrics that it reported.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from gdpo_tune.core import registry
from gdpo_tune.core.parameters import PARAMETERS
from gdpo_tune.core.settings import DataSettings, ModelSettings, RolloutSettings
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.training import ranks, train, vllm_engine
from tests.vllm.conftest import TRAINING


def main(lora_rank: int, directory: Path) -> None:
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
    (directory / f"seen-{ranks.get_rank()}.json").write_text(json.dumps(seen))
    ranks.broadcast_from_first(None)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
