"""The prompts of a sweep as MLflow's dataset inputs: where they are from, and how many."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gdpo_tune.spec import SweepSpec

Input = dict[str, str]
"""Name, digest, source type, source, profile and context of a dataset, as MLflow has them."""
DIGITS = 12


def dataset_inputs(spec: SweepSpec) -> list[Input]:
    """The three splits: what is trained on, what the search sees, what the front is claimed on.

    Equal digests mean equal prompts as far as the file says so: a local source that changes under
    its name keeps its digest.
    """
    training = spec.training
    splits = {
        "training": training.train_prompts,
        "validation": training.validation_prompts,
        "testing": training.test_prompts,
    }
    return [_split(spec, context, prompts) for context, prompts in splits.items()]


def _split(spec: SweepSpec, context: str, prompts: int) -> Input:
    about = {"task": spec.task, **asdict(spec.data), "context": context, "prompts": prompts}
    kind, source = _source(spec)
    return {
        "name": spec.data.source or spec.task,
        "digest": hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:DIGITS],
        "source_type": kind,
        "source": json.dumps(source),
        "profile": json.dumps({"num_rows": prompts}),
        "context": context,
    }


def _source(spec: SweepSpec) -> tuple[str, dict[str, str]]:
    """Type and content of a source, in the words of MLflow's own sources."""
    data = spec.data
    if not data.source:
        return "code", {"task": spec.task}  # the task writes its own prompts
    if data.is_local:
        return "local", {"uri": data.source}
    return "hf", {"path": data.source, "config_name": data.config, "split": data.split}
