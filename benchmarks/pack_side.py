"""One process of `pack.py`: trains some trials one after another, or as a pack."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_step_plan import Plan
from pack import Work

from gdpo_tune.core.settings import ModelSettings
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.training import train
from gdpo_tune.training.packs import Pack

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


def run(plan: dict[str, Any]) -> None:
    """Train the trials of a plan and write the figures of this process."""
    work, directory = Work(**plan["work"]), Path(plan["directory"])
    trials = [build_trial(work, number, directory) for number in plan["numbers"]]
    if plan["side"] == "pack":
        pack = Pack(len(trials))
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


if __name__ == "__main__":
    run(json.loads(sys.argv[1]))
