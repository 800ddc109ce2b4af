"""Seconds from a trial's start to its first sample, with a new vLLM and with a kept one.

    python benchmarks/engine_reuse.py            # 3 processes of 4 trials each, for two trainings
    python benchmarks/engine_reuse.py --small    # 1 process of 2 trials
    python benchmarks/engine_reuse.py --policy Qwen/Qwen2.5-0.5B-Instruct

Each process trains several trials of one step: every weight, or adapters. Only the first trial of a
process starts an engine. Imports are measured apart. The last line is JSON; without vLLM it says
so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gdpo_tune.core.engines import find_vllm
from gdpo_tune.core.parameters import list_parameters
from gdpo_tune.core.settings import DataSettings, ModelSettings, RolloutSettings, TrainingSettings
from gdpo_tune.core.task_files import load_task_info
from gdpo_tune.core.trial_config import TrialConfig

TRAINING = TrainingSettings(
    steps=1,
    completions_per_step=16,
    max_completion_length=32,
    train_prompts=16,
    validation_prompts=4,
    test_prompts=4,
)


def measure(policy: str, rank: int, trials: int) -> dict[str, Any]:
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
    params = {
        name: info.default for name, info in list_parameters(load_task_info("math", {})).items()
    }
    with tempfile.TemporaryDirectory() as directory:
        for number in range(1, trials + 1):
            config = TrialConfig(
                "math",
                policy,
                number,
                params,
                TRAINING,
                Path(directory, str(number)),
                data=DataSettings(max_prompt_length=256),
                model=ModelSettings(lora_rank=rank),
                rollout=RolloutSettings(engine="vllm"),
            )
            begun = time.monotonic()
            train(config, resume=None, report=lambda *_: None, with_test=False)
    return found


def measure_processes(policy: str, rank: int, trials: int, processes: int) -> dict[str, float]:
    """Return medians over processes."""
    command = [sys.executable, __file__, "--process", str(rank), "--trials", str(trials)]
    runs: list[dict[str, Any]] = []
    for _ in range(processes):
        done = subprocess.run([*command, "--policy", policy], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    return {
        "imports": statistics.median(run["imports"] for run in runs),
        "cold": statistics.median(run["starts"][0] for run in runs),
        "kept": statistics.median(start for run in runs for start in run["starts"][1:]),
    }


def main() -> None:
    """Print a line for each kind of training, then JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="for a test of this script")
    parser.add_argument("--policy", default="embedded")
    parser.add_argument("--trials", type=int, default=4, help="of a process")
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if find_vllm() is None:
        print(json.dumps({"skipped": "vLLM is not installed"}))
        return
    if chosen.process is not None:
        print(json.dumps(measure(chosen.policy, chosen.process, chosen.trials)))
        return
    trials, processes = (2, 1) if chosen.small else (chosen.trials, 3)
    answer: dict[str, Any] = {"policy": chosen.policy}
    for name, rank in (("every_weight", 0), ("adapters", 8)):
        seconds = measure_processes(chosen.policy, rank, trials, processes)
        answer[name] = {part: round(value, 3) for part, value in seconds.items()}
        print(
            f"{name:12}  first sample after {seconds['cold']:.2f} s with a new engine, "
            f"{seconds['kept']:.2f} s with a kept one (imports {seconds['imports']:.2f} s)"
        )
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
