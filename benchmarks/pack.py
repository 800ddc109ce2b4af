"""N LoRA trials of one policy: each in its own process, one after another in one, and as a pack.

    python benchmarks/pack.py [--small] [--sizes 2 4 8] [--engine vllm] [--policy DIRECTORY]

All sides train the same trials, which differ in learning rate, reward weights, normalization and
group size. Trials an hour count the time of whole processes: imports, loading, start of the engine,
training, held-out evaluation and checkpoints. The rewards cost nothing. Memory is the largest
resident memory of a process, and on a GPU what torch had reserved there, the engine included.

It runs on a GPU where there is one, else on a CPU. The last line is JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from harness import run
from paired_timing import Plan

from gdpo_tune.core.settings import ModelSettings
from gdpo_tune.core.trial_config import TrialConfig


@dataclass(frozen=True)
class Work:
    """What every trial does."""

    policy: str
    engine: str
    steps: int
    completions: int
    tokens: int
    rank: int
    threads: int


def measure_size(work: Work, size: int) -> dict[str, Any]:
    """Measure the three sides for N = `size` and compare their metrics."""
    numbers = range(size)
    apart = [run_side(work, "successive", [number]) for number in numbers]
    separate = {
        "wall_seconds": sum(one["wall_seconds"] for one in apart),
        "cpu_seconds": sum(one["cpu_seconds"] for one in apart),
        "memory_mib": max(one["memory_mib"] for one in apart),
        "gpu_mib": max(one["gpu_mib"] for one in apart),
        "metrics": [metrics for one in apart for metrics in one["metrics"]],
    }
    successive = run_side(work, "successive", list(numbers))
    together = run_side(work, "pack", list(numbers))
    sides = {"separate": separate, "successive": successive, "pack": together}
    for name, side in sides.items():
        shown = (side[key] for key in ("wall_seconds", "cpu_seconds", "memory_mib", "gpu_mib"))
        print(f"{size:2}  {name:10}", *(f"{value:10.1f}" for value in shown))
    kept = ("wall_seconds", "cpu_seconds", "memory_mib", "gpu_mib")
    return {
        "size": size,
        "device": apart[0]["device"],
        **{name: {key: round(side[key], 1) for key in kept} for name, side in sides.items()},
        "trials_an_hour": round(3600 * size / together["wall_seconds"], 1),
        "speedup_over_separate": round(separate["wall_seconds"] / together["wall_seconds"], 2),
        "speedup_over_successive": round(successive["wall_seconds"] / together["wall_seconds"], 2),
        "memory_of_one_trial": round(together["memory_mib"] / separate["memory_mib"], 2),
        "largest_difference": {
            name: compare(together["metrics"], sides[name]["metrics"])
            for name in ("separate", "successive")
        },
    }


def run_side(work: Work, side: str, numbers: list[int]) -> dict[str, Any]:
    """Run trials in a process of their own and return its figures.

    Raises:
        SystemExit: the process failed.
    """
    with tempfile.TemporaryDirectory() as directory:
        plan = {"work": asdict(work), "side": side, "numbers": numbers, "directory": directory}
        started = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(plan)],
            stdout=subprocess.DEVNULL,
            stderr=sys.stderr,
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{side} {numbers} ended with status {process.returncode}")
        return {
            "wall_seconds": time.perf_counter() - started,
            "cpu_seconds": usage.ru_utime + usage.ru_stime,
            "memory_mib": usage.ru_maxrss / 1024,
            **json.loads(Path(directory, "figures.json").read_text()),
        }


def compare(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> float:
    """Return the largest difference between the metrics of the same trials.

    Raises:
        SystemExit: the same trial has other metrics.
    """
    largest = 0.0
    for one, other in zip(ours, theirs, strict=True):
        if one.keys() != other.keys():
            raise SystemExit(f"metrics differ: {sorted(one.keys() ^ other.keys())}")
        largest = max(largest, *(abs(value - other[name]) for name, value in one.items()))
    return largest


RATES = (1e-4, 3e-4, 3e-5, 1e-3)
MODES = ("gdpo", "grpo", "dvao", "gd2po")
GROUPS = (8, 4, 8, 16)
GPU_METRIC = "train/gpu_"
"""Beginning of the metrics that tell of the device, not of the trial."""


def build_trial(work: Work, number: int, directory: Path) -> TrialConfig:
    """Build the trial of a number; each fourth one has the same parameters and another seed."""
    plan = Plan(
        policy=work.policy,
        engine=work.engine,
        prompts=work.completions // 8,
        group_size=8,
        tokens=work.tokens,
        steps=work.steps - 1,
        warm_up=0,
        threads=work.threads,
        model=ModelSettings(lora_rank=work.rank),
        vllm_memory_share=0.45,
    )
    config = plan.build_config(number, directory / str(number))
    place = number % len(RATES)
    changes = {
        "learning_rate": RATES[place],
        "normalization": MODES[place],
        "group_size": GROUPS[place],
        "reward_weights.format": 0.5 + place,
    }
    settings = config.training.replace(validation_prompts=16, test_prompts=16)
    return replace(config, params={**config.params, **changes}, training=settings)


def train_side(plan: dict[str, Any]) -> None:
    """Train the trials of a plan and write the figures of this process."""
    import torch

    from gdpo_tune.training import train
    from gdpo_tune.training.shared_worker import SharedWorker

    work, directory = Work(**plan["work"]), Path(plan["directory"])
    trials = [build_trial(work, number, directory) for number in plan["numbers"]]
    if plan["side"] == "pack":
        pack = SharedWorker(len(trials))
        with ThreadPoolExecutor(len(trials)) as threads:
            metrics = list(threads.map(lambda config: train_one(pack.train, config), trials))
        pack.close()
    else:
        metrics = [train_one(train, config) for config in trials]
    on_gpu = torch.cuda.is_available()
    figures = {
        "metrics": metrics,
        "device": torch.cuda.get_device_name() if on_gpu else f"CPU, {work.threads} threads",
        "gpu_mib": torch.cuda.max_memory_reserved() / 2**20 if on_gpu else 0.0,
    }
    (directory / "figures.json").write_text(json.dumps(figures))


def train_one(train_trial: Any, config: TrialConfig) -> dict[str, float]:
    """Train one trial and return its metrics of all steps, and the held-out ones."""
    metrics: dict[str, float] = {}

    def report(measurement: Any, checkpoint: Path | None) -> None:
        for name, value in measurement.metrics.items():
            if not name.startswith(GPU_METRIC):
                metrics[f"{measurement.step}/{name}"] = value

    outcome = train_trial(config, resume=None, report=report)
    return metrics | {f"test/{name}": one.mean for name, one in outcome.test.items()}


def measure(
    sizes: list[int] = [4],
    policy: str = "embedded",
    engine: str = "transformers",
    steps: int = 10,
    completions: int = 64,
    tokens: int = 64,
    rank: int = 16,
    threads: int = 1,
):
    """Measure every number of trials; threads are those of torch, on a CPU."""
    work = Work(policy, engine, steps, completions, tokens, rank, threads)
    print(" N  side         wall s   CPU s   memory MiB   GPU MiB")
    figures = [measure_size(work, size) for size in sizes]
    return {"device": figures[0].pop("device"), **asdict(work), "sizes": figures}


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("{"):
        train_side(json.loads(sys.argv[1]))
    else:
        run(measure, {"sizes": [2], "steps": 2, "completions": 16, "tokens": 16})
