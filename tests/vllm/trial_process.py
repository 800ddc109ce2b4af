"""Trains trials one after the other in this process, and prints the last one as JSON.

    python -m tests.vllm.trial_process DIRECTORY RANK TRIAL...

RANK is that of adapters (0: none). A TRIAL is a name of `TRIALS`.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from gdpo_tune.core import registry
from gdpo_tune.core.errors import EngineDiedError, TrialFailure
from gdpo_tune.core.parameters import PARAMETERS
from gdpo_tune.core.settings import DataSettings, ModelSettings, RolloutSettings
from gdpo_tune.core.trial_config import TrialConfig
from tests.vllm.conftest import TRAINING

TRIALS: dict[str, dict[str, Any]] = {
    "plain": {"seed": 5, "beta": 0.0},
    "target": {"seed": 3, "beta": 0.01},
    "stopped": {"seed": 1},
    "diverges": {"seed": 2, "learning_rate": 1e30},
    "dies": {"seed": 4},
    "baseline": {"seed": 3, "train": False},
}


def build(directory: Path, rank: int, name: str) -> TrialConfig:
    params = {key: info.default for key, info in PARAMETERS.items()}
    params |= {"reward_weights.digits": 1.0, "reward_weights.length": 1.0}
    params |= {"learning_rate": 1e-3, "group_size": 4}
    changes = dict(TRIALS[name])
    params |= {key: changes.pop(key) for key in list(changes) if key in PARAMETERS}
    return replace(
        TrialConfig(
            "shape",
            "embedded",
            0,
            params,
            TRAINING.replace(steps=4, checkpoint_every=3),
            directory / name,
            data=DataSettings(max_prompt_length=64),
            model=ModelSettings(lora_rank=rank),
            rollout=RolloutSettings(engine="vllm"),
        ),
        **changes,
    )


def run(config: TrialConfig, name: str) -> dict[str, Any]:
    """Train a trial; return what it reported, and how it ended."""
    from gdpo_tune.training import engine, train

    answer: dict[str, Any] = {"ended": "", "reports": []}
    started = time.monotonic()

    def report(measurement: Any, checkpoint: Any) -> None:
        answer.setdefault("seconds_to_first_step", time.monotonic() - started)
        answer["reports"].append([measurement.step, dict(measurement.metrics)])
        if name == "stopped" and measurement.step == 2:
            raise SystemExit
        if name == "dies":
            engine.PROCESS_ENGINE._engine.llm.llm_engine.step = lambda: 1 / 0

    try:
        outcome = train(config, resume=None, report=report)
    except (TrialFailure, EngineDiedError, SystemExit) as error:
        return {**answer, "ended": type(error).__name__}
    answer["test"] = {key: repr(value) for key, value in outcome.test.items()}
    answer["validation"] = {key: repr(one) for key, one in outcome.validation.items()}
    if outcome.checkpoint is not None:
        weights = b"".join(f.read_bytes() for f in outcome.checkpoint.glob("*.safetensors"))
        answer["weights"] = hashlib.sha256(weights).hexdigest()
    return answer


def main() -> None:
    """Print what the last of the trials gave."""
    from gdpo_tune.training import engine, vllm_engine

    registry.TASKS["shape"] = "tests.vllm.conftest:SHAPE"
    vllm_engine.CPU_CACHE = 2**26
    directory, rank, *names = sys.argv[1:]
    answer: dict[str, Any] = {}
    engines: list[Any] = []  # kept, so that no two have the same id
    for name in names:
        answer = run(build(Path(directory), int(rank), name), name)
        print(name, answer["ended"], file=sys.stderr)
        engines.append(engine.PROCESS_ENGINE._engine)
    answer["engines"] = len({id(engine) for engine in engines})
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
