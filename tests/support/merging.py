"""Merges of policies that toy trials have trained."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from gdpo_tune.core.settings import ModelSettings
from gdpo_tune.core.trial_config import TrainedPart
from gdpo_tune.core.trials import Cost
from gdpo_tune.policies.load_policy import load_policy
from gdpo_tune.training.checkpoints import write_checkpoint
from gdpo_tune.training.merging import check_parts, write_merge
from tests.support.training import SETTINGS, build_trial_config

PLAIN, LORA = ModelSettings(), ModelSettings(lora_rank=4)
QUICK = SETTINGS.replace(steps=2, checkpoint_every=1)


def configure(policy, directory: Path, parts, model: ModelSettings = PLAIN):
    config = build_trial_config(policy, directory, settings=QUICK)
    return dataclasses.replace(config, train=False, parts=parts, model=model)


def merge(parts, directory: Path, policy: str) -> Path:
    directory.mkdir(parents=True)
    check_parts(parts)
    write_merge(parts, directory, lambda: load_policy(policy)[0])
    return directory


def merge_adapters(parts, directory: Path) -> Path:
    directory.mkdir(parents=True)
    check_parts(parts)
    write_merge(parts, directory)
    return directory


def load_weights(directory: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a policy that may be an adapter."""
    return load_policy(str(directory))[0].state_dict()


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    weights = [load_file(path) for path in sorted(directory.glob("model*.safetensors"))]
    return {name: tensor for file in weights for name, tensor in file.items()}


def write_copy(part: TrainedPart, directory: Path, change) -> TrainedPart:
    """Write a complete checkpoint with the files of a part, changed."""

    def fill(target):
        shutil.copytree(
            part.checkpoint, target, dirs_exist_ok=True, ignore=lambda *_: {"complete.json"}
        )
        change(target)

    return dataclasses.replace(part, checkpoint=write_checkpoint(directory, 2, Cost(), fill).path)
