"""Script of `tests/training/test_sharding.py`, run as one process and as several.

Trains the toy task with completions that depend on the prompt alone, and held-out completions that
depend on the policy alone, so that all runs see the same rewards. Several processes share the
policy. Each process writes the metrics that it reported.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from gdpo_tune.core import registry
from gdpo_tune.core.settings import ModelSettings
from gdpo_tune.core.trial_config import TrialConfig
from gdpo_tune.training import ranks, rollout
from gdpo_tune.training.checkpoints import find_newest_checkpoint
from tests.support.processes import leave_group
from tests.support.training import SETTINGS, TARGET, build_trial_config
from tests.support.trial_in_processes import run_trial, sample_fixed_completions

STEPS = SETTINGS.replace(steps=4)
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "parts": {"training": dataclasses.replace(STEPS, micro_batch_size=2)},
    "adapters": {"model": ModelSettings(lora_rank=2)},
    "eight": {"training": dataclasses.replace(STEPS, optimizer="adamw_8bit")},
}
ENGINES = {"lean", "transformers"}
"""Names of trials that sample for themselves, each with the engine of that name."""


def sample_greedily(model, prompts, decoding, generator):
    return rollout.generate(
        model, prompts, dataclasses.replace(decoding, temperature=None), generator
    )


def resume_trial(config: TrialConfig):
    # As tuning does: the checkpoint is chosen once, before the processes start.
    return run_trial(
        config, resume=ranks.broadcast_from_first(find_newest_checkpoint(config.directory))
    )


def main(names: list[str], policy: str, directory: Path, others: list[Path]) -> None:
    """Train into `directory`, and go on with the trials that ended early in the `others`."""
    registry.TASKS["toy"] = TARGET
    ranks.join_process_group()
    result: dict[str, Any] = {}

    def build(name: str, **changes: Any) -> TrialConfig:
        plain = build_trial_config(
            policy, directory / name, settings=STEPS, beta=0.01, learning_rate=1e-3
        )
        return dataclasses.replace(plain, sharded=ranks.count_processes() > 1, **changes)

    for name in sorted(ENGINES & {*names}):  # in the same order in every process
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rollout, "choose_engine", lambda *_, engine=name: engine)
            result[name] = run_trial(build(name))
            first, _ = run_trial(build(f"{name}-cut"), stop=3)
            rest, outcome = resume_trial(build(f"{name}-cut"))
            result[f"{name}-cut"] = [first + rest, outcome]
    rollout.choose_engine = lambda *_: "lean"
    rollout.sample_for_trainer = sample_fixed_completions
    rollout.choose_held_out_sampler = lambda _: sample_greedily
    for name in (name for name in VARIANTS if name in names):
        result[name] = run_trial(build(name, **VARIANTS[name]))
        result[f"{name}-cut"] = run_trial(build(f"{name}-cut", **VARIANTS[name]), stop=2)
        for other in others:
            goal = f"{name}-after-{other.name}"
            if ranks.is_first():
                shutil.copytree(other / f"{name}-cut", directory / goal)
            ranks.broadcast_from_first(None)
            result[goal] = resume_trial(build(goal, **VARIANTS[name]))
    (directory / f"seen-{ranks.get_rank()}.json").write_text(json.dumps(result))
    leave_group()


if __name__ == "__main__":
    main(sys.argv[1].split(","), sys.argv[2], Path(sys.argv[3]), list(map(Path, sys.argv[4:])))
