"""Seconds to a trial's first sample with a new vLLM and a kept one, and those of a merge on it.

    python benchmarks/engine_reuse.py            # 3 processes of 4 trials each, for two trainings
    python benchmarks/engine_reuse.py --small    # 1 process of 2 trials
    python benchmarks/engine_reuse.py --policy Qwen/Qwen2.5-0.5B-Instruct

Each process trains several trials of one step: every weight, or adapters. Only the first trial of a
process starts an engine. Imports are measured apart. Then the last two policies are merged, and the
merge is evaluated on the kept engine and by Transformers. The last line is JSON; without vLLM it
says so.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import build_trial, call_apart, print_table, run

from gdpo_tune.core.engines import find_vllm
from gdpo_tune.core.settings import DataSettings, ModelSettings, RolloutSettings, TrainingSettings
from gdpo_tune.core.trial_config import TrainedPart

PROMPTS = {"train_prompts": 16, "validation_prompts": 4, "test_prompts": 4}
TRAINING = TrainingSettings(steps=1, completions_per_step=16, max_completion_length=32, **PROMPTS)


def measure_starts(policy: str, rank: int, trials: int) -> dict[str, Any]:
    """Train trials in this process; return its seconds of imports and of each trial's start."""
    started = time.monotonic()
    from gdpo_tune.training import train
    from gdpo_tune.training.engine import Engine

    found: dict[str, Any] = {"imports": time.monotonic() - started, "starts": []}
    plain = Engine.generate

    def generate(engine: Any, *arguments: Any) -> Any:
        if len(found["starts"]) < number:
            found["starts"].append(time.monotonic() - begun)
        return plain(engine, *arguments)

    Engine.generate = generate
    parts: list[TrainedPart] = []
    with tempfile.TemporaryDirectory() as directory:
        for number in range(1, trials + 1):
            config = build_trial(
                *("math", policy, Path(directory, str(number)), {}),
                seed=number,
                training=TRAINING,
                data=DataSettings(max_prompt_length=256),
                model=ModelSettings(lora_rank=rank),
                rollout=RolloutSettings(engine="vllm"),
                engine_rank=2 * rank,
            )
            begun = time.monotonic()
            outcome = train(config, resume=None, report=lambda *_: None)
            parts.append(TrainedPart(outcome.checkpoint, 0.5))
        for engine in ("vllm", "transformers"):
            place = {
                "rollout": RolloutSettings(engine=engine),
                "directory": Path(directory, engine),
            }
            merge = replace(config, train=False, parts=tuple(parts[-2:]), **place)
            begun = time.monotonic()
            train(merge, resume=None, report=lambda *_: None)
            found[f"merge_{engine}"] = time.monotonic() - begun
    return found


def measure(policy: str = "embedded", trials: int = 4, processes: int = 3):
    """Train every weight, and adapters, in processes of their own; return medians over them."""
    if find_vllm() is None:
        return {"skipped": "vLLM is not installed"}
    answer: dict[str, Any] = {"policy": policy}
    for name, rank in (("every_weight", 0), ("adapters", 8)):
        runs = [call_apart(measure_starts, policy, rank, trials) for _ in range(processes)]
        seconds = {
            "imports": [one["imports"] for one in runs],
            "cold": [one["starts"][0] for one in runs],
            "kept": [start for one in runs for start in one["starts"][1:]],
            "merge": [one["merge_vllm"] for one in runs],
            "merge_without": [one["merge_transformers"] for one in runs],
        }
        answer[name] = {part: round(statistics.median(all), 3) for part, all in seconds.items()}
        print_table(("", *seconds), (name, *answer[name].values()))
    return answer


if __name__ == "__main__":
    run(measure, {"trials": 2, "processes": 1})
