"""Run by `tests/training/test_processes.py`, once alone and once as two processes.

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

import torch

from gdpo_tune.core import registry
from gdpo_tune.policies.load_policy import load_policy
from gdpo_tune.training import ranks, rollout, train
from gdpo_tune.training.checkpoints import find_newest_checkpoint
from tests.support.training import SETTINGS, TARGET, trial

LETTERS = list(range(2, 28))


def fixed_rollout(prompts, trainer):
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


def run(config, resume=None, stop=None):
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


def weights(checkpoint: Path) -> float:
    tensors = load_policy(str(checkpoint))[0].state_dict().values()
    return float(sum(tensor.double().abs().sum() for tensor in tensors))


def main(policy: str, folder: Path) -> None:
    registry.TASKS["toy"] = TARGET
    settings = dataclasses.replace(SETTINGS, steps=4)
    result = {"sampled": run(trial(policy, folder / "sampled", settings=settings))}
    cut = trial(policy, folder / "cut", settings=settings)
    first, _ = run(cut, stop=3)
    # As tuning does: the checkpoint is chosen once, before the processes start.
    resume = ranks.broadcast_from_first(find_newest_checkpoint(cut.directory))
    rest, outcome = run(cut, resume=resume)
    result["resumed"] = [first + rest, outcome]
    rollout.sample_for_trainer = fixed_rollout
    # Losses that are means over tokens, of all workers (dapo) and of each worker (bnpo).
    for name, loss_type, size in (
        ("fixed", "dapo", 0),
        ("parts", "dapo", 2),
        ("each", "bnpo", 0),
        ("each_parts", "bnpo", 2),
    ):
        parts = dataclasses.replace(settings, micro_batch_size=size)
        config = trial(policy, folder / name, settings=parts, loss_type=loss_type, beta=0.01)
        result[name] = run(config)
        result[f"{name}_weights"] = weights(folder / name / "checkpoint-4")
    (folder / f"seen-{ranks.get_rank()}.json").write_text(json.dumps(result))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
