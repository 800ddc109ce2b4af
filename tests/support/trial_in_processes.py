"""Script of `tests/training/test_processes.py`, which runs it as one process and as two.

Trains the toy task with completions that depend on the prompt alone, so that both runs see the same
rewards. Each process writes the metrics that it reported.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections import Counter
from pathlib import Path

from gdpo_tune.core import registry
from gdpo_tune.core.trial_config import TrainedPart
from gdpo_tune.policies.load_policy import load_policy
from gdpo_tune.training import ranks, rollout, train
from gdpo_tune.training.checkpoints import find_newest_checkpoint
from tests.support.processes import leave_group
from tests.support.training import SETTINGS, TARGET, build_trial_config

LETTERS = list(range(2, 28))


def sample_fixed_completions(prompts, trainer):
    """Derive completions from the prompt, the step and the place in the group."""
    places: Counter[str] = Counter()
    completions = []
    for prompt in prompts:
        key = f"{prompt}/{places[prompt]}/{trainer.state.global_step}"
        places[prompt] += 1
        digest = hashlib.sha256(key.encode()).digest()
        length = 2 + digest[0] % 6
        completions.append([LETTERS[byte % 26] for byte in digest[1:length]] + [1])
    tokens = trainer.processing_class(prompts)["input_ids"]
    return {"prompt_ids": tokens, "completion_ids": completions, "logprobs": None}


def run_trial(config, resume=None, stop=None):
    reports = []

    def report(measurement, checkpoint):
        reports.append([measurement.step, dict(measurement.metrics)])
        if measurement.step == stop:
            raise SystemExit

    try:
        outcome = train(config, resume=resume, report=report)
    except SystemExit:
        return reports, None
    return reports, {name: [e.mean, e.se] for name, e in outcome.test.items()}


def sum_weights(checkpoint: Path) -> float:
    tensors = load_policy(str(checkpoint))[0].state_dict().values()
    return float(sum(tensor.double().abs().sum() for tensor in tensors))


def main(policy: str, directory: Path) -> None:
    registry.TASKS["toy"] = TARGET
    settings = SETTINGS.replace(steps=4)
    result = {
        "sampled": run_trial(build_trial_config(policy, directory / "sampled", settings=settings))
    }
    cut = build_trial_config(policy, directory / "cut", settings=settings)
    first, _ = run_trial(cut, stop=3)
    # As tuning does: the checkpoint is chosen once, before the processes start.
    resume = ranks.broadcast_from_first(find_newest_checkpoint(cut.directory))
    rest, outcome = run_trial(cut, resume=resume)
    result["resumed"] = [first + rest, outcome]
    rollout.sample_for_trainer = sample_fixed_completions
    # Losses that are means over tokens, of all workers (dapo) and of each worker (bnpo).
    for name, loss_type, size in (
        ("fixed", "dapo", 0),
        ("parts", "dapo", 2),
        ("each", "bnpo", 0),
        ("each_parts", "bnpo", 2),
    ):
        parts = settings.replace(micro_batch_size=size)
        config = build_trial_config(
            policy, directory / name, settings=parts, loss_type=loss_type, beta=0.01
        )
        result[name] = run_trial(config)
        result[f"{name}_weights"] = sum_weights(directory / name / "checkpoint-4")
    # Each process draws its part of a mini-batch from its own completions.
    parts = settings.replace(mini_batch_size=8, micro_batch_size=2)
    result["minis"] = run_trial(
        build_trial_config(policy, directory / "minis", settings=parts, beta=0.01)
    )
    ends = (directory / name / "checkpoint-4" for name in ("fixed", "each"))
    merged = dataclasses.replace(
        build_trial_config(policy, directory / "merged", settings=settings),
        train=False,
        parts=tuple(TrainedPart(end, 0.5) for end in ends),
    )
    result["merged"] = run_trial(merged)
    result["merged_weights"] = sum_weights(directory / "merged" / "checkpoint-0")
    result["again"] = run_trial(merged, resume=directory / "merged" / "checkpoint-0")
    (directory / f"seen-{ranks.get_rank()}.json").write_text(json.dumps(result))
    leave_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
