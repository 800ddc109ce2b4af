"""Files that are published: the numbers of a sweep, and a kept policy.

`sweep.json` has the trials and the front as numbers, by the fields that are listed here, and names
that this package, the space or the task declares. Prompts, completions and texts stay behind.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gdpo_tune.core.errors import UsageError
from gdpo_tune.core.files import HUB_ID
from gdpo_tune.core.metrics import COST_METRICS
from gdpo_tune.core.parameters import ParameterInfo, list_parameters
from gdpo_tune.core.registry import POLICIES, TASKS
from gdpo_tune.core.task_files import load_task_info
from gdpo_tune.core.task_info import TaskInfo
from gdpo_tune.core.trial_files import ADAPTER, ADAPTER_CONFIG, find_adapter
from gdpo_tune.core.trials import Estimate, Params, TrialRecord
from gdpo_tune.core.trl_fields import TRL_FIELDS
from gdpo_tune.policies.load_policy import resolve_policy
from gdpo_tune.results.open_sweep import Sweep
from gdpo_tune.results.public_record import list_public_versions, name_policy
from gdpo_tune.spec import SweepSpec
from gdpo_tune.spec.space import Space

NUMBERS = "sweep.json"
"""File with the numbers of a sweep."""
OWN = "own"
"""Stands for a task, or a policy, that is a file or a directory of its author."""


def build_record(sweep: Sweep) -> dict[str, Any]:
    """Return the numbers of a sweep, as `sweep.json` has them."""
    spec, front = sweep.spec, sweep.front
    policy = spec.policy
    is_known = policy in POLICIES or (name_policy(policy) == policy and HUB_ID.fullmatch(policy))
    info = load_task_info(spec.task, spec.space.domains)
    interval = front.hypervolume_interval
    return {
        "task": spec.task if spec.task in TASKS else OWN,
        "policy": policy if is_known else OWN,
        "objectives": {
            goal.name: {"direction": goal.direction, "reference": goal.reference}
            for goal in front.objectives
        },
        "training": _select_numbers(spec.training.model_dump()),
        "lora_rank": spec.model.lora_rank,
        "versions": list_public_versions(sweep.sessions[-1]) if sweep.sessions else {},
        "hypervolume": {
            name: _check_finite(value)
            for name, value in zip(
                ("value", "low", "high"), (front.hypervolume, *interval), strict=True
            )
        },
        "front": [member.name for member in front.members],
        "knee": front.knee.name if front.knee else None,
        "trials": [_build_trial(record, spec.space, info) for record in sweep.records],
    }


def _build_trial(record: TrialRecord, space: Space, info: TaskInfo) -> dict[str, Any]:
    """Return the numbers of a trial, under the names that its task declares."""
    metrics = info.metrics
    return {
        "number": record.number,
        "name": record.name,
        "role": record.role,
        "state": record.state,
        "proposer": record.proposer,
        "seed": record.seed,
        "replicate_of": record.replicate_of,
        "feasible": record.feasible,
        "ends_at": record.ends_at,
        "params": _select_params(
            space.drop_inactive(record.trained_params), list_parameters(info) | TRL_FIELDS
        ),
        "parts": [asdict(part) for part in record.parts],
        "cost": _select_numbers(asdict(record.cost)),
        "validation": _select_estimates(record.validation, metrics),
        "test": _select_estimates(record.test, metrics),
        "rungs": [
            {
                "step": rung.step,
                "completions": rung.completions,
                "validation": _select_estimates(rung.validation, metrics),
            }
            for rung in record.rungs
        ],
    }


def _select_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are numbers or booleans; names are those of our own settings."""
    return {n: _check_finite(v) for n, v in values.items() if isinstance(v, bool | int | float)}


def _select_params(params: Params, known: Mapping[str, ParameterInfo]) -> dict[str, Any]:
    """Return the values of known parameters: numbers, and choices that they declare."""
    return {
        name: value
        for name, value in params.items()
        if name in known and (not isinstance(value, str) or value in known[name].choices)
    }


def _select_estimates(
    estimates: Mapping[str, Estimate], names: Collection[str]
) -> dict[str, dict[str, float | None]]:
    """Return mean and standard error of the metrics that a task declares, and of costs."""
    known = {*names, *COST_METRICS}
    return {
        name: {"mean": _check_finite(estimate.mean), "se": _check_finite(estimate.se)}
        for name, estimate in estimates.items()
        if name in known
    }


def _check_finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no NaN


PUBLISHED = (
    *("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json"),
    *("tokenizer*", "vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template*", "prompts.json", "initial_policy.json", ADAPTER_CONFIG),
)
"""Files of a checkpoint that readers need; the state of a trainer stays behind."""
NAMES_OF_BASE = ("base_model_name_or_path", "_name_or_path", "name_or_path")
"""Keys with the place from which a policy or its base was loaded."""


@dataclass(frozen=True)
class PolicyFiles:
    """Policy of one candidate."""

    directory: Path
    """Its place on this machine."""
    files: Mapping[str, Path | bytes]
    """Path in a repository -> file of this machine, or content."""
    is_adapter: bool
    """True if the directory has an adapter alone: the weights below it are written for a reader."""
    has_adapter: bool
    """True if an adapter is published beside the whole policy."""


def collect_policy_files(sweep: Sweep, directory: Path) -> PolicyFiles:
    """Collect the files of a policy, whose JSON names no directory here; refuse missing weights.

    Of an adapter alone these are the small files: `publish` writes its policy whole.
    """
    files: dict[str, Path | bytes] = {}
    is_adapter, has_base = (directory / ADAPTER_CONFIG).is_file(), sweep.spec.start is None
    # An adapter would need the start below it, which is published nowhere.
    for prefix in ("", f"{ADAPTER}/") if has_base else ("",):
        for pattern in PUBLISHED:
            for path in sorted((directory / prefix).glob(pattern)):
                if is_adapter and path.name.startswith("adapter_"):
                    continue
                is_config = path.suffix == ".json" and path.name != "tokenizer.json"
                files[prefix + path.name] = _clean_config(path, sweep.spec) if is_config else path
    if not any(directory.glob("*.safetensors")):
        raise UsageError(
            f"{directory} has no weights as *.safetensors\n    fix: train the policy again"
        )
    return PolicyFiles(
        directory,
        files,
        is_adapter=is_adapter,
        has_adapter=has_base and find_adapter(directory) is not None,
    )


def _clean_config(path: Path, spec: SweepSpec) -> bytes:
    """Return a JSON file in which the base has its name for others, and its revision."""
    content: Any = json.loads(path.read_bytes())
    if not isinstance(content, dict):
        return path.read_bytes()
    place, revision = resolve_policy(spec.policy), spec.model.revision
    changed = {
        key: name_policy(spec.policy if value == place else str(value))
        for key, value in content.items()
        if key in NAMES_OF_BASE and value
    }
    if path.name == ADAPTER_CONFIG and revision:  # older adapters do not name it
        changed["revision"] = content.get("revision") or revision
    if all(content.get(key) == value for key, value in changed.items()):
        return path.read_bytes()
    return (json.dumps(content | changed, indent=2) + "\n").encode()
